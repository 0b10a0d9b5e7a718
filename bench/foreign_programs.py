"""Programs of pytorch/examples, and the lines that are others: data of `foreign_on_fake.py`.

Of each edit the old text stands in the original once and is replaced: `ours` is what meshwise asks for, `small` what
makes the program run in seconds and draw alike on a CPU and a GPU (no dropout, for CUDA draws other numbers than the
CPU; the same loader on both; a device), `shown` prints each loss in full.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Edit = tuple[str, str, str]  # the file, the old text, the new
SHOWN = 'mw.print("loss", repr({}))'


@dataclass(frozen=True)
class Program:
    """A program in a folder of pytorch/examples. saved: the weights that it leaves. why: why its numbers may differ,
    by at most `within` (relative)."""

    folder: str
    arguments: str
    data: Callable[[Path], None]
    ours: tuple[Edit, ...]
    small: tuple[Edit, ...]
    shown: tuple[Edit, ...]
    script: str = "main.py"
    saved: str = ""
    within: float = 0.0
    why: str = ""


def pictures(folder: Path) -> None:
    """MNIST's files, of bars under noise instead of digits: 197 to train with and 61 to test."""
    import numpy

    draw = numpy.random.default_rng(0)
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for word, count in (("train", 197), ("t10k", 61)):
        labels = draw.integers(0, 10, count).astype("uint8")
        shown = draw.integers(0, 60, (count, 28, 28)).astype("uint8")
        for picture, label in zip(shown, labels, strict=True):
            picture[2 * label : 2 * label + 6, 4:24] += 150
        sizes = numpy.array([count, 28, 28], ">i4").tobytes()
        (raw / f"{word}-images-idx3-ubyte").write_bytes(b"\0\0\10\3" + sizes + shown.tobytes())
        (raw / f"{word}-labels-idx1-ubyte").write_bytes(b"\0\0\10\1" + sizes[:4] + labels.tobytes())
    (folder / "results").mkdir(exist_ok=True)


def sentences(folder: Path) -> None:
    """Three texts of sentences that count."""
    draw = random.Random(0)
    (folder / "text").mkdir(exist_ok=True)
    for word, count in (("train", 90), ("valid", 30), ("test", 30)):
        starts = [draw.randrange(40) for _ in range(count)]
        lines = [" ".join(f"w{(start + i) % 47}" for i in range(4 + start % 9)) for start in starts]
        (folder / "text" / f"{word}.txt").write_text("\n".join(lines) + "\n")


def nothing(folder: Path) -> None:
    """It makes its own."""


def waves(folder: Path) -> None:
    """Those of generate_sine_wave.py, shorter."""
    import numpy
    import torch

    x = numpy.arange(40) + numpy.random.default_rng(2).integers(-80, 80, (14, 1))
    torch.save(numpy.sin(x / 20.0), folder / "traindata.pt", pickle_protocol=4)


LSTM = "CUDA adds an LSTM cell's biases after its products, the CPU in them (_thnn_fused_lstm_cell)"
IMPORT = "import torch\n", "import torch\nimport meshwise as mw\n"
MNIST_OURS = (
    ("main.py", *IMPORT),
    (
        "main.py",
        "    for epoch in range(1, args.epochs + 1):\n",
        "    model, optimizer, scheduler, train_loader, test_loader = mw.distribute(\n"
        "        model, optimizer, scheduler, train_loader, test_loader)\n"
        "    for epoch in range(1, args.epochs + 1):\n",
    ),
    ("main.py", "        loss.backward()\n", "        loss = mw.backward(loss)\n"),
    (
        "main.py",
        "F.nll_loss(output, target, reduction='sum').item()",
        "mw.sum(F.nll_loss(output, target, reduction='sum').item())",
    ),
    ("main.py", "pred.eq(target.view_as(pred)).sum().item()", "mw.sum(pred.eq(target.view_as(pred)).sum().item())"),
    ("main.py", "        torch.save(model", "        mw.save(model"),
)
MNIST_SHOWN = (
    ("main.py", "        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
    (
        "main.py",
        "    test_loss /= len(test_loader.dataset)\n",
        f"    test_loss /= len(test_loader.dataset)\n    {SHOWN.format('test_loss')}, {SHOWN.format('correct')}\n",
    ),
)
TEXT_OURS = (
    ("main.py", *IMPORT),
    (
        "main.py",
        "lr=args.lr)\n\n",
        "lr=args.lr)\n    model, optimizer = mw.distribute(model, optimizer)\n"
        "else:\n    model = mw.distribute(model)\n\n",
    ),
    (
        "main.py",
        "    data = source[i:i+seq_len]\n    target = source[i+1:i+1+seq_len].view(-1)\n    return data, target\n",
        "    data, target = mw.split(source[i:i+seq_len], source[i+1:i+1+seq_len], dim=1)\n"
        "    return data, target.reshape(-1)\n",
    ),
    ("main.py", "model.init_hidden(eval_batch_size)", "mw.split(model.init_hidden(eval_batch_size), dim=1)"),
    ("main.py", "model.init_hidden(args.batch_size)", "mw.split(model.init_hidden(args.batch_size), dim=1)"),
    ("main.py", "        loss.backward()\n", "        loss = mw.backward(loss)\n"),
    (
        "main.py",
        "* criterion(output, targets).item()",
        "* mw.mean(criterion(output, targets).item(), weight=len(targets))",
    ),
    (
        "main.py",
        "            with open(args.save, 'wb') as f:\n                torch.save(model, f)\n",
        "            mw.save(model, args.save)\n",
    ),
    ("main.py", "# Load the best saved model.\n", "mw.barrier()  # torch.load does not wait for what mw.save writes\n"),
)
TEXT_SMALL = (("model.py", "nhead=nhead,", "nhead=nhead, dropout=dropout,"),)
TEXT_SHOWN = (
    (
        "main.py",
        "        total_loss += loss.item()\n",
        f"        total_loss += loss.item()\n        {SHOWN.format('loss.item()')}\n",
    ),
    (
        "main.py",
        "        val_loss = evaluate(val_data)\n",
        f"        val_loss = evaluate(val_data)\n        {SHOWN.format('val_loss')}\n",
    ),
    (
        "main.py",
        "test_loss = evaluate(test_data)\n",
        f"test_loss = evaluate(test_data)\n{SHOWN.format('test_loss')}\n",
    ),
)
TEXT = "--accel --data text --emsize 16 --nhid 16 --batch_size 6 --bptt 9 --dropout 0 --epochs 2 --save model.pt"

PROGRAMS = {
    "mnist": Program(
        "mnist",
        "--epochs 2 --batch-size 50 --save-model",
        pictures,
        MNIST_OURS,
        (
            ("main.py", "nn.Dropout(0.25)", "nn.Dropout(0.0)"),
            ("main.py", "nn.Dropout(0.5)", "nn.Dropout(0.0)"),
            ("main.py", "    if use_accel:\n        accel_kwargs", "    if True:\n        accel_kwargs"),
        ),
        MNIST_SHOWN,
        saved="mnist_cnn.pt",
    ),
    "mnist_rnn": Program(
        "mnist_rnn",
        "--epochs 2 --batch-size 50 --save-model",
        pictures,
        MNIST_OURS,
        (
            ("main.py", "nn.Dropout2d(0.25)", "nn.Dropout2d(0.0)"),
            ("main.py", "nn.Dropout2d(0.5)", "nn.Dropout2d(0.0)"),
            ("main.py", "    if args.accel:", "    if torch.accelerator.is_available():"),
            ("main.py", "if args.accel else {}", "if torch.accelerator.is_available() else {}"),
        ),
        MNIST_SHOWN,
        saved="mnist_rnn.pt",
        within=1e-5,
        why=LSTM,
    ),
    "vae": Program(
        "vae",
        "--epochs 2 --batch-size 50",
        pictures,
        (
            ("main.py", *IMPORT),
            (
                "main.py",
                "    for epoch in range(1, args.epochs + 1):\n",
                "    model, optimizer, train_loader, test_loader = mw.distribute(\n"
                "        model, optimizer, train_loader, test_loader)\n"
                "    for epoch in range(1, args.epochs + 1):\n",
            ),
            ("main.py", "        loss.backward()\n", '        loss = mw.backward(loss, reduction="sum")\n'),
            (
                "main.py",
                "loss_function(recon_batch, data, mu, logvar).item()",
                "mw.sum(loss_function(recon_batch, data, mu, logvar).item())",
            ),
            ("main.py", "recon_batch.view(args.batch_size, 1", "recon_batch.view(len(data), 1"),
        ),
        (("main.py", "torch.randn_like(std)", "torch.randn(std.shape).to(std)"),),
        (
            (
                "main.py",
                "        optimizer.step()\n",
                f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n",
            ),
            (
                "main.py",
                "    test_loss /= len(test_loader.dataset)\n",
                f"    test_loss /= len(test_loader.dataset)\n    {SHOWN.format('test_loss')}\n",
            ),
        ),
    ),
    "word_language_model, Transformer": Program(
        "word_language_model", f"{TEXT} --model Transformer --lr 0.05", sentences, TEXT_OURS, TEXT_SMALL, TEXT_SHOWN
    ),
    "word_language_model, LSTM": Program(
        "word_language_model",
        f"{TEXT} --model LSTM --lr 0.01 --use-optimizer",
        sentences,
        TEXT_OURS,
        TEXT_SMALL,
        TEXT_SHOWN,
        within=1e-5,
        why=LSTM,
    ),
    "regression": Program(
        "regression",
        "",
        nothing,
        (
            ("main.py", *IMPORT),
            ("main.py", "\nfor batch_idx in", "fc = mw.distribute(fc)\n\nfor batch_idx in"),
            ("main.py", "    batch_x, batch_y = get_batch()\n", "    batch_x, batch_y = mw.split(*get_batch())\n"),
            (
                "main.py",
                "    loss = output.item()\n\n    # Backward pass\n    output.backward()\n",
                "\n    # Backward pass\n    loss = mw.backward(output).item()\n",
            ),
        ),
        (
            ("main.py", "POLY_DEGREE = 4\n", "POLY_DEGREE = 4\ntorch.manual_seed(0)\n"),
            ("main.py", "torch.nn.Linear(W_target.size(0), 1)", "torch.nn.Linear(W_target.size(0), 1).to(device)"),
            ("main.py", "    return x, y\n", "    return x.to(device), y.to(device)\n"),
            ("main.py", "fc = ", 'device = torch.accelerator.current_accelerator(True) or "cpu"\nfc = '),
            ("main.py", "    if loss < 1e-3:", "    if loss < 1e-3 or batch_idx == 40:"),
        ),
        (("main.py", "    # Apply gradients\n", f"    # Apply gradients\n    {SHOWN.format('loss')}\n"),),
    ),
    "time_sequence_prediction": Program(
        "time_sequence_prediction",
        "--steps 2",
        waves,
        (
            ("train.py", *IMPORT),
            (
                "train.py",
                "lr=0.8)\n",
                "lr=0.8)\n    seq, optimizer = mw.distribute(seq, optimizer)\n",
            ),
            (
                "train.py",
                "            out = seq(input)\n            loss = criterion(out, target)\n",
                "            x, y = mw.split(input, target)\n"
                "            out = seq(x)\n            loss = criterion(out, y)\n",
            ),
            (
                "train.py",
                "            print('loss:', loss.item())\n            loss.backward()\n",
                "            loss = mw.backward(loss)\n            print('loss:', loss.item())\n",
            ),
        ),
        (
            (
                "train.py",
                "    seq.double()\n",
                "    seq.double().to(device)\n    torch.set_default_device(device)\n"
                "    input, target, test_input, test_target = (\n"
                "        x.to(device) for x in (input, target, test_input, test_target))\n",
            ),
            (
                "train.py",
                "    # set random seed to 0\n",
                '    device = torch.accelerator.current_accelerator(True) or "cpu"\n',
            ),
            ("train.py", "torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),
            ("train.py", "            future = 1000\n", "            future = 10\n"),
            ("train.py", "pred.detach().numpy()", "pred.detach().cpu().numpy()"),
        ),
        (
            (
                "train.py",
                "            return loss\n",
                f"            {SHOWN.format('loss.item()')}\n            return loss\n",
            ),
            (
                "train.py",
                "            print('test loss:', loss.item())\n",
                f"            {SHOWN.format('loss.item()')}\n",
            ),
        ),
        script="train.py",
        within=1e-9,
        why=LSTM,
    ),
}
