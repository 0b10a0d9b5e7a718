"""Define the tutorials' two networks on MNIST or similar data sets.

Fashion-MNIST, KMNIST and EMNIST have the format of MNIST.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn, optim

from meshwise.job.job import Job
from meshwise.jobs.idx import Images, count_classes, read_images
from meshwise.spec.errors import DataError

MNIST = Path(__file__).parent / "data" / "mnist"
SIDE = 28  # pixels

Batch = tuple[Tensor, Tensor]  # inputs (batch, ...), labels (batch,)


class ConvNet(nn.Module):
    """A network of two convolutions, each with pooling, and two linear layers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 28, 28) to logits (batch, classes)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # 28 -> 24 -> 12
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # 12 -> 8 -> 4
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def mnist_mlp(*, data: Path | None = None, seed: int = 0) -> Job:
    """Return the job of tutorial 1: a network 784-128-10, batches of 64, 5 epochs, Adam."""

    def model(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 128), nn.ReLU(), nn.Linear(128, classes))

    adam = partial(optim.Adam, lr=1e-3)
    return _digits_job(data or MNIST, model, name="mnist-mlp", optimizer=adam, batch_size=64, epochs=5, seed=seed)


def mnist_cnn(*, data: Path | None = None, seed: int = 0) -> Job:
    """Return the job of tutorial 3: a convolutional network with pooling."""
    sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
    return _digits_job(data or MNIST, ConvNet, name="mnist-cnn", optimizer=sgd, batch_size=256, epochs=3, seed=seed)


def _digits_job(where: Path, model: Callable[[int], nn.Module], **settings: Any) -> Job:
    """Return a job that classifies the images in a folder."""
    classes = count_classes(where)
    return Job(
        model=lambda: model(classes),
        loss=cross_entropy,
        data=lambda: read_digits(where, "train"),
        test=lambda: read_digits(where, "test"),
        metrics=accuracy,
        **settings,
    )


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of a batch, in nats."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the fraction of a batch's samples for which the most likely class is the correct one."""
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(dim=1) == labels).float().mean()}


def read_digits(where: Path, part: str) -> Images:
    """Read one part, `train` or `test`, of a set of 28 x 28 images. Raises DataError for images of another size."""
    images = read_images(where, part)
    height, width = images.pixels.shape[1:]
    if (height, width) != (SIDE, SIDE):
        raise DataError(f"{where} has images of {height} x {width} pixels, but the mnist jobs need {SIDE} x {SIDE}.")
    return images
