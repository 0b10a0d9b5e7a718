"""Scripts of others, and the lines that are others: data of `foreign.py`.

Of each edit the old text stands in the original and is replaced: `small` is what makes it run in seconds, without a
download, and in float64; `ours` is what meshwise asks for; `kept` the lines more with which it goes on where it was
stopped; `shown` prints losses in full. `import torch` is followed by the dtype, a seed and `import meshwise as mw`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign_on_fake import COMMIT
from foreign_programs import PROGRAMS, SHOWN, Edit, nothing, pictures

EXAMPLES, TUTORIAL = (
    ("pytorch/examples", COMMIT),
    ("yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db"),
)
DRAWS = "--exact-random"  # noise and dropout of one device
BY_EPOCH: dict[str, Any] = {  # a state at the end of each epoch alone
    "stop_after": 40,
    "keeps": "--save-every=1",
    "advised": (
        ("main.py", "mw.save(model, args.save)", "mw.save(model.state_dict(), args.save)"),
        ("main.py", "        model = torch.load(f)\n", "        model.load_state_dict(torch.load(f))\n"),
    ),
}
KEYED = "draws in a loop, or in its model, are keyed by the batch (docs/loops.md): another stream than plain python's"


@dataclass(frozen=True)
class Script:
    """A script in a folder of a repository. beside: other folders that it needs. saved: the state_dict that it leaves.
    advised: what the sentence of a refusal asks for. stop_after: losses after which it is stopped. keeps: options with
    which its state is saved as it goes. within: the bounds of pairs whose numbers may differ, for the reason `why`."""

    source: tuple[str, str]
    folder: str
    ours: tuple[Edit, ...]
    kept: tuple[Edit, ...]
    shown: tuple[Edit, ...]
    small: tuple[Edit, ...] = ()
    script: str = "main.py"
    arguments: str = ""
    options: str = ""
    data: Callable[[Path], None] = nothing
    beside: tuple[str, ...] = ()
    saved: str = ""
    advised: tuple[Edit, ...] = ()
    stop_after: int = 5
    keeps: str = ""
    within: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


def main_py(*pairs: tuple[str, str], file: str = "main.py") -> tuple[Edit, ...]:
    """Edits of one file."""
    return tuple((file, old, new) for old, new in pairs)


def of_examples(name: str, kept: tuple[Edit, ...], added: str = "", options: str = "", **more: Any) -> Script:
    """One that `foreign_on_fake.py` has too. added: arguments."""
    one = PROGRAMS[name]
    return Script(
        EXAMPLES,
        one.folder,
        one.ours,
        kept,
        one.shown,
        one.small,
        one.script,
        f"{one.arguments} {added}",
        options,
        one.data,
        saved=one.saved if one.saved != "model.pt" else "",
        **more,
    )


def graph(folder: Path) -> None:
    """Cora's files, of 60 papers."""
    draw = random.Random(0)
    (folder / "cora").mkdir()
    papers = [(100 + i, draw.randrange(3)) for i in range(60)]
    rows = [
        [paper, *(int(draw.random() < 0.2 + 0.3 * (k % 3 == kind)) for k in range(24)), f"kind{kind}"]
        for paper, kind in papers
    ]
    (folder / "cora" / "cora.content").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    links = sorted({(draw.randrange(60), draw.randrange(60)) for _ in range(150)})
    (folder / "cora" / "cora.cites").write_text("".join(f"{100 + a}\t{100 + b}\n" for a, b in links if a != b))


def photos(folder: Path) -> None:
    """Pictures of BSDS300's names, small ones."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for split, count in (("train", 22), ("test", 7)):
        place = folder / "dataset" / "BSDS300" / "images" / split
        place.mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw.integers(0, 255, (24, 24, 3)).astype("uint8")).save(place / f"{number:03d}.png")


def words(folder: Path) -> None:
    """Names, one a line, and a text of them."""
    draw = random.Random(0)
    names = ["".join(draw.choice("abcde") for _ in range(draw.randrange(3, 8))) for _ in range(150)]
    (folder / "names.txt").write_text("\n".join(names) + "\n")
    (folder / "data").mkdir(exist_ok=True)
    text = "\n".join(" ".join(draw.choice(names[:40]) for _ in range(draw.randrange(4, 9))) for _ in range(120))
    (folder / "data" / "train.txt").write_text(text + "\n")


def tokens(folder: Path) -> None:
    """nanoGPT's files of tokens."""
    import pickle

    import numpy

    draw = numpy.random.default_rng(0)
    place = folder / "data" / "made"
    place.mkdir(parents=True)
    for split, count in (("train", 2000), ("val", 400)):
        numpy.cumsum(draw.integers(0, 5, count)).astype("uint16").__mod__(31).tofile(place / f"{split}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 31}))


EPOCHS = "    for epoch in range(1, args.epochs + 1):\n"
GOES_ON = "    for epoch in range(1 + saved.epoch, args.epochs + 1):\n"
MNIST_KEPT = main_py(
    (
        EPOCHS,
        '    saved = mw.checkpoint("state", model=model, optimizer=optimizer, scheduler=scheduler,\n'
        f"                          loader=train_loader)\n{GOES_ON}",
    )
)
VAE_KEPT = main_py(
    (
        EPOCHS,
        '    saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=[train_loader, test_loader])\n'
        + GOES_ON,
    )
)


def text_kept(optimizer: str) -> tuple[Edit, ...]:
    """A state at the end of each epoch: the loop has no loader."""
    return main_py(
        (
            "best_val_loss = None\n",
            'best_val_loss = None\nstate = {"epoch": 1, "lr": lr, "best": 0.0}\n'
            f'saved = mw.checkpoint("state", model=model, {optimizer}extra=state)\n'
            'lr, best_val_loss = state["lr"], state["best"]\n',
        ),
        ("range(1, args.epochs+1)", 'range(state["epoch"], args.epochs+1)'),
        (
            "            lr /= 4.0\n",
            "            lr /= 4.0\n        state.update(epoch=epoch + 1, lr=lr, best=best_val_loss)\n"
            "        saved.step_done()\n",
        ),
    )


def tutorial(
    folder: str,
    small: tuple[tuple[str, str], ...],
    shown: str = "    print('Test Accuracy",
    counted: str = "(predicted == labels).sum().item()",
    **more: Any,
) -> Script:
    """One of yunjey's, over MNIST."""
    return Script(
        TUTORIAL,
        folder,
        main_py(
            (
                "# Train the model\n",
                "model, optimizer, train_loader, test_loader = mw.distribute(\n"
                "    model, optimizer, train_loader, test_loader)\n"
                "# Train the model\n",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss)\n"),
            ("total += labels.size(0)", "total += mw.sum(labels.size(0))"),
            (f"correct += {counted}", f"correct += mw.sum({counted})"),
            ("torch.save(model", "mw.save(model"),
        ),
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=train_loader)\n'
                "for epoch in range(saved.epoch, num_epochs):\n",
            )
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            (shown, f"    {SHOWN.format('float(correct / total)')}\n{shown}"),
        ),
        main_py(("'../../data", "'../data"), ("batch_size = 100", "batch_size = 30"), *small),
        data=pictures,
        saved="model.ckpt",
        **more,
    )


WHOLE_GRAPH = main_py(
    ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    input = mw.split(input, whole=True)\n"),
    ("    loss.backward()\n", "    loss = mw.backward(loss)\n"),
)
GRAPH_SHOWN = main_py(
    (
        "    if epoch % print_every == 0:\n",
        f"    {SHOWN.format('loss_train')}, {SHOWN.format('loss_val')}\n    if epoch % print_every == 0:\n",
    ),
    ("    print(f'Test set results", f"    {SHOWN.format('loss_test')}\n    print(f'Test set results"),
)


def graph_net(name: str, model: str, small: tuple[tuple[str, str], ...], arguments: str) -> Script:
    """A net over one graph, which runs whole on every rank."""
    return Script(
        EXAMPLES,
        name,
        WHOLE_GRAPH
        + main_py(
            (
                "    criterion = nn.NLLLoss()\n",
                f"    criterion = nn.NLLLoss()\n    {model}, optimizer = mw.distribute({model}, optimizer)\n",
            )
        ),
        main_py(
            (
                "    for epoch in range(args.epochs):\n",
                '    state = {"epoch": 0}\n'
                f'    saved = mw.checkpoint("state", model={model}, optimizer=optimizer, extra=state)\n'
                '    for epoch in range(state["epoch"], args.epochs):\n',
            ),
            (
                "        if args.dry_run:\n",
                '        state["epoch"] = epoch + 1\n        saved.step_done()\n        if args.dry_run:\n',
            ),
        ),
        GRAPH_SHOWN,
        main_py(("torch.FloatTensor(", "torch.DoubleTensor("), *small),
        arguments=arguments,
        options=DRAWS,
        data=graph,
        within={"resumed": 0.05},
        why="dropout of a loop without a loader draws anew where it goes on (docs/checkpoints.md)",
    )


SCRIPTS: dict[str, Script] = {
    "examples/mnist": of_examples("mnist", MNIST_KEPT),
    "examples/mnist_rnn": of_examples("mnist_rnn", MNIST_KEPT),
    "examples/vae": of_examples("vae", VAE_KEPT, options=DRAWS),
    "examples/word_language_model, Transformer": of_examples(
        "word_language_model, Transformer", text_kept(""), "--epochs 5 --nhead 2", **BY_EPOCH
    ),
    "examples/word_language_model, LSTM": of_examples(
        "word_language_model, LSTM", text_kept("optimizer=optimizer, "), "--epochs 5", **BY_EPOCH
    ),
    "examples/regression": of_examples(
        "regression",
        main_py(
            (
                "\nfor batch_idx in count(1):\n",
                '\nstate = {"batch": 1}\nsaved = mw.checkpoint("state", model=fc, extra=state)\n'
                'for batch_idx in count(state["batch"]):\n',
            ),
            (
                "    # Stop criterion\n",
                '    state["batch"] = batch_idx + 1\n    saved.step_done()\n    # Stop criterion\n',
            ),
        ),
        advised=main_py(
            (
                "poly_desc(fc.weight.view(-1), fc.bias)",
                "poly_desc(fc.weight.full_tensor().view(-1), fc.bias.full_tensor())",
            )
        ),
    ),
    "examples/time_sequence_prediction": of_examples(
        "time_sequence_prediction",
        main_py(
            (
                "    for i in range(opt.steps):\n",
                '    state = {"i": 0}\n'
                '    saved = mw.checkpoint("state", model=seq, optimizer=optimizer, extra=state)\n'
                '    for i in range(state["i"], opt.steps):\n',
            ),
            (
                "        # draw the result\n",
                '        state["i"] = i + 1\n        saved.step_done()\n        # draw the result\n',
            ),
            file="train.py",
        ),
        "--steps 4",
        stop_after=45,
        keeps="--save-every=1",
        within=dict.fromkeys(("2", "3", "resumed"), 1e-5),
        why="LBFGS: plain python with each start weight moved by one rounding or none ends 1.5e-6 and 1.8e-6 apart",
    ),
    "examples/super_resolution": Script(
        EXAMPLES,
        "super_resolution",
        main_py(
            (
                "\n\ndef train(epoch):\n",
                "\nmodel, optimizer, training_data_loader, testing_data_loader = mw.distribute(\n"
                "    model, optimizer, training_data_loader, testing_data_loader)\n\n\ndef train(epoch):\n",
            ),
            (
                "        epoch_loss += loss.item()\n        loss.backward()\n",
                "        loss = mw.backward(loss)\n        epoch_loss += loss.item()\n",
            ),
            ("log10(1 / mse.item())", "log10(1 / mw.mean(mse.item()))"),
            ("torch.save(model", "mw.save(model"),
        ),
        main_py(
            (
                "for epoch in range(1, opt.nEpochs + 1):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=training_data_loader)\n'
                "for epoch in range(1 + saved.epoch, opt.nEpochs + 1):\n",
            )
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            ("            avg_psnr += psnr\n", f"            avg_psnr += psnr\n            {SHOWN.format('psnr')}\n"),
        ),
        (("data.py", "calculate_valid_crop_size(256,", "calculate_valid_crop_size(24,"),),
        advised=main_py(("mw.save(model, model_out_path)", "mw.save(model.state_dict(), model_out_path)")),
        arguments="--upscale_factor 2 --threads 0 --batchSize 4 --testBatchSize 3 --nEpochs 4 --lr 0.001",
        data=photos,
    ),
    "examples/dcgan": Script(
        EXAMPLES,
        "dcgan",
        main_py(
            (
                "if opt.dry_run:\n    opt.niter = 1\n",
                "netG, netD, optimizerG, optimizerD, dataloader = mw.distribute(\n"
                "    netG, netD, optimizerG, optimizerD, dataloader)\nif opt.dry_run:\n    opt.niter = 1\n",
            ),
            ("        errD_real.backward()\n", "        errD_real = mw.backward(errD_real)\n"),
            ("        errD_fake.backward()\n", "        errD_fake = mw.backward(errD_fake)\n"),
            ("        errG.backward()\n", "        errG = mw.backward(errG)\n"),
            ("    torch.save(net", "    mw.save(net"),
        ),
        main_py(
            (
                "for epoch in range(opt.niter):\n",
                'saved = mw.checkpoint("state", model=[netG, netD], optimizer=[optimizerG, optimizerD],\n'
                "                      loader=dataloader)\n"
                "for epoch in range(saved.epoch, opt.niter):\n",
            )
        ),
        main_py(
            (
                "        optimizerG.step()\n",
                f"        optimizerG.step()\n        {SHOWN.format('errD.item()')}, {SHOWN.format('errG.item()')}\n",
            )
        ),
        main_py(("dset.FakeData(image_size", "dset.FakeData(size=20, image_size")),
        arguments="--dataset fake --workers 0 --batchSize 6 --ngf 4 --ndf 4 --nz 8 --niter 3 --manualSeed 1",
        options=DRAWS,
        data=nothing,
        saved="netD_epoch_2.pth",
    ),
    "examples/gcn": graph_net(
        "gcn",
        "gcn",
        (
            ("    with requests.get(cora_url, stream=True) as tgz_file:\n", "    if False:\n"),
            ("idx[:1000], idx[1000:1500], idx[1500:]", "idx[:15], idx[15:30], idx[30:]"),
        ),
        "--epochs 15",
    ),
    "examples/gat": graph_net(
        "gat",
        "gat_net",
        (("idx[:1200], idx[1200:1600], idx[1600:]", "idx[:15], idx[15:30], idx[30:]"),),
        "--epochs 15 --hidden-dim 16 --num-heads 2",
    ),
    "tutorial/language_model": Script(
        TUTORIAL,
        "tutorials/02-intermediate/language_model",
        main_py(
            ("# Train the model\n", "model, optimizer = mw.distribute(model, optimizer)\n# Train the model\n"),
            (
                "torch.zeros(num_layers, batch_size, hidden_size).to(device))\n",
                "torch.zeros(num_layers, batch_size, hidden_size).to(device))\n    states = mw.split(states, dim=1)\n",
            ),
            (
                "        # Forward pass\n",
                "        inputs, targets = mw.split(inputs, targets)\n        # Forward pass\n",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss)\n"),
            ("torch.save(model", "mw.save(model"),
        ),
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                'state = {"epoch": 0}\nsaved = mw.checkpoint("state", model=model, optimizer=optimizer, extra=state)\n'
                'for epoch in range(state["epoch"], num_epochs):\n',
            ),
            ("# Test the model\n", '    state["epoch"] = epoch + 1\n    saved.step_done()\n\n# Test the model\n'),
        ),
        main_py(("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n")),
        main_py(
            ("embed_size = 128", "embed_size = 8"),
            ("hidden_size = 1024", "hidden_size = 16"),
            ("num_samples = 1000 ", "num_samples = 5 "),
            ("batch_size = 20", "batch_size = 7"),
            ("seq_length = 30", "seq_length = 12"),
        ),
        data=words,
        stop_after=25,
        keeps="--save-every=1",
        saved="model.ckpt",
    ),
    "tutorial/generative_adversarial_network": Script(
        TUTORIAL,
        "tutorials/03-advanced/generative_adversarial_network",
        main_py(
            (
                "# Start training\n",
                "D, G, d_optimizer, g_optimizer, data_loader = mw.distribute(\n"
                "    D, G, d_optimizer, g_optimizer, data_loader)\n"
                "# Start training\n",
            ),
            ("        d_loss.backward()\n", "        d_loss = mw.backward(d_loss)\n"),
            ("        g_loss.backward()\n", "        g_loss = mw.backward(g_loss)\n"),
            ("torch.save(", "mw.save("),
        ),
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                'saved = mw.checkpoint("state", model=[D, G], optimizer=[d_optimizer, g_optimizer],\n'
                "                      loader=data_loader)\n"
                "for epoch in range(saved.epoch, num_epochs):\n",
            )
        ),
        main_py(
            (
                "        g_optimizer.step()\n",
                f"        g_optimizer.step()\n        {SHOWN.format('d_loss.item()')}\n"
                f"        {SHOWN.format('g_loss.item()')}\n",
            )
        ),
        main_py(
            ("'../../data", "'../data"),
            ("hidden_size = 256", "hidden_size = 32"),
            ("num_epochs = 200", "num_epochs = 4"),
            ("batch_size = 100", "batch_size = 50"),
            ("images.reshape(batch_size, -1)", "images.reshape(len(images), -1)"),
            ("(batch_size, 1)", "(len(images), 1)"),
            ("torch.randn(batch_size, latent_size)", "torch.randn(len(images), latent_size)"),
        ),
        options=DRAWS,
        data=pictures,
        saved="D.ckpt",
    ),
    "tutorial/variational_autoencoder": Script(
        TUTORIAL,
        "tutorials/03-advanced/variational_autoencoder",
        main_py(
            (
                "# Start training\n",
                "model, optimizer, data_loader = mw.distribute(model, optimizer, data_loader)\n# Start training\n",
            ),
            ("        loss.backward()\n", '        loss = mw.backward(loss, reduction="sum")\n'),
        ),
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=data_loader)\n'
                "for epoch in range(saved.epoch, num_epochs):\n",
            )
        ),
        main_py(("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n")),
        main_py(
            ("'../../data", "'../data"),
            ("h_dim = 400", "h_dim = 24"),
            ("num_epochs = 15", "num_epochs = 4"),
            ("batch_size = 128", "batch_size = 50"),
        ),
        options=DRAWS,
        within=dict.fromkeys(("2", "3", "resumed"), 0.02),
        why="behind its loop it draws noise for the last batch, of which each rank has its rows: another stream then",
        data=pictures,
    ),
    "makemore": Script(
        ("karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4"),
        "",
        main_py(
            (
                "        self.train_loader = DataLoader(dataset, sampler=train_sampler, **kwargs)\n",
                "        self.train_loader = mw.distribute(DataLoader(dataset, sampler=train_sampler, **kwargs))\n",
            ),
            (
                "    # training loop\n",
                "    model, optimizer = mw.distribute(model, optimizer)\n    # training loop\n",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss, weight=(Y != -1).sum())\n"),
            ("                torch.save(model", "                mw.save(model"),
            file="makemore.py",
        ),
        main_py(
            ("        self.data_iter = iter(self.train_loader)\n\n    def next", "\n    def next"),
            (
                "    best_loss = None\n    step = 0\n",
                '    best_loss = None\n    state = {"step": 0, "best": 1e9}\n'
                '    saved = mw.checkpoint("state", model=model, optimizer=optimizer,\n'
                "                          loader=batch_loader.train_loader, extra=state)\n"
                "    batch_loader.data_iter = iter(batch_loader.train_loader)\n"
                '    step, best_loss = state["step"], state["best"]\n',
            ),
            (
                "        step += 1\n",
                "        step += 1\n        state.update(step=step, best=best_loss)\n",
            ),
            file="makemore.py",
        ),
        main_py(
            ("        # logging\n", f"        {SHOWN.format('loss.item()')}\n        # logging\n"),
            (
                "            writer.flush()\n",
                f"            writer.flush()\n            {SHOWN.format('train_loss')}, {SHOWN.format('test_loss')}\n",
            ),
            file="makemore.py",
        ),
        main_py(
            (
                "from torch.utils.tensorboard import SummaryWriter\n",
                "from unittest.mock import MagicMock as SummaryWriter\n",
            ),
            ("step > 0 and step % 500 == 0", "step > 0 and step % 10 == 0"),
            file="makemore.py",
        ),
        script="makemore.py",
        arguments="-n 0 --max-steps 31 --n-layer 2 --n-embd 16 --n-head 2 -b 10",
        options=DRAWS,
        data=words,
        saved="out/model.pt",
    ),
    "minGPT, adder": Script(
        ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26"),
        "projects/adder",
        main_py(
            (
                "        model.train()\n        self.iter_num = 0\n",
                "        model, self.optimizer, train_loader = mw.distribute(model, self.optimizer, train_loader)\n"
                "        model.train()\n        self.iter_num = 0\n",
            ),
            ("            self.loss.backward()\n", "            self.loss = mw.backward(self.loss)\n"),
            file="mingpt/trainer.py",
        ),
        main_py(
            (
                "        data_iter = iter(train_loader)\n        while True:\n",
                '        state = {"iter": 0}\n'
                '        saved = mw.checkpoint("state", model=model, optimizer=self.optimizer, loader=train_loader,\n'
                "                              extra=state)\n"
                '        self.iter_num = state["iter"]\n        data_iter = iter(train_loader)\n        while True:\n',
            ),
            (
                "            self.iter_num += 1\n",
                '            self.iter_num += 1\n            state["iter"] = self.iter_num\n',
            ),
            file="mingpt/trainer.py",
        ),
        main_py(
            (
                "            self.optimizer.step()\n",
                f"            self.optimizer.step()\n            {SHOWN.format('self.loss.item()')}\n",
            ),
            file="mingpt/trainer.py",
        ),
        script="adder.py",
        arguments="--trainer.max_iters=30 --trainer.num_workers=0 --trainer.batch_size=20 --model.model_type=gpt-nano",
        options=DRAWS,
        beside=("mingpt",),
    ),
    "nanoGPT": Script(
        ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
        "",
        main_py(
            ("int(os.environ.get('RANK', -1)) != -1", "False"),
            (
                "        x, y = x.to(device), y.to(device)\n    return x, y\n",
                "        x, y = x.to(device), y.to(device)\n    return mw.split(x, y)\n",
            ),
            (
                "# compile the model\n",
                "model, optimizer = mw.distribute(model, optimizer)\n# compile the model\n",
            ),
            ("            losses[k] = loss.item()\n", "            losses[k] = mw.mean(loss.item())\n"),
            (
                "        scaler.scale(loss).backward()\n",
                "        last = micro_step == gradient_accumulation_steps - 1\n"
                "        with nullcontext() if last else mw.accumulate():\n"
                "            loss = mw.backward(scaler.scale(loss))\n",
            ),
            ("                torch.save(checkpoint", "                mw.save(checkpoint"),
            file="train.py",
        ),
        main_py(
            (
                "# training loop\n",
                'state = {"iter": 0, "best": 1e9}\n'
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, extra=state)\n'
                'iter_num, best_val_loss = state["iter"], state["best"]\n# training loop\n',
            ),
            (
                "    local_iter_num += 1\n",
                "    local_iter_num += 1\n    state.update(iter=iter_num, best=float(best_val_loss))\n"
                "    saved.step_done()\n",
            ),
            file="train.py",
        ),
        main_py(
            (
                "    # timing and logging\n",
                f"    {SHOWN.format('loss.item()')}\n    # timing and logging\n",
            ),
            (
                "        losses = estimate_loss()\n",
                f"        losses = estimate_loss()\n        {SHOWN.format('float(losses[' + repr('val') + '])')}\n",
            ),
            file="train.py",
        ),
        main_py(
            ("X, Y = get_batch('train') # fetch the very first batch\n", ""),
            ("        X, Y = get_batch('train')\n", ""),
            (
                "        with ctx:\n            logits, loss = model(X, Y)\n            loss = loss /",
                "        X, Y = get_batch('train')\n        with ctx:\n"
                "            logits, loss = model(X, Y)\n            loss = loss /",
            ),
            file="train.py",
        ),
        script="train.py",
        arguments="--dataset=made --device=cpu --compile=False --dtype=float32 --eval_iters=2 --eval_interval=5 "
        "--batch_size=5 --block_size=8 --n_layer=2 --n_head=2 --n_embd=16 --max_iters=12 "
        "--gradient_accumulation_steps=2 --warmup_iters=2 --lr_decay_iters=12",
        data=tokens,
    ),
    "PyTorch-GAN, gan": Script(
        ("eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e"),
        "implementations/gan",
        main_py(
            (
                "# ----------\n#  Training\n# ----------\n",
                "generator, discriminator, optimizer_G, optimizer_D, dataloader = mw.distribute(\n"
                "    generator, discriminator, optimizer_G, optimizer_D, dataloader)\n",
            ),
            ("        g_loss.backward()\n", "        g_loss = mw.backward(g_loss)\n"),
            ("        d_loss.backward()\n", "        d_loss = mw.backward(d_loss)\n"),
            file="gan.py",
        ),
        main_py(
            (
                "for epoch in range(opt.n_epochs):\n",
                'saved = mw.checkpoint("state", model=[generator, discriminator],\n'
                "                      optimizer=[optimizer_G, optimizer_D], loader=dataloader)\n"
                "for epoch in range(saved.epoch, opt.n_epochs):\n",
            ),
            file="gan.py",
        ),
        main_py(
            (
                "        optimizer_D.step()\n",
                f"        optimizer_D.step()\n        {SHOWN.format('d_loss.item()')}\n"
                f"        {SHOWN.format('g_loss.item()')}\n",
            ),
            file="gan.py",
        ),
        main_py(
            ("else torch.FloatTensor", "else torch.DoubleTensor"),
            ("../../data/mnist", "../data"),
            ("np.random.normal(0, 1, (imgs.shape[0], opt.latent_dim))", "torch.randn(imgs.shape[0], opt.latent_dim)"),
            (
                "Variable(Tensor(torch.randn(imgs.shape[0], opt.latent_dim)))",
                "Variable(torch.randn(imgs.shape[0], opt.latent_dim))",
            ),
            file="gan.py",
        ),
        script="gan.py",
        arguments="--n_epochs 4 --batch_size 50 --latent_dim 8 --n_cpu 0",
        options=DRAWS,
        data=pictures,
    ),
    "tutorial/convolutional": tutorial(
        "tutorials/02-intermediate/convolutional_neural_network",
        (("num_epochs = 5", "num_epochs = 2"),),
        within=dict.fromkeys(("2", "3", "resumed", "shard=2", "tensor=2"), 1e-6),
        why="of weights: the gradient of a bias before a batch norm is rounding alone, which Adam divides by its size",
    ),
    "tutorial/recurrent": tutorial(
        "tutorials/02-intermediate/recurrent_neural_network", (("hidden_size = 128", "hidden_size = 16"),)
    ),
    "tutorial/logistic_regression": tutorial(
        "tutorials/01-basics/logistic_regression", (), "    print('Accuracy", "(predicted == labels).sum()"
    ),
    "tutorial/feedforward": tutorial("tutorials/01-basics/feedforward_neural_network", (), "    print('Accuracy"),
    "tutorial/bidirectional_recurrent": tutorial(
        "tutorials/02-intermediate/bidirectional_recurrent_neural_network", (("hidden_size = 128", "hidden_size = 16"),)
    ),
}
