"""Divide a state among ranks for writing; write and read safetensors files.

Every element is written once, and the ranks' parts are about equal in bytes. What only one rank holds, this rank
writes. Of what several ranks hold, a small tensor, such as most buffers, is written by the first of these ranks, and
any other tensor by the rank that has to write the fewest bytes so far.

A file is written from one buffer, and hashed. A box is read directly into the wanted tensor. Files are not mapped into
memory, because the pages of a mapped file count as memory of the process, and the process dies if a mapped file is
truncated.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.records.checkpoints import Box, StoredTensor, cover, disjoint, volume
from meshwise.spec.errors import CheckpointError
from meshwise.torch_compat.sharding import division, local_of
from meshwise.transfer.sharded import full_tensor, local_boxes

SMALL = 64 << 10  # bytes below which the first holder writes
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


@dataclass(frozen=True)
class Held:
    """The part of one tensor that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """The size of the whole tensor, in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class WriteItem:
    """A part of the tensor `name` that a rank holds, and writes to a file: (begin, end) of its indices for each dim."""

    name: str
    box: Box


def itemsize(dtype: str) -> int:
    """Return the size of one element in bytes. dtype: the name of a torch dtype, such as `float32`."""
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def plainly_held(tensor: Tensor) -> Tensor:
    """Return a tensor whose local values the ranks can save."""
    if isinstance(tensor, DTensor) and any(division(p) is None and not p.is_replicate() for p in tensor.placements):
        return full_tensor(tensor)
    return tensor


def held(tensor: Tensor) -> Held:
    """Return the part of `tensor` that this rank holds."""
    shape = tuple(tensor.shape)
    boxes = tuple(local_boxes(tensor)[0]) if isinstance(tensor, DTensor) else (tuple([(0, n) for n in shape]),)
    return Held(_name(tensor.dtype), shape, boxes)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def views(tensor: Tensor) -> dict[Box, Tensor]:
    """Return the values of `tensor` that this rank holds, as views by box."""
    boxes, dim = local_boxes(tensor)
    local, at, found = local_of(tensor).detach(), 0, {}
    for box in boxes:
        length = box[dim][1] - box[dim][0] if box else 0
        found[box] = local.narrow(dim, at, length) if box else local
        at += length
    return found


def view_of(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of the elements of `box`, which must be one of the boxes of `tensor` that this rank holds."""
    return views(tensor)[box] if isinstance(tensor, DTensor) else tensor.detach()


def deal(ranks: Sequence[Mapping[str, Held]]) -> list[list[WriteItem]]:
    """Decide what each rank writes."""
    shapes: dict[str, Held] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, every in enumerate(ranks):
        for name, each in every.items():
            known = shapes.setdefault(name, each)
            if (known.dtype, known.shape) != (each.dtype, each.shape):
                raise CheckpointError(
                    f"{name} cannot be saved: it has dtype {known.dtype} and shape {known.shape} on one rank, but "
                    f"{each.dtype} and {each.shape} on another. Build the same model and optimizer on every rank."
                )
            for box in each.boxes:
                if volume(box):
                    holders.setdefault(name, {}).setdefault(box, []).append(rank)
    loads, parts = [0] * len(ranks), list[list[WriteItem]]([] for _ in ranks)
    items: list[tuple[int, WriteItem, list[int]]] = []
    for name, each in shapes.items():
        for box in _disjoint(name, each.shape, holders.get(name, {})):
            size, able = volume(box) * itemsize(each.dtype), holders[name][box]
            items.append((size, WriteItem(name, box), able if size >= SMALL else able[:1]))
    for size, item, able in sorted(items, key=lambda each: (len(each[2]) > 1, -each[0])):
        rank = min(able, key=lambda rank: loads[rank])
        parts[rank].append(item)
        loads[rank] += size
    return parts


def _disjoint(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """Choose boxes that cover a tensor so that no element is covered twice."""
    chosen = disjoint(boxes)
    if not cover(chosen, shape):
        found = sum(map(volume, chosen))
        raise CheckpointError(f"{name} cannot be saved: the ranks have {found} of its {math.prod(shape)} elements.")
    return chosen


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that holds the elements of `outer`."""
    return tuple(slice(b - o, e - o) for (b, e), (o, _) in zip(box, outer, strict=True))


def rows(box: Box, outer: Box) -> tuple[int, int]:
    """Return which elements of a file to read to get `box`."""
    strides, step = list[int](), 1
    for begin, end in reversed(outer):
        strides.insert(0, step)
        step *= end - begin
    first = sum((b - o) * s for (b, _), (o, _), s in zip(box, outer, strides, strict=True))
    last = sum((e - 1 - o) * s for (_, e), (o, _), s in zip(box, outer, strides, strict=True))
    return first, last - first + 1


def key_of(part: WriteItem, shape: Sequence[int]) -> str:
    """Return the name under which a file stores a part of a tensor, such as `weight[0:3,0:5]`."""
    whole = all(bounds == (0, length) for bounds, length in zip(part.box, shape, strict=True))
    place: Any = [f"{begin}:{end}" for begin, end in part.box]
    return part.name if whole else f"{part.name}[{','.join(place)}]"


def laid_out(parts: Iterable[WriteItem], shapes: Mapping[str, Held]) -> tuple[bytes, dict[WriteItem, int], int]:
    """Return the header bytes of a file with these parts, the offset of each part in the file, and the file's size."""
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
        """Read a tensor, or only a box of it."""
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
