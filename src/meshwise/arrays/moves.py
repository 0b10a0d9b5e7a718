"""Move arrays between devices: exchange pieces, reshard, combine parts.

Other files move arrays only by these functions.

Operations ask for a sharding. Interval arithmetic finds what has to move, and each piece is a row of the open
`mw.comm_log`. Over ranks, every rank makes the same list of pieces, so that sender and receiver agree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.arrays.array import Array, mapped, numbered
from meshwise.arrays.sharding import Shape, Sharding, Slices, overlaps, sharding
from meshwise.arrays.space import Space
from meshwise.transfer import collectives
from meshwise.transfer.comm_log import OPEN, note
from meshwise.transfer.copy import CopyOptions, move
from meshwise.transfer.devices import OPEN_DEVICES, name_of
from meshwise.transfer.path import choose
from meshwise.workers.verb_log import log_verb

EXPLAINED: list[object] = []
"""Not empty while `mw.explain` runs. Meanwhile, transfers are logged, but not made."""


class Move(NamedTuple):
    """A tensor to send from one device to another. `source` and `target` are the numbers of the devices in the
    namespace."""

    source: int
    target: int
    key: Hashable
    shape: Shape
    dtype: torch.dtype
    tensor: Tensor | None = None
    into: Tensor | None = None


def exchange(space: Space, pieces: Iterable[Move], operation: str) -> dict[Hashable, Tensor]:
    """Send tensors between devices. Return the tensors that arrived in this process, by their keys."""
    if space.over_ranks:
        return _over_ranks(space, list(pieces), operation)
    arrived = {}
    for piece in pieces:
        assert piece.tensor is not None
        if piece.source == piece.target:
            arrived[piece.key] = piece.tensor if piece.into is None else piece.into.copy_(piece.tensor)
            continue
        out = piece.into
        if out is None:
            out = torch.empty(piece.shape, dtype=piece.dtype, device=space.devices[piece.target])
        if EXPLAINED:
            source, target = (name_of(space.devices[at]) for at in (piece.source, piece.target))
            way = choose(source, target, out.nbytes)
            note(operation, space.names[piece.source], space.names[piece.target], out.nbytes, way, math.nan)
        elif OPEN or OPEN_DEVICES or not space.on_host:
            move(out, piece.tensor, operation, CopyOptions(ends=(space.names[piece.source], space.names[piece.target])))
        else:
            out.copy_(piece.tensor)
        arrived[piece.key] = out
    return arrived


def _over_ranks(space: Space, pieces: Sequence[Move], operation: str) -> dict[Hashable, Tensor]:
    """Send tensors between ranks in one batch."""
    log_verb(operation)
    (own,) = space.here
    arrived, sends, receives, copies = {}, [], [], []
    for piece in pieces:
        if piece.source == piece.target == own:
            assert piece.tensor is not None
            arrived[piece.key] = piece.tensor if piece.into is None else piece.into.copy_(piece.tensor)
        elif piece.source == own:
            assert piece.tensor is not None
            sends.append((piece.tensor.contiguous(), piece.target))
        elif piece.target == own:
            out = piece.into
            if out is None or not out.is_contiguous():
                out = torch.empty(piece.shape, dtype=piece.dtype, device=space.devices[own])
            receives.append((out, piece.source))
            copies.append((piece, out))
    if sends or receives:
        collectives.send_receive(sends, receives, collectives.everyone(), operation)
    for piece, out in copies:
        arrived[piece.key] = out if piece.into is None or piece.into is out else piece.into.copy_(out)
    return arrived


def reshard(x: Array, wanted: Sharding, operation: str = "reshard", *, own: bool = False) -> Array:
    """Return `x` with another sharding. own: whether the result must not share memory with `x`."""
    held, space, shape = x.sharding, x.space, x.shape
    if held is wanted or held == wanted:
        return mapped(x, torch.clone) if own else x
    steps, whole = _plan(shape, held, wanted, own)
    parts: Sequence[Tensor | None] = x.parts
    if space.over_ranks:
        here = dict(numbered(x))
        parts = [here.get(part) for part in range(len(held.places))]
    made: dict[int, Tensor] = {}
    for part, place in space.local(wanted):
        if part not in whole:
            made[part] = torch.empty(wanted.part_shape(shape, part), dtype=x.dtype, device=space.devices[place])
    pieces = []
    for source, target, size, theirs, ours in steps:
        tensor, into = parts[source], made.get(target)
        if tensor is not None and theirs is not None:
            tensor = tensor[theirs]
        if into is not None and ours is not None:
            into = into[ours]
        pieces.append(Move(held.places[source], wanted.places[target], target, size, x.dtype, tensor, into))
    arrived = exchange(space, pieces, operation)
    laid = tuple([made[part] if part in made else arrived[part] for part, _ in space.local(wanted)])
    return Array(laid, wanted, shape, x.dtype, space)


Step = tuple[int, int, Shape, Slices | None, Slices | None]
"""(source part, target part, shape to send, slices of source part, slices of target part). None: the whole part."""


@functools.lru_cache(maxsize=4096)
def _plan(shape: Shape, held: Sharding, wanted: Sharding, own: bool) -> tuple[list[Step], set[int]]:
    """Return the steps that change an array's sharding, and the target parts that arrive in one piece."""
    steps: list[Step] = []
    whole = set()
    for source, target, theirs, ours in overlaps(shape, held, wanted):
        all_of_source = _covers(theirs, held.part_shape(shape, source))
        all_of_target = _covers(ours, wanted.part_shape(shape, target))
        size = tuple(each.stop - each.start for each in ours)
        steps.append((source, target, size, None if all_of_source else theirs, None if all_of_target else ours))
        if all_of_target and not (own and held.places[source] == wanted.places[target]):
            whole.add(target)
    return steps, whole


def _covers(within: tuple[slice, ...], shape: Shape) -> bool:
    return all(each.stop - each.start == length for each, length in zip(within, shape, strict=True))


def elements_moved(shape: Shape, held: Sharding, wanted: Sharding) -> int:
    """Count the elements that move if the sharding of an array changes from `held` to `wanted`."""
    if held is wanted or held == wanted:
        return 0
    moved = 0
    for source, target, _, within in overlaps(shape, held, wanted):
        if held.places[source] != wanted.places[target]:
            size = 1
            for each in within:
                size *= each.stop - each.start
            moved += size
    return moved


def to_single(x: Array, place: int, operation: str) -> Array:
    """Move all of `x` to one device of its namespace. place: the number of the device, from 0."""
    return reshard(x, sharding((place,)), operation)


def replicate(x: Array, places: tuple[int, ...] | None = None, operation: str = "replicate") -> Array:
    """Copy all of `x` to each of the given devices, by default to all devices of the namespace."""
    return reshard(x, sharding(places or x.space.places), operation)


def stacked(x: Array, places: Sequence[int], parts: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Array:
    """Make an array from one partial result per device, stacked along a new first dim."""
    partials = tuple(part.unsqueeze(0) for part in parts)
    return Array(partials, sharding(tuple(places), 0, (1,) * len(places)), (len(places), *shape), dtype, x.space)


def plainly(space: Space) -> bool:
    """Return True if transfers in this space are plain copies in the memory of this process."""
    return not (OPEN or OPEN_DEVICES or EXPLAINED or space.over_ranks or not space.on_host)


def combined(
    partials: Array,
    reduce: Callable[[Tensor], Tensor],
    wanted: Sharding,
    dtype: torch.dtype,
    operation: str,
    shape: Shape | None = None,
) -> Array:
    """Combine the partial results of all devices into an array with the sharding `wanted`."""
    there = reshard(partials, wanted.shifted(1), operation)
    left = partials.shape[1:] if shape is None else shape
    return Array(tuple(map(reduce, there.parts)), wanted, left, dtype, partials.space)


def agreed(space: Space, values: Sequence[int], operation: str = "agree") -> list[int]:
    """Gather integers from all devices, in the order of the devices."""
    if not space.over_ranks:
        return list(values)
    log_verb(operation)
    own = torch.tensor(list(values), dtype=torch.int64, device=space.devices[space.here[0]])
    return [
        int(value) for value in collectives.all_gather(own, collectives.everyone(), of=operation).flatten().tolist()
    ]
