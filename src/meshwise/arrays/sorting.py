"""Sort along one axis, on each device or across devices.

Along a dim that is not split, each device sorts the part that it holds.

A split vector is sorted in four steps. Each part is sorted where it lies. `selection.cuts` finds how many elements of
each part belong on which device. These elements are exchanged. Each device merges what it received. Every element moves
at most once, which is the minimum for a result that is sharded like the operand. In addition, each round reads some
hundred elements as samples. argsort also sends the position of each element in its part.

An array with other dims that is to be sorted along its split dim is first split along another dim, and then back, which
moves as much as two transposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_of
from meshwise.arrays.array import Array, like
from meshwise.arrays.lanes import freed
from meshwise.arrays.moves import Move, exchange, reshard
from meshwise.arrays.reductions import as_array
from meshwise.arrays.reshaping import flat
from meshwise.arrays.rules import by_name
from meshwise.arrays.selection import cuts, merge, merge_values, order, sort_values
from meshwise.arrays.views import axis_of


def sort(x: Array, /, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """Sort `x` along `axis`."""
    return _along(x, axis, descending, 0, "sort")


def argsort(x: Array, /, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """Return the indices that sort `x` along `axis`. The sort is always stable."""
    return _along(x, axis, descending, 1, "argsort")


def _along(x: Array, axis: int | None, descending: bool, wanted: int, name: str) -> Array:
    given = x = as_array(name, x)
    x, axis = (flat(x), 0) if axis is None else (x, axis)
    axis, dtype = axis_of(axis, x.ndim, name), torch.int64 if wanted else x.dtype
    held = x.sharding
    if held.dim == axis:
        others = [length for dim, length in enumerate(x.shape) if dim != axis]
        if all(length == 1 for length in others):
            return _vector(x, axis, descending, wanted, name)
        x = freed(x, {axis}, name)
    if not wanted and x.ndim == 1:
        parts = tuple(sort_values(part, descending) for part in x.parts)
    else:
        parts = tuple(order(part, axis, descending)[wanted] for part in x.parts)
    found = reshard(like(x, parts, dtype), held, name)
    return found if wanted else in_order_of(found, [given])


def _vector(x: Array, axis: int, descending: bool, wanted: int, name: str) -> Array:
    """Sort an array that is split along `axis` and has length 1 along all other dims."""
    flat = tuple(part.reshape(-1) for part in x.parts)
    line = Array(flat, x.sharding.along(0), (x.shape[axis],), x.dtype, x.space)
    done = sort_parts(line, name, descending=descending, where=bool(wanted))
    parts = indices(line, done, name) if wanted else done.values
    here = x.space.local(x.sharding)
    shaped = [part.reshape(x.sharding.part_shape(x.shape, k)) for part, (k, _) in zip(parts, here, strict=True)]
    return like(x, shaped, torch.int64 if wanted else None)


@dataclass(frozen=True)
class SortedParts:
    """The result of sorting a vector that is split over devices. Each device has as many elements as before the
    sort."""

    values: list[Tensor]
    local: list[Tensor]
    merge: list[Tensor]
    sent: list[list[int]]


def sort_parts(x: Array, name: str, *, descending: bool = False, where: bool) -> SortedParts:
    """Sort a split vector. where: whether to also keep what `indices` needs."""
    held = x.sharding
    local: list[Tensor] = []
    if where:
        alone = [order(part, 0, descending) for part in x.parts]
        own, local = [values for values, _ in alone], [at for _, at in alone]
    else:
        own = [sort_values(part, descending) for part in x.parts]
    found = cuts(like(x, own), held.offsets[1:], descending=descending)
    ends = zip(*found, held.sizes, strict=True)
    sent = [[b - a for a, b in pairwise((0, *each))] for each in ends]
    came = swapped(x, sent, own, x.dtype, name)
    if not where:
        return SortedParts([merge_values(runs, descending) for runs in came], local, [], sent)
    merged = [merge(runs, descending) for runs in came]
    return SortedParts([values for values, _ in merged], local, [at for _, at in merged], sent)


def indices(x: Array, done: SortedParts, name: str) -> list[Tensor]:
    """Return the original index in `x` of each element of the sorted vector `done`."""
    held = x.sharding
    small = torch.int32 if max(held.sizes) < 2**31 else torch.int64
    came = swapped(x, done.sent, [at.to(small) for at in done.local], small, name)
    found = []
    for lists, at in zip(came, done.merge, strict=True):
        globally = [part.to(torch.int64) + begin for part, begin in zip(lists, held.offsets, strict=True)]
        found.append(torch.cat(globally)[at])
    return found


def swapped(
    x: Array, sizes: Sequence[Sequence[int]], parts: Sequence[Tensor], dtype: torch.dtype, name: str
) -> list[list[Tensor]]:
    """Exchange entries between parts. Return, for each local part, what it got from each part."""
    space, places = x.space, x.sharding.places
    segments = {}
    for (k, _), part in zip(space.local(x.sharding), parts, strict=True):
        segments.update({(k, j): piece for j, piece in enumerate(part.split(list(sizes[k])))})
    pieces = [
        Move(places[k], places[j], (k, j), (sizes[k][j],), dtype, segments.get((k, j)))
        for j in range(len(places))
        for k in range(len(places))
        if sizes[k][j]
    ]
    came = exchange(space, pieces, name)
    none = {place: part[:0] for (_, place), part in zip(space.local(x.sharding), parts, strict=True)}
    return [[came.get((k, j), none[place]) for k in range(len(places))] for j, place in space.local(x.sharding)]


FUNCTIONS = by_name(sort, argsort)
