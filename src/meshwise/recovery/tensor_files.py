"""Write and read safetensors files, a box at a time.

A file is written from one buffer, and hashed.

The bytes are read directly into the wanted tensor. Files are not mapped into memory, because the pages of a mapped file
count as memory of the process, and the process dies if a mapped file is truncated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from meshwise.records.boxes import volume
from meshwise.records.checkpoints import StoredTensor
from meshwise.recovery.layout import Held, WriteItem, intersection, itemsize, key_of, rows, within
from meshwise.spec.errors import CheckpointError
from meshwise.transfer.sharded import Box

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
ALIGNED = 64  # bytes to a multiple of which the header is filled up


def laid_out(parts: Iterable[WriteItem], shapes: Mapping[str, Held]) -> tuple[bytes, dict[WriteItem, int], int]:
    """Return the header bytes of a file with these parts, the offset of each part in the file, and the file's size.

    Parts whose dtype has the most bytes come first, so that each begins at a multiple of its element size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, places = 0, {}
    for part in sorted(parts, key=lambda part: -itemsize(shapes[part.name].dtype)):
        size = volume(part.box) * itemsize(shapes[part.name].dtype)
        known = NAMES.get(shapes[part.name].dtype)  # another dtype is written as its bytes; the manifest knows it
        lengths = [end - begin for begin, end in part.box] if known else [size]
        header[key_of(part, shapes[part.name].shape)] = {
            "dtype": known or "U8",
            "shape": lengths,
            "data_offsets": [at, at + size],
        }
        places[part] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {part: len(begin) + place for part, place in places.items()}, len(begin) + at


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class TensorFiles:
    """The tensors in the files of a checkpoint's folder. Files stay open from the first read until `close`."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder, self.tensors = folder, tensors
        self._open: dict[str, int] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, name: str, box: Sequence[slice] | None = None) -> Tensor:
        """Read a tensor, or only a box of it.

        box: a slice with start and stop for each dim.
        """
        stored = self.tensors[name]
        wanted: Box = tuple((s.start, s.stop) for s in box) if box is not None else tuple((0, n) for n in stored.shape)
        out = torch.empty([end - begin for begin, end in wanted], dtype=getattr(torch, stored.dtype))
        for piece in stored.pieces:
            both = intersection(piece.box, wanted)
            if both is not None:
                self._read_into(out[within(both, wanted)], piece.file, piece.at, both, piece.box)
        return out

    def _read_into(self, out: Tensor, file: str, at: int, box: Box, outer: Box) -> None:
        first, count = rows(box, outer)
        begin = at + first * out.element_size()
        if count == volume(box) and out.is_contiguous():
            self._fill(as_bytes(out), file, begin)
        else:
            read = torch.empty(count, dtype=out.dtype)
            self._fill(as_bytes(read), file, begin)
            out.copy_(read.as_strided(out.shape, _strides(outer)))

    def _fill(self, into: memoryview, file: str, at: int) -> None:
        try:
            if file not in self._open:
                self._open[file] = os.open(self._folder / file, os.O_RDONLY)
            while len(into):
                if not (count := os.preadv(self._open[file], [into], at)):
                    raise CheckpointError(f"{self._folder / file} is too short: the file changed while it was read.")
                into, at = into[count:], at + count
        except OSError as error:
            raise CheckpointError(f"{self._folder / file} cannot be read ({error.strerror}).") from None


def _strides(box: Box) -> list[int]:
    found, step = list[int](), 1
    for begin, end in reversed(box):
        found.insert(0, step)
        step *= end - begin
    return found
