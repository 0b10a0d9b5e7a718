"""Make the small data that scripts of others read: `data` of scripts.toml."""

from __future__ import annotations

import random
from pathlib import Path


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


def waves(folder: Path) -> None:
    """Those of generate_sine_wave.py, shorter."""
    import numpy
    import torch

    x = numpy.arange(40) + numpy.random.default_rng(2).integers(-80, 80, (14, 1))
    torch.save(numpy.sin(x / 20.0), folder / "traindata.pt", pickle_protocol=4)


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
