"""IDX files are read exactly, and a damaged one is refused in one clear sentence."""

import gzip
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwise.spec.errors import DataError
from meshwise.training.jobs.mnist import Images, count_classes, normalise, read_idx, read_images

MNIST = Path(__file__).parents[3] / "src/meshwise/training/jobs/data/mnist"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx_bytes(values: Tensor) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.dim())) + shape + values.numpy().tobytes()


def write_set(folder: Path, *, count: int = 5, start: str = "train", labels: Tensor | None = None) -> Images:
    """A small set of 4 x 3 images; gzipped images and plain labels."""
    folder.mkdir(exist_ok=True)
    pixels = torch.randint(0, 256, (count, 4, 3), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)
    labels = torch.arange(count) if labels is None else labels
    (folder / f"{start}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels)))
    (folder / f"{start}-labels-idx1-ubyte").write_bytes(idx_bytes(labels.to(torch.uint8)))
    return Images(pixels, labels)


@pytest.mark.parametrize(
    ("name", "md5"),
    [
        ("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb"),
        ("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624"),
        ("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea"),
        ("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637"),
    ],
)
def test_the_shipped_mnist_is_the_original(name: str, md5: str) -> None:
    values = read_idx(MNIST / f"{name}.gz", "images" if "images" in name else "labels")
    assert hashlib.md5(idx_bytes(values)).hexdigest() == md5


def test_every_byte_is_normalised_to_the_bits_of_to_tensor_and_normalize() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    as_torchvision = every_byte.to(torch.float32).div(255).sub_(0.5).div_(0.5)
    assert torch.equal(normalise(every_byte), as_torchvision)
    assert normalise(every_byte).dtype == torch.float32


def test_a_batch_is_its_samples_stacked_in_order(tmp_path: Path) -> None:
    written = write_set(tmp_path, count=7)
    images = read_images(tmp_path, "train")
    picked = torch.tensor([6, 0, 0, 3])
    inputs, labels = images.batch(picked)
    assert inputs.shape == (4, 1, 4, 3)
    assert torch.equal(inputs, torch.stack([images[int(i)][0] for i in picked]))
    assert labels.tolist() == [images[int(i)][1] for i in picked] == [6, 0, 0, 3]
    assert labels.dtype == torch.int64
    assert torch.equal(images.pixels, written.pixels)


def test_reading_a_batch_leaves_the_images_as_they_are(tmp_path: Path) -> None:
    written = write_set(tmp_path)
    images = read_images(tmp_path, "train")
    for _ in range(2):
        assert torch.equal(images.batch(torch.arange(5))[0][:, 0], normalise(written.pixels))


def test_iterating_ends_after_the_last_sample(tmp_path: Path) -> None:
    write_set(tmp_path, count=3)
    images = read_images(tmp_path, "train")
    assert [label for _, label in images] == [0, 1, 2]
    assert len(images) == 3


def test_a_plain_file_is_read_like_its_archive_and_before_it(tmp_path: Path) -> None:
    written = write_set(tmp_path)
    (tmp_path / IMAGES).write_bytes(idx_bytes(255 - written.pixels))
    assert torch.equal(read_images(tmp_path, "train").pixels, 255 - written.pixels)


def test_emnist_names_are_found_by_their_ending(tmp_path: Path) -> None:
    write_set(tmp_path, start="emnist-letters-train", labels=torch.tensor([1, 26, 3, 4, 5]))
    write_set(tmp_path, start="emnist-letters-test", count=2)
    assert len(read_images(tmp_path, "train")) == 5
    assert len(read_images(tmp_path, "test")) == 2
    assert count_classes(tmp_path) == 27


def test_several_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, start="emnist-letters-train", count=3)
    write_set(tmp_path, start="emnist-digits-train", count=4)
    with pytest.raises(DataError, match=r"must have one file .* but has 2\. Name a folder with the IDX files of one"):
        read_images(tmp_path, "train")


def test_classes_follow_the_labels_of_both_parts(tmp_path: Path) -> None:
    write_set(tmp_path, start="train", labels=torch.tensor([0, 1, 2, 1, 0]))
    write_set(tmp_path, start="t10k", labels=torch.tensor([0, 1, 2, 7, 0]))
    assert count_classes(tmp_path) == 8


@pytest.mark.parametrize(("part", "starts"), [("train", ["train"]), ("test", ["t10k", "test"])])
def test_a_missing_file_is_refused_with_the_names_that_were_looked_for(
    tmp_path: Path, part: str, starts: list[str]
) -> None:
    with pytest.raises(DataError, match=r"nowhere must have one file .* but has 0") as refusal:
        read_images(tmp_path / "nowhere", part)
    for start in starts:
        assert f"*{start}-images-idx3-ubyte" in str(refusal.value)


def archive(written: Images) -> bytes:
    return gzip.compress(idx_bytes(written.pixels))


def flipped(content: bytes, where: int) -> bytes:
    damaged = bytearray(content)
    damaged[where] ^= 0xFF
    return bytes(damaged)


CUT = "cannot be read: .*Copy or download it again"
DAMAGE: list[tuple[str, Callable[[Images], bytes], str]] = [
    (LABELS, lambda w: b"\0\0\x0d\x01" + bytes(9), "not an IDX file of labels.* begins with 00000d01.* after 00000801"),
    (LABELS, lambda w: idx_bytes(w.pixels), "begins with 00000803.* after 00000801"),
    (LABELS, lambda w: idx_bytes(w.labels[:4].byte()), "has 5 images, but train-labels-idx1-ubyte has 4 labels"),
    (IMAGES, lambda w: idx_bytes(w.pixels)[:40], "has 40 bytes .* 76 bytes are expected"),
    (IMAGES, lambda w: idx_bytes(w.pixels)[:10], "has 10 bytes"),
    (IMAGES, lambda w: b"", "has 0 bytes"),
    (IMAGES, lambda w: b"\0\0\x08", "has 3 bytes"),
    (IMAGES, lambda w: idx_bytes(w.pixels) + b"\0\0\0", "has 79 bytes .* 76 bytes are expected"),
    (IMAGES, lambda w: idx_bytes(w.pixels[:0]), r"for the shape \(0, 4, 3\)"),
    (f"{IMAGES}.gz", lambda w: archive(w)[: len(archive(w)) // 2], CUT),
    *((f"{IMAGES}.gz", partial(lambda end, w: archive(w)[:-end], end), CUT) for end in range(1, 9)),  # its checksum
    *((f"{IMAGES}.gz", partial(lambda at, w: flipped(archive(w), at), at), CUT) for at in (0, 30, -6)),
]


@pytest.mark.parametrize(("name", "damaged", "says"), DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damaged: Callable[[Images], bytes], says: str) -> None:
    (tmp_path / name).write_bytes(damaged(write_set(tmp_path)))
    with pytest.raises(DataError, match=says):
        read_images(tmp_path, "train")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / IMAGES).mkdir()
    (tmp_path / LABELS).mkdir()
    with pytest.raises(DataError, match=r"cannot be read: .*Is a directory"):
        read_images(tmp_path, "train")
