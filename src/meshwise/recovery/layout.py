"""Divide a state among ranks for writing: every element once.

The ranks' parts are about equal in bytes.

What only one rank holds, that rank writes. What several hold is dealt out: a small tensor, such as most buffers, to the
first of them, other tensors to the one that writes least so far; large tensors are divided among all that hold them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.compat.sharding import division, local_of
from meshwise.records.boxes import Box, cover, disjoint, volume
from meshwise.spec.errors import CheckpointError
from meshwise.transfer.sharded import full_tensor, local_boxes

SMALL, LARGE = 64 << 10, 1 << 20  # bytes of what the first holder writes, and of what is divided among the holders


@dataclass(frozen=True)
class Held:
    """The part of a tensor that a rank holds. shape: of the whole tensor. boxes: the parts' positions in it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """Size of the whole tensor, in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class WriteItem:
    """A piece of tensor `name` for a rank to write: `box`, which lies within `held`, a box that the rank holds."""

    name: str
    held: Box
    box: Box


def itemsize(dtype: str) -> int:
    """Return the size of an element of a dtype, in bytes."""
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def plainly_held(tensor: Tensor) -> Tensor:
    """Return `tensor`, gathered to a whole one if it is a DTensor of partial sums (collective then)."""
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
    """Return, for each box of `tensor` that this rank holds, a view of the memory with the box's elements."""
    boxes, dim = local_boxes(tensor)
    local, at, found = local_of(tensor).detach(), 0, {}
    for box in boxes:
        length = box[dim][1] - box[dim][0] if box else 0
        found[box] = local.narrow(dim, at, length) if box else local
        at += length
    return found


def view_of(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of the elements of `box`, one of the boxes of `tensor` that this rank holds."""
    return views(tensor)[box] if isinstance(tensor, DTensor) else tensor.detach()


def deal(ranks: Sequence[Mapping[str, Held]]) -> list[list[WriteItem]]:
    """Decide what each rank writes. ranks: what each holds. Raises CheckpointError if no rank holds some element."""
    shapes: dict[str, Held] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, every in enumerate(ranks):
        for name, each in every.items():
            known = shapes.setdefault(name, each)
            if (known.dtype, known.shape) != (each.dtype, each.shape):
                raise CheckpointError(
                    f"{name} cannot be saved: one rank holds it as {known.dtype} of {known.shape}, another as "
                    f"{each.dtype} of {each.shape}. Build the same model and optimizer on every rank."
                )
            for box in each.boxes:
                if volume(box):
                    holders.setdefault(name, {}).setdefault(box, []).append(rank)
    chosen = {name: _disjoint(name, each.shape, holders.get(name, {})) for name, each in shapes.items()}
    loads, parts = [0] * len(ranks), list[list[WriteItem]]([] for _ in ranks)

    def give(rank: int, part: WriteItem) -> None:
        parts[rank].append(part)
        loads[rank] += volume(part.box) * itemsize(shapes[part.name].dtype)

    shared: list[tuple[int, str, Box]] = []
    for name, boxes in chosen.items():
        for box in boxes:
            size, able = volume(box) * itemsize(shapes[name].dtype), holders[name][box]
            if len(able) == 1 or size < SMALL:
                give(able[0], WriteItem(name, box, box))
            else:
                shared.append((size, name, box))
    for size, name, box in sorted(shared, key=lambda each: -each[0]):
        able = holders[name][box]
        for piece in _divided(box, len(able)) if size >= LARGE else [box]:
            give(min(able, key=lambda rank: loads[rank]), WriteItem(name, box, piece))
    return parts


def _disjoint(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """Choose boxes that cover the tensor, every element once, the largest first. Raises CheckpointError if none do."""
    chosen = disjoint(boxes)
    if not cover(chosen, shape):
        found = sum(map(volume, chosen))
        raise CheckpointError(f"{name} cannot be saved: the ranks hold {found} of its {math.prod(shape)} elements.")
    return chosen


def _divided(box: Box, count: int) -> list[Box]:
    """Divide `box` into up to `count` about equal parts, along its first dim that is long enough, else its longest."""
    lengths = [end - begin for begin, end in box]
    dim = next((dim for dim, length in enumerate(lengths) if length >= count), lengths.index(max(lengths)))
    (begin, _), parts = box[dim], min(count, lengths[dim])
    ends = [begin + lengths[dim] * n // parts for n in range(parts + 1)]
    return [(*box[:dim], (ends[n], ends[n + 1]), *box[dim + 1 :]) for n in range(parts)]


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor; None if they do not intersect."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor of the elements of `outer`."""
    return tuple(slice(b - o, e - o) for (b, e), (o, _) in zip(box, outer, strict=True))


def rows(box: Box, outer: Box) -> tuple[int, int]:
    """Return, in the file order of `outer`, the index of the first element in `box`, and the count up to the last."""
    strides, step = list[int](), 1
    for begin, end in reversed(outer):
        strides.insert(0, step)
        step *= end - begin
    first = sum((b - o) * s for (b, _), (o, _), s in zip(box, outer, strides, strict=True))
    last = sum((e - 1 - o) * s for (_, e), (o, _), s in zip(box, outer, strides, strict=True))
    return first, last - first + 1


def described(parts: Iterable[WriteItem], shapes: Mapping[str, Held]) -> list[tuple[WriteItem, int]]:
    """Return the parts in file order, each with its size in bytes: wide elements first, so that all are aligned."""
    order = sorted(parts, key=lambda part: -itemsize(shapes[part.name].dtype))
    return [(part, volume(part.box) * itemsize(shapes[part.name].dtype)) for part in order]


def key_of(part: WriteItem, shape: Sequence[int]) -> str:
    """Return a part's name in its file: the tensor's name, then the part's position if it is not the whole tensor."""
    whole = all(bounds == (0, length) for bounds, length in zip(part.box, shape, strict=True))
    place: Any = [f"{begin}:{end}" for begin, end in part.box]
    return part.name if whole else f"{part.name}[{','.join(place)}]"
