"""Read and write entries by integer arrays: `x[i, j]`.

These functions are for an `x` that is sharded along one of the indexed dims.

Each device sorts its indices by the device that holds the entry, requests the entries, and receives them. Before that,
the devices tell each other how many entries they request, and wait for these numbers.

Only this moves, which is the lower bound: each entry that is on another device, and 8 bytes for its index, unless every
device knows all indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.arrays.align import broadcast_shape
from meshwise.arrays.array import Array, numbered
from meshwise.arrays.layout import spread
from meshwise.arrays.moves import Move, agreed, exchange, replicate
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding
from meshwise.arrays.space import Space
from meshwise.arrays.views import first_divided, made, size_of

OPERATION = "index"


@dataclass(frozen=True)
class Asked:
    """The entries of an array that index arrays select."""

    dims: tuple[int, ...]
    shape: Shape
    placed: Sharding
    flat: list[Tensor]
    every: dict[int, Tensor]


def others(x: Array, dims: Sequence[int]) -> tuple[list[int], Shape]:
    """Return the dims of `x` that are not in `dims`, and their lengths."""
    rest = [dim for dim in range(x.ndim) if dim not in dims]
    return rest, tuple(x.shape[dim] for dim in rest)


def hosted(space: Space, values: Tensor, placed: Sharding) -> Array:
    """Make an array from a tensor that every process has in host memory. Nothing is sent between devices."""
    shape = tuple(values.shape)
    parts = tuple(
        values[placed.interval(shape, part)].to(space.devices[place], copy=True) for part, place in space.local(placed)
    )
    return Array(parts, placed, shape, values.dtype, space)


def common_shape(indices: Sequence[Array | Tensor]) -> Shape:
    """Return the shape to which the index arrays broadcast. Raises IndexError if they do not broadcast."""
    try:
        return broadcast_shape("index arrays", [tuple(each.shape) for each in indices])
    except ValueError as error:
        raise IndexError(str(error)) from error


def ask(x: Array, dims: tuple[int, ...], indices: Sequence[Array | Tensor], *, in_order: bool = False) -> Asked:
    """Find the entries of `x` that are selected by index arrays."""
    places = x.sharding.places
    everywhere = sharding(places)
    lengths = [x.shape[dim] for dim in dims]
    shape = common_shape(indices)
    ordered = _rows_that_stay(x, dims, indices)
    arrays = [each if isinstance(each, Array) else hosted(x.space, each, everywhere) for each in indices]
    divided = [each for each in arrays if each.sharding != everywhere]
    if not divided:
        placed = ordered or (evenly(shape[0], places) if shape else sharding(places[:1]))
    else:
        largest = max(divided, key=lambda each: size_of(each.shape))
        grown = len(shape) - largest.ndim
        placed = largest.sharding
        if placed.dim is not None:
            repeats = largest.shape[placed.dim] != shape[placed.dim + grown]
            placed = first_divided(shape, places) if repeats else placed.along(placed.dim + grown)
            if in_order and placed.dim is not None and size_of(shape[: placed.dim]) > 1:
                placed = first_divided(shape, placed.places)
    flat = _flat([spread(each, shape, placed, OPERATION) for each in arrays], lengths)
    every = {}
    if not divided:
        whole = _flat([spread(each, shape, everywhere, OPERATION) for each in arrays], lengths)
        every = {place: each.view(shape) for (_, place), each in zip(x.space.local(everywhere), whole, strict=True)}
    return Asked(dims, shape, placed, flat, every)


def _rows_that_stay(x: Array, dims: tuple[int, ...], indices: Sequence[Array | Tensor]) -> Sharding | None:
    """Return the sharding of `x[indices]` with which no entry of `x` has to move, or None if there is none."""
    if len(indices) > 1 and any(each.ndim != 1 for each in indices if isinstance(each, Tensor)):
        return None
    if x.sharding.dim not in dims:
        return None
    index = indices[dims.index(x.sharding.dim)]
    if not isinstance(index, Tensor) or index.ndim != 1 or not index.numel():
        return None
    if any(isinstance(each, Array) or each.shape != index.shape for each in indices):
        return None
    index = torch.where(index < 0, index + x.shape[x.sharding.dim], index)
    if bool((index[1:] < index[:-1]).any()) or index[0] < 0 or index[-1] >= x.shape[x.sharding.dim]:
        return None
    sizes = torch.bincount(_owners(index, x.sharding), minlength=len(x.sharding.places)).tolist()
    return sharding(x.sharding.places, 0, tuple(sizes))


def _owners(entries: Tensor, placed: Sharding) -> Tensor:
    """Return, for each entry, the number of the part that holds it."""
    ends = torch.tensor(list(itertools.accumulate(placed.sizes)), device=entries.device)
    return torch.bucketize(entries, ends, right=True)


def _flat(indices: Sequence[Array], lengths: Sequence[int]) -> list[Tensor]:
    """Combine index arrays of several dims into a vector of row-major indices per local part.
    An invalid index becomes -1."""
    flat = []
    for parts in zip(*(each.parts for each in indices), strict=True):
        number = torch.zeros_like(parts[0], dtype=torch.int64).reshape(-1)
        inside = torch.ones_like(number, dtype=torch.bool)
        for index, length in zip(parts, lengths, strict=True):
            entry = index.reshape(-1).to(torch.int64)
            inside &= (entry >= -length) & (entry < length)
            number = number * length + torch.where(entry < 0, entry + length, entry)
        flat.append(torch.where(inside, number, -1))
    return flat


def _coordinates(number: Tensor, lengths: Sequence[int], at: int | None, offset: int) -> tuple[Tensor, ...]:
    """Convert row-major indices to an index for each dim. The indices of dim number `at` are counted from `offset`."""
    found = []
    for dim in reversed(range(len(lengths))):
        entry = number % lengths[dim]
        found.append(entry - offset if dim == at else entry)
        number = torch.div(number, lengths[dim], rounding_mode="floor")
    return tuple(reversed(found))


@dataclass(frozen=True)
class Routes:
    """Which entries each device requests from each other device."""

    orders: list[Tensor]
    counts: list[list[int]]
    requests: dict[tuple[int, int], Tensor]


def route(x: Array, asked: Asked) -> Routes:
    """Tell each device which of its entries are requested.
    Raises IndexError for an index out of bounds."""
    space, held, placed = x.space, x.sharding, asked.placed
    at = asked.dims.index(held.dim) if held.dim is not None else 0
    below = math.prod(x.shape[dim] for dim in asked.dims[at + 1 :])
    orders, sorts, own = [], {}, {place: [0] * (len(held.places) + 1) for place in space.here}
    for (part, place), flat in zip(space.local(placed), asked.flat, strict=True):
        entry = torch.div(flat, below, rounding_mode="floor") % x.shape[held.dim or 0] if flat.numel() else flat
        owners = torch.where(flat < 0, len(held.places), _owners(entry, held))
        each = [(owners == number).nonzero().reshape(-1) for number in range(len(held.places) + 1)]
        orders.append(torch.cat(each))
        sorts[part] = flat[orders[-1]]
        own[place] = list(map(len, each))
    rows = agreed(space, [count for place in space.here for count in own[place]], OPERATION)
    table = [rows[k : k + len(held.places) + 1] for k in range(0, len(rows), len(held.places) + 1)]
    if any(row[-1] for row in table):
        lengths = ", ".join(f"{x.shape[dim]} along axis {dim}" for dim in asked.dims)
        raise IndexError(f"an index is out of bounds. Lengths of the array: {lengths}.")
    counts = [table[place][:-1] for place in placed.places]
    pieces = []
    for t, s in itertools.product(range(len(placed.places)), range(len(held.places))):
        begin, count = sum(counts[t][:s]), counts[t][s]
        if count and not asked.every:
            tensor = sorts[t][begin : begin + count] if t in sorts else None
            pieces.append(Move(placed.places[t], held.places[s], (t, s), (count,), torch.int64, tensor))
    requests: dict[tuple[int, int], Tensor] = exchange(space, pieces, OPERATION)  # type: ignore[assignment]
    for s, place in space.local(held) if asked.every else ():
        for t in range(len(placed.places)):
            theirs = asked.every[place][placed.interval(asked.shape, t)].reshape(-1)
            entry = torch.div(theirs, below, rounding_mode="floor") % x.shape[held.dim or 0] if counts[t][s] else theirs
            requests[t, s] = theirs[_owners(entry, held) == s] if counts[t][s] else theirs[:0]
    return Routes(orders, counts, requests)


def fetch(x: Array, asked: Asked) -> Array:
    """Return the selected entries. The result has the dims of the indices, followed by the other dims of `x`."""
    space, held, placed = x.space, x.sharding, asked.placed
    routes = route(x, asked)
    rest, tail = others(x, asked.dims)
    rows = {}
    for s, part in numbered(x):
        turned = part.permute(*asked.dims, *rest)
        for t in range(len(placed.places)):
            if routes.counts[t][s]:
                where = _local(x, asked, s, routes.requests[t, s])
                # index_select takes only one index, but is five times as fast
                rows[t, s] = turned.index_select(0, where[0]) if len(where) == 1 else turned[where]
    pieces = [
        Move(place, placed.places[t], (t, s), (routes.counts[t][s], *tail), x.dtype, rows.get((t, s)))
        for t in range(len(placed.places))
        for s, place in enumerate(held.places)
        if routes.counts[t][s]
    ]
    arrived = exchange(space, pieces, OPERATION)
    parts = []
    for (t, place), order in zip(space.local(placed), routes.orders, strict=True):
        got = [arrived[t, s] for s in range(len(held.places)) if routes.counts[t][s]]
        out = torch.empty((len(order), *tail), dtype=x.dtype, device=space.devices[place])
        if got:
            out.index_copy_(0, order, torch.cat(got) if len(got) > 1 else got[0])
        parts.append(out.view((*placed.part_shape(asked.shape, t), *tail)))
    return made(parts, placed, x, (*asked.shape, *tail))


def store(x: Array, views: Sequence[Tensor], asked: Asked, values: Array | complex) -> None:
    """Write values to the entries `asked` of `x`."""
    space, held, placed = x.space, x.sharding, asked.placed
    routes = route(x, asked)
    rest, tail = others(x, asked.dims)
    arrived = {}
    if isinstance(values, Array):
        sent = {}
        for (t, _), part, order in zip(space.local(placed), values.parts, routes.orders, strict=True):
            sent[t] = part.reshape(len(order), *tail)[order]
        pieces = []
        for t, s in itertools.product(range(len(placed.places)), range(len(held.places))):
            begin, count = sum(routes.counts[t][:s]), routes.counts[t][s]
            if count:
                tensor = sent[t][begin : begin + count] if t in sent else None
                pieces.append(Move(placed.places[t], held.places[s], (t, s), (count, *tail), x.dtype, tensor))
        arrived = exchange(space, pieces, OPERATION)
    for (s, _), view in zip(space.local(held), views, strict=True):
        from_parts = [t for t in range(len(placed.places)) if routes.counts[t][s]]
        if not from_parts:
            continue
        numbers = torch.cat([routes.requests[t, s] for t in from_parts])
        where = _local(x, asked, s, numbers)
        turned = view.permute(*asked.dims, *rest)
        if isinstance(values, Array):
            size = math.prod(x.shape[dim] for dim in asked.dims)
            turned[where] = torch.cat([arrived[t, s] for t in from_parts])[last_of_each(numbers, size)]
        else:
            turned[where] = values  # type: ignore[assignment]  # torch accepts complex numbers; its stubs do not


def _local(x: Array, asked: Asked, part: int, numbers: Tensor) -> tuple[Tensor, ...]:
    at = asked.dims.index(x.sharding.dim) if x.sharding.dim is not None else None
    offset = x.sharding.offsets[part] if at is not None else 0
    return _coordinates(numbers, [x.shape[dim] for dim in asked.dims], at, offset)


def last_of_each(numbers: Tensor, size: int) -> Tensor:
    """Return for each number the last position at which an equal number occurs."""
    if size <= 8 * len(numbers):  # a table of all numbers is cheaper than sorting the given ones
        last = torch.zeros(size, dtype=torch.int64, device=numbers.device)
        at = torch.arange(len(numbers), device=numbers.device)
        return last.scatter_reduce_(0, numbers, at, "amax")[numbers]
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    return order[torch.searchsorted(ordered, numbers.contiguous(), right=True) - 1]


def everywhere(x: Array, indices: Sequence[Array | Tensor]) -> list[Array]:
    """Return the index arrays, replicated on all devices of `x`."""
    places = x.sharding.places
    return [
        replicate(each, places, OPERATION) if isinstance(each, Array) else hosted(x.space, each, sharding(places))
        for each in indices
    ]
