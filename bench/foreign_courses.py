"""Single-file programs of courses and tutorials, and the lines that are others: data of `foreign.py`.

The originals' own data is kept where it is small; matplotlib draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreign_programs import SHOWN, nothing, pictures
from foreign_scripts import TUTORIAL, Script, main_py

COURSE = "hunkim/PyTorchZeroToAll", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
NLP = "graykode/nlp-tutorial", "e5a260fac0b4ff1e2ec434fc6f0d962ac97fc289"
RECOMMENDER = "guoyang9/NCF", "89ff06ffcd2bca6bb773b54925265c208a28d318"
TUTORIALS = "pytorch/tutorials", "07a339ece661a2b304b8834780470f522eed1e02"
BEGINNER = "L1aoXingyu/pytorch-beginner", "29cab65745f4e8283ebae7e631c9ec1d074955d3"
NO_PLOT = ("import matplotlib.pyplot as plt\n", "from unittest.mock import MagicMock\nplt = MagicMock()\n")
Pair = tuple[str, str]


def whole_batch(
    source: tuple[str, str],
    folder: str,
    script: str,
    *,
    before: str,
    ours: tuple[Pair, ...],
    small: tuple[Pair, ...],
    epochs: str,
    shown: tuple[Pair, ...] = (),
    indent: str = "",
    reduction: str = "",
    data: Callable[[Path], None] = nothing,
    saved: str = "",
) -> Script:
    """One whose loop trains on all its data at each step. before: the comment above its loop; epochs: their number."""
    step, loop = f"{indent}    optimizer.step()\n", f"{indent}for epoch in range({epochs}):\n"
    return Script(
        source,
        folder,
        main_py(
            (before, f"{indent}model, optimizer = mw.distribute(model, optimizer)\n{before}"),
            (f"{indent}    loss.backward()\n", f"{indent}    loss = mw.backward(loss{reduction})\n"),
            *ours,
            file=script,
        ),
        main_py(
            (
                loop,
                f'{indent}state = {{"epoch": 0}}\n'
                f'{indent}saved = mw.checkpoint("state", model=model, optimizer=optimizer, extra=state)\n'
                f'{indent}for epoch in range(state["epoch"], {epochs}):\n',
            ),
            (step, f'{step}{indent}    state["epoch"] = epoch + 1\n{indent}    saved.step_done()\n'),
            file=script,
        ),
        main_py((step, f"{step}{indent}    {SHOWN.format('loss.item()')}\n"), *shown, file=script),
        main_py(*small, file=script),
        script=script,
        data=data,
        saved=saved,
    )


SUMS: Any = {"reduction": ', reduction="sum"'}
GIVES_IMPORT = ("from torch import nn", "import torch\nfrom torch import nn")
MODEL = "input_batch", "target_batch"


def of_nlp(
    folder: str, inputs: str, targets: str, *small: Pair, epochs: str = "5000", result: str = "output"
) -> Script:
    """One of graykode's that classifies."""
    return whole_batch(
        NLP,
        folder,
        f"{folder.partition('.')[2]}.py",
        before="    # Training\n",
        ours=(
            (
                f"        {result} = model({inputs})\n",
                f"        x, y = mw.split({inputs}, {targets})\n        {result} = model(x)\n",
            ),
            (f"criterion(output, {targets})", "criterion(output, y)"),
        ),
        small=((f"range({epochs})", "range(20)"), *small),
        epochs="20",
        indent="    ",
    )


def of_mnist(script: str, small: tuple[Pair, ...], loss: str, loop: str, indent: str = "", before: str = "") -> Script:
    """One of the course's over MNIST. loss: what it adds up of a test batch. before: the line above its loop."""
    above = before or loop
    return Script(
        COURSE,
        "",
        main_py(
            (
                above,
                "model, optimizer, train_loader, test_loader = mw.distribute(\n"
                f"    model, optimizer, train_loader, test_loader)\n{above}",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss)\n"),
            (f"test_loss += {loss}", f"test_loss += mw.{'mean' if 'criterion' in loss else 'sum'}({loss})"),
            (
                "correct += pred.eq(target.data.view_as(pred)).cpu().sum()",
                "correct += mw.sum(pred.eq(target.data.view_as(pred)).cpu().sum())",
            ),
            file=script,
        ),
        main_py(
            (
                loop,
                f'{indent}saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=train_loader)\n'
                + loop.replace("range(1,", "range(1 + saved.epoch,"),
            ),
            file=script,
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            (
                "    test_loss /= len(test_loader.dataset)\n",
                "    test_loss /= len(test_loader.dataset)\n"
                f"    {SHOWN.format('float(test_loss)')}, {SHOWN.format('float(correct)')}\n",
            ),
            file=script,
        ),
        main_py(*small, ("batch_size = 64", "batch_size = 30"), ("range(1, 10)", "range(1, 4)"), file=script),
        script=script,
        data=pictures,
    )


OLD_TORCH = (
    ("Variable(data, volatile=True)", "Variable(data)"),
    ("root='./data/'", "root='../data'"),
)
MNIST_LOOP = "for epoch in range(1, 4):\n"

COURSES: dict[str, Script] = {
    "course/linear_regression": whole_batch(
        COURSE,
        "",
        "05_linear_regression.py",
        before="# Training loop\n",
        ours=(
            ("    y_pred = model(x_data)\n", "    x, y = mw.split(x_data, y_data)\n    y_pred = model(x)\n"),
            ("criterion(y_pred, y_data)", "criterion(y_pred, y)"),
        ),
        small=(("range(500)", "range(25)"),),
        epochs="25",
        shown=(('print("Prediction (after', f'{SHOWN.format("y_pred.item()")}\nprint("Prediction (after'),),
        **SUMS,
    ),
    "course/diabetes_logistic": whole_batch(
        COURSE,
        "",
        "07_diabets_logistic.py",
        before="# Training loop\n",
        ours=(
            ("    y_pred = model(x_data)\n", "    x, y = mw.split(x_data, y_data)\n    y_pred = model(x)\n"),
            ("criterion(y_pred, y_data)", "criterion(y_pred, y)"),
        ),
        small=(GIVES_IMPORT, ("range(100)", "range(25)"), ("np.float32", "np.float64")),
        epochs="25",
    ),
    "course/dataset_loader_logistic": Script(
        COURSE,
        "",
        main_py(
            (
                "# Training loop\n",
                "model, optimizer, train_loader = mw.distribute(model, optimizer, train_loader)\n# Training loop\n",
            ),
            ("        loss.backward()\n", '        loss = mw.backward(loss, reduction="sum")\n'),
            file="08_2_dataset_loade_logistic.py",
        ),
        main_py(
            (
                "for epoch in range(2):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=train_loader)\n'
                "for epoch in range(saved.epoch, 2):\n",
            ),
            file="08_2_dataset_loade_logistic.py",
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            file="08_2_dataset_loade_logistic.py",
        ),
        main_py(
            ("from torch import nn,", "import torch\nfrom torch import nn,"),
            ("np.float32", "np.float64"),
            ("num_workers=2", "num_workers=0"),
            file="08_2_dataset_loade_logistic.py",
        ),
        script="08_2_dataset_loade_logistic.py",
    ),
    "course/softmax_mnist": of_mnist(
        "09_2_softmax_mnist.py",
        (
            ("from torch import nn,", "import torch\nfrom torch import nn,"),
            ("root='./mnist_data/'", "root='../data'"),
            ("(784, 520)", "(784, 32)"),
            ("(520, 320)", "(32, 24)"),
            ("(320, 240)", "(24, 24)"),
            ("(240, 120)", "(24, 16)"),
            ("(120, 10)", "(16, 10)"),
        ),
        "criterion(output, target).item()",
        f"    {MNIST_LOOP}",
        "    ",
        "if __name__ == '__main__':\n",
    ),
    "course/cnn_mnist": of_mnist(
        "10_1_cnn_mnist.py",
        (*OLD_TORCH, ("size_average=False).data", "reduction='sum').item()")),
        "F.nll_loss(output, target, reduction='sum').item()",
        MNIST_LOOP,
    ),
    "course/inception_mnist": of_mnist(
        "11_1_toy_inception_mnist.py",
        (
            *OLD_TORCH,
            ("size_average=False).data[0]", "reduction='sum').item()"),
            ("loss.data[0]", "loss.item()"),
        ),
        "F.nll_loss(output, target, reduction='sum').item()",
        MNIST_LOOP,
    ),
    "course/rnn_classification": Script(
        COURSE,
        "",
        main_py(
            (
                "    start = time.time()\n",
                "    classifier, optimizer, train_loader, test_loader = mw.distribute(\n"
                "        classifier, optimizer, train_loader, test_loader)\n    start = time.time()\n",
            ),
            (
                "        total_loss += loss.item()\n\n        classifier.zero_grad()\n        loss.backward()\n",
                "\n        classifier.zero_grad()\n        loss = mw.backward(loss)\n"
                "        total_loss += loss.item()\n",
            ),
            (
                "correct += pred.eq(target.data.view_as(pred)).cpu().sum()",
                "correct += mw.sum(pred.eq(target.data.view_as(pred)).cpu().sum())",
            ),
            file="13_2_rnn_classification.py",
        ),
        main_py(
            (
                "    for epoch in range(1, N_EPOCHS + 1):\n",
                '    saved = mw.checkpoint("state", model=classifier, optimizer=optimizer, loader=train_loader)\n'
                "    for epoch in range(1 + saved.epoch, N_EPOCHS + 1):\n",
            ),
            file="13_2_rnn_classification.py",
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            ("    print('\\nTest set", f"    {SHOWN.format('float(correct)')}\n    print('\\nTest set"),
            file="13_2_rnn_classification.py",
        ),
        (
            ("name_dataset.py", "rows = list(reader)", "rows = list(reader)[:: 20 if is_train_set else 100]"),
            *main_py(
                ("loss.data[0]", "loss.item()"),
                ("HIDDEN_SIZE = 100", "HIDDEN_SIZE = 12"),
                ("BATCH_SIZE = 256", "BATCH_SIZE = 24"),
                ("N_EPOCHS = 100", "N_EPOCHS = 3"),
                file="13_2_rnn_classification.py",
            ),
        ),
        script="13_2_rnn_classification.py",
    ),
    "nlp/NNLM": of_nlp("1-1.NNLM", *MODEL),
    "nlp/TextCNN": of_nlp("2-1.TextCNN", "inputs", "targets"),
    "nlp/TextLSTM": of_nlp(
        "3-2.TextLSTM",
        *MODEL,
        ("torch.FloatTensor", "torch.DoubleTensor"),
        ("n_hidden = 128", "n_hidden = 16"),
        epochs="1000",
    ),
    "nlp/Bi-LSTM(Attention)": of_nlp(
        "4-3.Bi-LSTM(Attention)", "inputs", "targets", NO_PLOT, result="output, attention"
    ),
    "nlp/Seq2Seq": whole_batch(
        NLP,
        "4-1.Seq2Seq",
        "Seq2Seq.py",
        before="    for epoch in range(20):\n",
        ours=(
            (
                "        output = model(input_batch, hidden, output_batch)\n        # output : [max_len+1,",
                "        x, given, y = mw.split(input_batch, output_batch, target_batch)\n"
                "        output = model(x, mw.split(hidden, dim=1), given)\n        # output : [max_len+1,",
            ),
            ("range(0, len(target_batch))", "range(0, len(y))"),
            ("criterion(output[i], target_batch[i])", "criterion(output[i], y[i])"),
        ),
        small=(
            ("range(5000)", "range(20)"),
            ("torch.FloatTensor", "torch.DoubleTensor"),
            ("n_hidden = 128", "n_hidden = 16"),
            ("decoded.index('E')", "len(decoded)"),
        ),
        epochs="20",
        indent="    ",
        **SUMS,
    ),
    "nlp/Transformer": whole_batch(
        NLP,
        "5-1.Transformer",
        "Transformer.py",
        before="    for epoch in range(20):\n",
        ours=(
            (
                "dec_enc_attns = model(enc_inputs, dec_inputs)\n        loss = criterion(outputs, target_batch.",
                "dec_enc_attns = model(*mw.split(enc_inputs, dec_inputs))\n"
                "        loss = criterion(outputs, mw.split(target_batch).",
            ),
        ),
        small=(
            NO_PLOT,
            (
                "target_batch = make_batch(sentences)\n",
                "target_batch = make_batch(sentences)\n    enc_inputs, dec_inputs, target_batch = (\n"
                "        torch.cat([x, x.flip(1), x.roll(1, 1), x.roll(2, 1)]) for x in (enc_inputs, dec_inputs, "
                "target_batch))\n",
            ),
            ("torch.FloatTensor", "torch.DoubleTensor"),
            ("d_model = 512", "d_model = 16"),
            ("d_ff = 2048", "d_ff = 32"),
            ("d_k = d_v = 64", "d_k = d_v = 8"),
            ("n_layers = 6", "n_layers = 2"),
            ("n_heads = 8", "n_heads = 2"),
        ),
        epochs="20",
        indent="    ",
    ),
    "tutorial/linear_regression": whole_batch(
        TUTORIAL,
        "tutorials/01-basics/linear_regression",
        "main.py",
        before="# Train the model\n",
        ours=(
            (
                "    targets = torch.from_numpy(y_train)\n",
                "    targets = torch.from_numpy(y_train)\n    inputs, targets = mw.split(inputs, targets)\n",
            ),
            ("torch.save(model", "mw.save(model"),
        ),
        small=(NO_PLOT, ("num_epochs = 60", "num_epochs = 25"), ("np.float32", "np.float64")),
        epochs="num_epochs",
        saved="model.ckpt",
    ),
    "NCF": Script(
        RECOMMENDER,
        "",
        main_py(
            (
                "count, best_hr = 0, 0\n",
                "model, optimizer, train_loader = mw.distribute(model, optimizer, train_loader)\n"
                "count, best_hr = 0, 0\n",
            ),
            ("\t\tloss.backward()\n", "\t\tloss = mw.backward(loss)\n"),
            ("\t\t\ttorch.save(model,", "\t\t\tmw.save(model,"),
        ),
        main_py(
            (
                "for epoch in range(args.epochs):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=train_loader)\n'
                "for epoch in range(saved.epoch, args.epochs):\n",
            ),
        ),
        main_py(
            ("\t\toptimizer.step()\n", f"\t\toptimizer.step()\n\t\t{SHOWN.format('loss.item()')}\n"),
            (
                "\tif HR > best_hr:\n",
                f"\t{SHOWN.format('float(HR)')}, {SHOWN.format('float(NDCG)')}\n\tif HR > best_hr:\n",
            ),
        ),
        (
            ("data_utils.py", "import pandas as pd \nimport scipy.sparse as sp\n", ""),
            (
                "data_utils.py",
                '\t""" We load all the three file here to save time in each epoch. """\n',
                "\tdraw = np.random.default_rng(0)\n"
                "\ttrain_data = [[u, int(j)] for u in range(12) for j in draw.choice(20, 4, replace=False)]\n"
                "\ttest_data = [[u, int(j)] for u in range(12) for j in draw.choice(20, 10, replace=False)]\n"
                "\treturn train_data, test_data, 12, 20, {tuple(x): 1.0 for x in train_data}\n",
            ),
            *main_py(
                ("import numpy as np\n", "import numpy as np\nnp.random.seed(0)\n"),
                ("from tensorboardX import SummaryWriter\n", ""),
                ("num_workers=4", "num_workers=0"),
                ("label.float().cuda()", "label.double()"),
                ("model.cuda()\n", ""),
                (".cuda()", ""),
            ),
            ("evaluate.py", ".cuda()", ""),
        ),
        arguments="--batch_size 40 --epochs 3 --test_num_ng 9 --top_k 3 --factor_num 4",
        advised=main_py(("mw.save(model,", "mw.save(model.state_dict(),")),
    ),
    "beginner/autoencoder": Script(
        BEGINNER,
        "08-AutoEncoder",
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                "model, optimizer, dataloader = mw.distribute(model, optimizer, dataloader)\n"
                "for epoch in range(num_epochs):\n",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss)\n"),
            file="simple_autoencoder.py",
        ),
        main_py(
            (
                "for epoch in range(num_epochs):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=dataloader)\n'
                "for epoch in range(saved.epoch, num_epochs):\n",
            ),
            file="simple_autoencoder.py",
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            file="simple_autoencoder.py",
        ),
        main_py(
            (".cuda()", ""),
            ("(0.5, 0.5, 0.5), (0.5, 0.5, 0.5)", "(0.5,), (0.5,)"),
            ("loss.data[0]", "loss.item()"),
            ("'./data'", "'../data'"),
            ("save_image(pic", "str(pic"),
            (", './img/image_{}.png'.format(epoch)", ""),
            ("num_epochs = 100", "num_epochs = 4"),
            ("batch_size = 128", "batch_size = 30"),
            file="simple_autoencoder.py",
        ),
        script="simple_autoencoder.py",
        data=pictures,
    ),
    "tutorials/quickstart": Script(
        TUTORIALS,
        "beginner_source/basics",
        main_py(
            (
                "epochs = 5\n",
                "model, optimizer, train_dataloader, test_dataloader = mw.distribute(\n"
                "    model, optimizer, train_dataloader, test_dataloader)\nepochs = 5\n",
            ),
            ("        loss.backward()\n", "        loss = mw.backward(loss)\n"),
            ("test_loss += loss_fn(pred, y).item()", "test_loss += mw.mean(loss_fn(pred, y).item())"),
            (
                "correct += (pred.argmax(1) == y).type(torch.float).sum().item()",
                "correct += mw.sum((pred.argmax(1) == y).type(torch.float).sum().item())",
            ),
            (
                'torch.save(model.state_dict(), "model.pth")\n',
                'mw.save(model.state_dict(), "model.pth")\nmw.barrier()\n',
            ),
            file="quickstart_tutorial.py",
        ),
        main_py(
            (
                "for t in range(epochs):\n",
                'saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=train_dataloader)\n'
                "for t in range(saved.epoch, epochs):\n",
            ),
            file="quickstart_tutorial.py",
        ),
        main_py(
            ("        optimizer.step()\n", f"        optimizer.step()\n        {SHOWN.format('loss.item()')}\n"),
            (
                "    correct /= size\n",
                f"    correct /= size\n    {SHOWN.format('test_loss')}, {SHOWN.format('correct')}\n",
            ),
            file="quickstart_tutorial.py",
        ),
        main_py(
            NO_PLOT,
            ("datasets.FashionMNIST", "datasets.MNIST"),
            ('root="data"', 'root="../data"'),
            ("batch_size = 64", "batch_size = 30"),
            ("512", "32"),
            file="quickstart_tutorial.py",
        ),
        script="quickstart_tutorial.py",
        data=pictures,
        saved="model.pth",
    ),
}
