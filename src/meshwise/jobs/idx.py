"""Read images and labels from IDX files.

MNIST, Fashion-MNIST, KMNIST and EMNIST use this format.

An IDX file is a big-endian header (two zero bytes, the type of a value, the number of dimensions, each dimension as
four bytes), followed by the values. Only unsigned bytes (type 8) are read here, as images (3 dimensions) or labels (1
dimension), gzipped or plain.
Source: http://yann.lecun.com/exdb/mnist/, "file formats for the MNIST database".

Images stay bytes in memory. `Images.batch` normalizes a whole batch at once.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.spec.errors import DataError

UNSIGNED_BYTE = 8
CHUNK = 1 << 20  # bytes asked for at a time

# Part of a set -> how its files begin, after the name of the set if any. EMNIST writes `test` where MNIST has `t10k`.
PARTS = {"train": ("train",), "test": ("t10k", "test")}
DIMS = {"images": 3, "labels": 1}


@dataclass(frozen=True, eq=False)
class Images:
    """Images and labels in memory. They can be read by sample or, much faster, by batch.

    pixels: uint8 of shape (samples, height, width).
    labels: int64 of shape (samples,).
    """

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
    """Return the file with the `images` or `labels` (`kind`) of one part of a data set."""
    folder, name = (where, "") if where.is_dir() else (where.parent, where.name)
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if not any(other.startswith(name) for other in names) and not where.is_dir():
        raise DataError(f"{where} does not exist. Name a folder with the IDX files of a data set.")
    ending = f"{kind}-idx{DIMS[kind]}-ubyte"
    wanted = re.compile(rf"(.*?)-?(?:{'|'.join(PARTS[part])})-{ending}(?:\.gz)?")
    # Sorted, a plain file stands before its archive, as where torchvision unpacked it; it is the faster one to read.
    matches = [found for found in map(wanted.fullmatch, names) if found and found[1].startswith(name)]
    sets = sorted({found[1] for found in matches})
    if not matches:
        looked_for = " or ".join(f"*{start}-{ending}[.gz]" for start in PARTS[part])
        raise DataError(f"{where} has no file {looked_for} with the {part} {kind}. Name a folder of IDX files.")
    if len(sets) > 1:
        raise DataError(
            f"{where} contains several data sets ({', '.join(one or 'one without a name' for one in sets)}). Name one "
            f"of these, such as {folder / sets[-1]}, or put each in a separate folder."
        )
    return folder / matches[0][0]


def read_idx(path: Path, kind: str) -> Tensor:
    """Read the images or labels (`kind`) of a plain or gzipped IDX file as uint8."""
    content, complete = _unpack(path)
    dims = DIMS[kind]
    magic = bytes((0, 0, UNSIGNED_BYTE, dims))
    if content and content[:4] != magic[: len(content)]:
        raise DataError(f"{path} is not an IDX file of {kind}: it begins with {content[:4].hex()}, not {magic.hex()}.")
    header = 4 + 4 * dims
    shape = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, dims + 1)]
    expected = header + (math.prod(shape) if len(content) >= header else 0)
    if len(content) < expected or not complete:
        fault = "cut off" if len(content) < expected else "cut off at its very end"
        raise _damaged(path, f"{fault}: {expected:,} bytes expected, {len(content):,} found")
    if len(content) > expected:
        raise _damaged(path, f"too long: {expected:,} bytes expected, {len(content):,} found")
    if expected == header:
        raise DataError(f"{path} is empty: its shape is {tuple(shape)}. Name a data set with at least one sample.")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def _unpack(path: Path) -> tuple[bytearray, bool]:
    """Return the content of a plain or gzipped file, and whether the file was complete."""
    content = bytearray()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read1(CHUNK):
                content += chunk
    except EOFError:
        return content, False
    except (zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"damaged ({error})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    return content, True


def _damaged(path: Path, fault: str) -> DataError:
    return DataError(f"{path} is {fault}. Copy or download it again.")
