"""Define the tutorials' two networks on MNIST, and read IDX files.

MNIST, Fashion-MNIST, KMNIST and EMNIST are IDX files: a big-endian header (two zero bytes, the type of a value, the
number of dimensions, each dimension as four bytes), followed by the values. Only unsigned bytes (type 8) are read here,
as images (3 dimensions) or labels (1 dimension), gzipped or plain.
Source: http://yann.lecun.com/exdb/mnist/, "file formats for the MNIST database".

Images stay bytes in memory. `Images.batch` normalizes a whole batch at once.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from meshwise.spec.errors import DataError
from meshwise.training.job.job import Job

UNSIGNED_BYTE = 8

# The possible starts of a part's file names, after the set's name if any. EMNIST has `test` where MNIST has `t10k`.
PARTS = {"train": ("train",), "test": ("t10k", "test")}
DIMS = {"images": 3, "labels": 1}


@dataclass(frozen=True, eq=False)
class Images:
    """Images and labels in memory. They can be read by sample or, much faster, by batch."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample, like torchvision's MNIST: a float32 image (1, height, width) and its label."""
        return normalise(self.pixels[index])[None], int(self.labels[index])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at `indices` (int64): float32 images (batch, 1, height, width) and int64 labels
        (batch,)."""
        return normalise(self.pixels.index_select(0, indices))[:, None], self.labels.index_select(0, indices)


def normalise(pixels: Tensor) -> Tensor:
    """Convert bytes 0..255 to float32 -1..1."""
    return pixels.float().div_(127.5).sub_(1.0)


def read_images(where: Path, part: str) -> Images:
    """Read one part, `train` or `test`, of a data set in a folder."""
    image_file, label_file = find_file(where, part, "images"), find_file(where, part, "labels")
    pixels, labels = read_idx(image_file, "images"), read_idx(label_file, "labels")
    if len(pixels) != len(labels):
        raise DataError(
            f"{image_file} has {len(pixels):,} images, but {label_file.name} has {len(labels):,} labels. Each image "
            "needs one label: use two files of the same data set."
        )
    return Images(pixels, labels.long())


def count_classes(where: Path) -> int:
    """Return the number of classes of a data set, which is its largest label plus 1."""
    return 1 + max(int(read_idx(find_file(where, part, "labels"), "labels").max()) for part in PARTS)


def find_file(where: Path, part: str, kind: str) -> Path:
    """Return the file with the `images` or `labels` (`kind`) of a data set's part in the folder `where`."""
    wanted = [f"*{start}-{kind}-idx{DIMS[kind]}-ubyte" for start in PARTS[part]]
    plain, packed = ([file for name in wanted for file in where.glob(name + end)] for end in ("", ".gz"))
    if len({file.name.removesuffix(".gz") for file in plain + packed}) != 1:
        raise DataError(
            f"{where} must have one file {' or '.join(wanted)}[.gz] with the {part} {kind}, but has "
            f"{len(plain + packed)}. Name a folder with the IDX files of one data set."
        )
    return (plain + packed)[0]  # prefer the unpacked file, which is faster to read


def read_idx(path: Path, kind: str) -> Tensor:
    """Read the images or labels (`kind`) of a plain or gzipped IDX file as uint8."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytearray(file.read())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Copy or download it again.") from None
    dims = DIMS[kind]
    magic, header = bytes((0, 0, UNSIGNED_BYTE, dims)), 4 + 4 * dims
    shape = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, dims + 1)]
    expected = header + math.prod(shape)
    if content[:4] != magic or len(content) != expected or expected == header:
        raise DataError(
            f"{path} is not an IDX file of {kind}, or is damaged: it has {len(content):,} bytes and begins with "
            f"{content[:4].hex()}. {expected:,} bytes are expected for the shape {tuple(shape)}, after {magic.hex()}."
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


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
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # side: 28 -> 24 -> 12
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # side: 12 -> 8 -> 4
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
        data=lambda: read_images(where, "train"),
        test=lambda: read_images(where, "test"),
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
