"""Read Python's standard library as documents of unequal length.

Every Python installation has these sources.

A document is a sequence of whole paragraphs (separated by blank lines) of at most `longest` bytes in total. A hash of a
file's name decides whether the file is held out. So the split is the same everywhere, and no file is in both parts.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.spec.errors import DataError

HELD_OUT = 16  # one file in 16
SHORTEST = 24  # bytes; what is shorter is no document
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}  # not the library, or not everywhere
IGNORED = -100  # the target that cross entropy leaves out
START = 256  # the token that stands before every document; the others are its bytes


@dataclass(frozen=True)
class Documents:
    """Documents of unequal length, concatenated.

    data: uint8 of shape (all bytes,).
    starts, lengths: int64 of shape (documents,).
    """

    data: Tensor
    starts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 of shape (documents, longest length). The targets of padding are
        `IGNORED`."""
        lengths = self.lengths[indices].unsqueeze(1)
        place = torch.arange(int(lengths.max()))
        inside = place < lengths
        text = self.data[(self.starts[indices].unsqueeze(1) + place).clamp(max=len(self.data) - 1)].long()
        targets = torch.where(inside, text, IGNORED)
        before = torch.full((len(indices), 1), START)
        inputs = torch.cat([before, torch.where(inside, text, START)[:, :-1]], dim=1)
        return inputs, targets


def read_files(folder: Path | None = None) -> tuple[list[bytes], list[bytes]]:
    """Read the contents of training files and of held-out files, each sorted by file name."""
    if folder is None:
        root, pattern, skipped, asked = Path(sysconfig.get_paths()["stdlib"]), "*.py", SKIPPED, "this Python's library"
    else:
        root, pattern, skipped, asked = folder, "*", set[str](), "--data"
    if not root.is_dir():
        raise DataError(f"{asked} {root} does not exist. Give --data a folder of text files.")
    names = sorted(_text_files(root, pattern, skipped))
    train = [(root / name).read_bytes() for name in names if not _held_out(name)]
    held_out = [(root / name).read_bytes() for name in names if _held_out(name)]
    if len(names) > 1:  # so few files that the hash put them all on one side
        train, held_out = train or [held_out.pop()], held_out or [train.pop()]
    if not train or not held_out:
        raise DataError(
            f"{asked} {root} must have at least two text files, one of them for the test set, but it has {len(names)}. "
            "Give --data a folder with more text files."
        )
    return train, held_out


def make_documents(files: Sequence[bytes], longest: int, most: int) -> Documents:
    """Draw at most `most` documents of at most `longest` bytes each from all `files`."""
    pieces = [piece for file in files for piece in cut(file, longest)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:most].tolist()
    chosen = [pieces[i] for i in order]
    if not chosen:
        raise DataError(f"every text file is shorter than {SHORTEST} bytes. Use at least one longer text file.")
    lengths = torch.tensor([len(piece) for piece in chosen])
    data = torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8)
    return Documents(data, lengths.cumsum(0) - lengths, lengths)


def cut(text: bytes, longest: int) -> Iterator[bytes]:
    """Split a file into documents. Each document has as many whole paragraphs as fit into `longest` bytes. Only a
    paragraph that is longer is split. Documents of less than SHORTEST bytes are left out."""
    held = b""
    for paragraph in text.split(b"\n\n"):
        paragraph += b"\n\n"
        if held and len(held) + len(paragraph) > longest:
            yield from (held,) if len(held) >= SHORTEST else ()
            held = b""
        held += paragraph
        while len(held) > longest:
            yield held[:longest]
            held = held[longest:]
    if len(held) >= SHORTEST:
        yield held


def _text_files(root: Path, pattern: str, skipped: Set[str]) -> Iterator[str]:
    for path in root.rglob(pattern):
        name = path.relative_to(root)
        hidden = any(part.startswith((".", "__pycache__")) for part in name.parts)
        if path.is_file() and not hidden and skipped.isdisjoint(name.parts):
            yield name.as_posix()


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0
