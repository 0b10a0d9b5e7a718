"""Puts small data in place of downloads into a Lightning script, and notes what a run of it leaves.

Imported behind the script's first `import torch`. Of each step the norm of the gradient and the loss, of each fit and
test the metrics and the weights are written to `probe.jsonl` and `weights-N.pt` of the working folder, by rank 0.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torchvision_ops
from torch.utils.data import Dataset

ABSENT = ("pandas", "seaborn", "matplotlib", "matplotlib.pyplot", "matplotlib.colors", "IPython", "IPython.display")
ABSENT += ("matplotlib_inline", "matplotlib_inline.backend_inline")
"""What draws, which is not installed and computes nothing."""


class Pictures(Dataset):
    """Bars under noise, as a data set of torchvision."""

    channels = 1

    def __init__(self, root: Any = "", train: bool = True, transform: Any = None, **_: Any) -> None:
        draw = numpy.random.default_rng(int(train))
        self.transform, count = transform, 197 if train else 61
        self.targets = draw.integers(0, 10, count).tolist()
        side = 28 if self.channels == 1 else 32
        self.data = draw.integers(0, 60, (count, side, side, self.channels)).astype("uint8")
        for picture, label in zip(self.data, self.targets, strict=True):
            picture[2 * label : 2 * label + 6, 4:24] += 150

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        picture = Image.fromarray(self.data[index].squeeze())
        return (picture if self.transform is None else self.transform(picture)), self.targets[index]


class Coloured(Pictures):
    """The same with three channels."""

    channels = 3


class Words(Dataset):
    """Sequences that count, as Lightning's WikiText2."""

    vocab_size = 30

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = (torch.arange(8) * (1 + index % 3) + index) % self.vocab_size
        return row[:-1], row[1:]


def begin(package: str) -> None:
    """Stand in for what is downloaded or drawn, and look at each Trainer of a package."""
    torchvision_ops.complete()
    data = importlib.import_module("torchvision.datasets")
    data.MNIST = data.FashionMNIST = Pictures
    data.CIFAR10 = Coloured
    lightning = importlib.import_module(package)
    demos = importlib.import_module(f"{package}.demos.mnist_datamodule")
    demos.MNIST = Pictures
    importlib.import_module(f"{package}.demos").WikiText2 = Words
    whole = lightning.Trainer._run
    absent = [name for name in ABSENT if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update((name, mock.MagicMock()) for name in absent)  # behind who looks whether they are there

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if not any(type(each).__name__ == "Probe" for each in self.callbacks):
            self.callbacks.insert(0, _probe(lightning))
        return whole(self, *args, **options)

    lightning.Trainer._run = run


def _probe(lightning: Any) -> Any:
    def tell(trainer: Any, **what: Any) -> None:
        if trainer.global_rank == 0:
            with Path("probe.jsonl").open("a") as file:
                file.write(json.dumps(what) + "\n")

    def numbers(trainer: Any) -> dict[str, float]:
        found = sorted(trainer.callback_metrics.items())
        return {name if x.dtype == torch.float64 else f"{name}, float32": float(x) for name, x in found}

    class Probe(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
            tell(trainer, norm=float(torch.stack(squares).sum().sqrt()), step=trainer.global_step)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            tell(trainer, loss=float((outputs or {}).get("loss", 0)), step=trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            tell(trainer, epoch=trainer.current_epoch, metrics=numbers(trainer))

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            tell(trainer, fit=numbers(trainer))
            if trainer.global_rank == 0:
                number = len(list(Path().glob("weights-*.pt")))
                torch.save(module.state_dict(), f"weights-{number}.pt")

        def on_test_end(self, trainer: Any, module: Any) -> None:
            tell(trainer, test=numbers(trainer))

        on_validation_end = on_test_end

    return Probe()
