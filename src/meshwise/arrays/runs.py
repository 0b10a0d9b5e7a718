"""Assemble an array along one dim from runs of other arrays.

Used by concat, roll, tile, pad and halo.

A run is a series of entries of one array. Each device wants an interval of the result's entries, and holds an interval
of the entries of a run. Where these intervals overlap, entries are sent. Only the entries that a device wants and does
not hold are moved, which is the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_of
from meshwise.arrays.array import Array
from meshwise.arrays.moves import Move, exchange, reshard
from meshwise.arrays.sharding import Sharding, evenly, resized, sharding
from meshwise.arrays.views import SIGNED, made


@dataclass(frozen=True)
class Run:
    """A series of `count` entries along one dim of `source`, from entry `start` on in steps of `step`."""

    source: Array
    start: int
    count: int
    step: int = 1


Interval = tuple[int, int, int]
"""(device number, begin, end): this device wants the entries from index `begin` to before `end` of the joined array."""


def whole(x: Array, dim: int) -> Run:
    """Return a `Run` that has all entries of `x` along a dim."""
    return Run(x, 0, x.shape[dim])


def joined(runs: Sequence[Run], dim: int, operation: str, placed: Sharding | None = None) -> Array:
    """Join runs to an array along `dim`."""
    first, sources = runs[0].source, [run.source for run in runs]
    shape = resized(first.shape, dim, sum(run.count for run in runs))
    placed = placed or _best(runs, dim)
    if placed.dim != dim:
        runs = [Run(reshard(run.source, placed, operation), run.start, run.count, run.step) for run in runs]
        parts = [
            _joined([_entries(run.source.parts[k], dim, run.start, run.count, run.step) for run in runs], dim)
            for k in range(len(runs[0].source.parts))
        ]
        return in_order_of(made(parts, placed, first, shape), sources)
    wanted = [
        (place, begin, begin + size)
        for place, begin, size in zip(placed.places, placed.offsets, placed.sizes, strict=True)
    ]
    return in_order_of(made(intervals(runs, dim, wanted, operation), placed, first, shape), sources)


def _best(runs: Sequence[Run], dim: int) -> Sharding:
    """Choose the sharding of the array of runs joined along `dim`."""
    lies = runs[0].source.sharding
    if lies.dim is None and all(run.source.sharding == lies for run in runs):
        return lies
    counts: dict[Sharding | None, int] = {}
    for run in runs:
        own = run.source.sharding
        key = own if own.dim not in (None, dim) else None
        counts[key] = counts.get(key, 0) + run.count
    return max(counts, key=lambda each: counts[each]) or as_held(runs, dim)


def as_held(runs: Sequence[Run], dim: int) -> Sharding:
    """Return a sharding along `dim` for the array of joined runs, with which few entries move."""
    sizes: dict[int, int] = {}
    for run in runs:
        lies = run.source.sharding
        if lies.dim == dim:
            for part, place in enumerate(lies.places):
                begin, end = _held(run, lies.offsets[part], lies.sizes[part])
                sizes[place] = sizes.get(place, 0) + end - begin
        else:
            shares = evenly(run.count, lies.places, dim).sizes
            for place, share in zip(lies.places, shares, strict=True):
                sizes[place] = sizes.get(place, 0) + share
    return sharding(tuple(sizes), dim, tuple(sizes.values()))


def intervals(runs: Sequence[Run], dim: int, wanted: Sequence[Interval], operation: str) -> list[Tensor]:
    """Join runs along `dim`, but make only the wanted intervals of the joined array."""
    space, dtype = runs[0].source.space, runs[0].source.dtype
    shape = runs[0].source.shape
    pieces: list[Move] = []
    kept: dict[int, dict[int, Tensor]] = {number: {} for number, each in enumerate(wanted) if each[0] in space.here}
    at = 0
    for run in runs:
        run = _divided(run, dim, at, wanted, operation)
        held = {
            place: part for (_, place), part in zip(space.local(run.source.sharding), run.source.parts, strict=True)
        }
        for place, offset, number, begin, end in _meetings(run, dim, at, wanted):
            tensor = None
            if place in held:
                start = run.start + run.step * (begin - at) - offset
                tensor = _entries(held[place], dim, start, end - begin, run.step)
            target = wanted[number][0]
            if place == target:
                if tensor is not None:
                    kept[number][begin] = tensor
            else:
                size = resized(shape, dim, end - begin)
                pieces.append(Move(place, target, (number, begin), size, dtype, tensor))
        at += run.count
    for (number, begin), tensor in exchange(space, pieces, operation).items():  # type: ignore[misc]
        kept[number][begin] = tensor
    parts = []
    for number, each in kept.items():
        found = [each[begin] for begin in sorted(each)]
        if not found:
            found = [torch.empty(resized(shape, dim, 0), dtype=dtype, device=space.devices[wanted[number][0]])]
        parts.append(_joined(found, dim))
    return parts


def _divided(run: Run, dim: int, at: int, wanted: Sequence[Interval], operation: str) -> Run:
    """Reshard the source array of a run along `dim`, if it is divided along another dim."""
    if run.source.sharding.dim in (None, dim) or run.step != 1 or run.count != run.source.shape[dim]:
        return run
    places = tuple(dict.fromkeys(place for place, _, _ in wanted))
    sizes = [max(0, min(end, at + run.count) - max(begin, at)) for _, begin, end in wanted]
    fits = len(places) == len(wanted) and sum(sizes) == run.count
    placed = sharding(places, dim, tuple(sizes)) if fits else evenly(run.count, places, dim)
    return Run(reshard(run.source, placed, operation), 0, run.count)


def _meetings(run: Run, dim: int, at: int, wanted: Sequence[Interval]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield which entries of a run have to be sent, from which device, and for which interval of `wanted`."""
    lies, length = run.source.sharding, run.source.shape[dim]
    for number, (target, begin, end) in enumerate(wanted):
        if lies.dim is None:
            place = target if target in lies.places else lies.places[number % len(lies.places)]
            holders = [(place, 0, length)]
        else:
            holders = list(zip(lies.places, lies.offsets, lies.sizes, strict=True))
        for place, offset, size in holders:
            first, last = _held(run, offset, size)
            first, last = max(first + at, begin), min(last + at, end)
            if first < last:
                yield place, offset, number, first, last


def _held(run: Run, offset: int, size: int) -> tuple[int, int]:
    """Return which entries of a run lie in one part of its source array, as (first, after the last)."""
    start, step, end = run.start, run.step, offset + size
    if step == 0:
        first, last = (0, run.count) if offset <= start < end else (0, 0)
    elif step > 0:
        first, last = -((start - offset) // step), -((start - end) // step)
    else:
        first, last = -((end - 1 - start) // -step), (start - offset) // -step + 1
    first = min(max(first, 0), run.count)
    return first, min(max(last, first), run.count)


def _entries(part: Tensor, dim: int, start: int, count: int, step: int) -> Tensor:
    """Return `count` entries along `dim` of one part of an array, from index `start` of the part on, in steps of
    `step`. Step 0 repeats one entry."""
    if step == 0:
        return part.narrow(dim, start, 1).expand(resized(part.shape, dim, count))
    if step == 1 or count <= 1:
        return part.narrow(dim, start if count else 0, count)
    last = start + step * (count - 1)
    low, high = min(start, last), max(start, last)
    found = part[(slice(None),) * dim + (slice(low, high + 1, abs(step)),)]
    return found.view(SIGNED.get(found.dtype, found.dtype)).flip(dim).view(found.dtype) if step < 0 else found


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors into new memory."""
    found = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(list(tensors), dim)
    return found.clone() if found is tensors[0] else found
