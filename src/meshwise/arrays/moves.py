"""Move an array's bytes between places; nothing else does.

It exchanges pieces, lays an array out anew, or combines parts.

Rules ask for a sharding and get it; what has to move is found by interval arithmetic, and each piece is a row of the
open `mw.comm_log`. Over ranks every rank makes the same list of pieces, so that who sends knows who receives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.sharding import Shape, Sharding, Slices, overlaps, sharding
from meshwise.arrays.space import Space
from meshwise.transfer import collectives
from meshwise.transfer.comm_log import OPEN, note
from meshwise.transfer.copy import CopyOptions, move
from meshwise.transfer.devices import OPEN_DEVICES, name_of
from meshwise.transfer.path import choose
from meshwise.workers.verb_log import came_to

EXPLAINED: list[object] = []
"""Not empty while `mw.explain` runs: moves are then reported instead of made."""


class Move(NamedTuple):
    """A tensor to send from one place to another. tensor: its values; None if the source is not local. into: memory at
    the target to write to, if there is some; a piece that stays at its place is copied only into this."""

    source: int
    target: int
    key: Hashable
    shape: Shape
    dtype: torch.dtype
    tensor: Tensor | None = None
    into: Tensor | None = None


def exchange(space: Space, pieces: Iterable[Move], operation: str) -> dict[Hashable, Tensor]:
    """Move pieces, and return those with local targets by their keys. A piece that stays where it is, is neither copied
    nor counted. Over ranks all ranks call it, with the same pieces in the same order."""
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
    """Send and receive in one batch over ranks. A rank's place is its rank."""
    came_to(operation)
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
    """Lay out `x` as wanted. Parts that already lie there are not copied: the result may share memory with `x`.

    own: the result is for a user, and needs memory of its own.
    """
    held, space, shape = x.sharding, x.space, x.shape
    if held is wanted or held == wanted:
        return Array(tuple(map(torch.clone, x.parts)), wanted, shape, x.dtype, space) if own else x
    steps, whole = _plan(shape, held, wanted, own)
    parts: Sequence[Tensor | None] = x.parts
    if space.over_ranks:
        here = {part: tensor for (part, _), tensor in zip(space.local(held), x.parts, strict=True)}
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
"""(part with a piece, part that wants it, the piece's shape, its slices in the first, in the second); None: all."""


@functools.lru_cache(maxsize=4096)
def _plan(shape: Shape, held: Sharding, wanted: Sharding, own: bool) -> tuple[list[Step], set[int]]:
    """Return the result of `overlaps`, and the parts that are whole copies of another: they need no memory first."""
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
    """Count the elements that change their place when an array laid out as `held` becomes `wanted`."""
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


def to_single(x: Array, place: int, operation: str = "to one place") -> Array:
    """Move all of `x` to one place."""
    return reshard(x, sharding((place,)), operation)


def replicate(x: Array, places: tuple[int, ...] | None = None, operation: str = "replicate") -> Array:
    """Copy all of `x` to each of the places; by default to all."""
    return reshard(x, sharding(places or x.space.places), operation)


def stacked(x: Array, places: Sequence[int], parts: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Array:
    """Make an array from one partial result per place, counted by its first dim; `combined` reduces it.

    parts: those of the local places. x: an array of the same space.
    """
    partials = tuple(part.unsqueeze(0) for part in parts)
    return Array(partials, sharding(tuple(places), 0, (1,) * len(places)), (len(places), *shape), dtype, x.space)


def plainly(space: Space) -> bool:
    """Return whether all places are host memory of this process, and nobody records moves between them."""
    return not (OPEN or OPEN_DEVICES or EXPLAINED or space.over_ranks or not space.on_host)


def combined(
    partials: Array,
    reduce: Callable[[Tensor], Tensor],
    wanted: Sharding,
    dtype: torch.dtype,
    operation: str,
    shape: Shape | None = None,
) -> Array:
    """Reduce the first dim of `partials` on the places of `wanted`: each reduces all partial results for its part.

    reduce: (places, ...) -> (...), in the order of the places, so that the bits are always the same. shape: of the
    result, if it differs from the remaining dims of the partials.
    """
    above = sharding(wanted.places, None if wanted.dim is None else wanted.dim + 1, wanted.sizes)
    there = reshard(partials, above, operation)
    left = partials.shape[1:] if shape is None else shape
    return Array(tuple(map(reduce, there.parts)), wanted, left, dtype, partials.space)


def agreed(space: Space, values: Sequence[int], operation: str = "agree") -> list[int]:
    """Share whole numbers of each place with all places, as shapes depend on them. values: those of the local places,
    equally many for each. Waits for them."""
    if not space.over_ranks:
        return list(values)
    came_to(operation)
    own = torch.tensor(list(values), dtype=torch.int64, device=space.devices[space.here[0]])
    return [
        int(value) for value in collectives.all_gather(own, collectives.everyone(), of=operation).flatten().tolist()
    ]
