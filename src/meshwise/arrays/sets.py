"""unique_*: a sort by exact cuts, then each place counts what begins anew in its part.

Bytes: those of the sort; of one element from each part to the next; and for the inverse, of one number an element back
to where it came from. For values and counts alone each place first drops what it has twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.indexing import counted
from meshwise.arrays.moves import Piece, exchange, reshard
from meshwise.arrays.reductions import as_array
from meshwise.arrays.selection import sort_values
from meshwise.arrays.sharding import evenly, sharding
from meshwise.arrays.sorting import SortedParts, indices, sort_parts, swapped


class UniqueAll(NamedTuple):
    """What `unique_all` gives."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """What `unique_counts` gives."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """What `unique_inverse` gives."""

    values: Array
    inverse_indices: Array


def unique_all(x: Array, /) -> UniqueAll:
    """The different elements of `x`, sorted; where each is first; which of them each element is; how many of each.

    Each nan is an element of its own. Waits for the values: the shapes depend on them.
    """
    found = _found(x, "unique_all", where=True)
    first = _picked(found, indices(found.flat, found.sorted, found.name), torch.int64)
    return UniqueAll(_values(found), first, _inverse(x, found), _counts(found))


def unique_inverse(x: Array, /) -> UniqueInverse:
    """The different elements of `x`, sorted, and which of them each element of `x` is. Waits for the values."""
    found = _found(x, "unique_inverse", where=True)
    return UniqueInverse(_values(found), _inverse(x, found))


def unique_counts(x: Array, /) -> UniqueCounts:
    """The different elements of `x`, sorted, and how many there are of each. Waits for the values."""
    found = _found(x, "unique_counts")
    return UniqueCounts(_values(found), _counts(found))


def unique_values(x: Array, /) -> Array:
    """The different elements of `x`, sorted. Waits for the values."""
    return _values(_found(x, "unique_values", alone=True))


@dataclass(frozen=True)
class _Found:
    """A flat array sorted. begins: of each part that is here, which elements differ from the one before them.
    counts: of every part, how many do. first: of every part, where the first such is, if any."""

    flat: Array
    sorted: SortedParts
    begins: list[Tensor]
    counts: list[int]
    first: list[int]
    name: str

    def spread(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Array:
        """A vector of one entry for each different element, from its parts."""
        lies = sharding(self.flat.sharding.places, 0, tuple(self.counts))
        return Array(tuple(parts), lies, (sum(self.counts),), dtype, self.flat.space)


def _found(x: Array, name: str, *, where: bool = False, alone: bool = False) -> _Found:
    """alone: only the values are asked for, so that what one place has twice need not move."""
    x = as_array(name, x)
    flat = flattened(x, name)
    if alone:
        kept = [_unique(part) for part in flat.parts]
        sizes = tuple(counted(flat, flat.sharding, [len(part) for part in kept]))
        flat = Array(tuple(kept), sharding(flat.sharding.places, 0, sizes), (sum(sizes),), x.dtype, x.space)
    done = sort_parts(flat, name, where=where)
    before = _lasts(flat, done.values, name)
    begins = []
    for values, last in zip(done.values, before, strict=True):
        new = _begins(values)
        if last is not None and len(values):
            new[:1] = values[:1] != last
        begins.append(new)
    counts = counted(flat, flat.sharding, [int(new.sum()) for new in begins])
    first = counted(flat, flat.sharding, [int(new.to(torch.uint8).argmax()) if len(new) else 0 for new in begins])
    return _Found(flat, done, begins, counts, first, name)


def _begins(values: Tensor) -> Tensor:
    """Which of sorted elements differ from the one before them; the first does."""
    new = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    new[1:] = values[1:] != values[:-1]
    return new


def _unique(part: Tensor) -> Tensor:
    values = sort_values(part)
    return values[_begins(values)]


def flattened(x: Array, name: str) -> Array:
    """`x` in one dim, split; in the order of its elements."""
    held = x.sharding
    if held.dim is None:
        held = sharding(held.places[:1])
        return Array(
            tuple(part.reshape(-1) for part in reshard(x, held, name).parts),
            sharding(held.places, 0, (prod(x.shape),)),
            (prod(x.shape),),
            x.dtype,
            x.space,
        )
    if any(length != 1 for length in x.shape[: held.dim]):
        x = reshard(x, evenly(x.shape[0], held.places), name)
    held = x.sharding
    inner = prod(x.shape[(held.dim or 0) + 1 :])
    sizes = tuple(size * inner for size in held.sizes)
    parts = tuple(part.reshape(-1) for part in x.parts)
    return Array(parts, sharding(held.places, 0, sizes), (prod(x.shape),), x.dtype, x.space)


def _lasts(flat: Array, values: Sequence[Tensor], name: str) -> list[Tensor | None]:
    """For each part that is here, the last element before it, if any."""
    places, sizes = flat.sharding.places, flat.sharding.sizes
    filled = [k for k, size in enumerate(sizes) if size]
    own = {k: part[-1:] for (k, _), part in zip(flat.space.local(flat.sharding), values, strict=True)}
    pieces = [Piece(places[a], places[b], b, (1,), flat.dtype, own.get(a)) for a, b in pairwise(filled)]
    came = exchange(flat.space, pieces, name)
    return [came.get(k) for k, _ in flat.space.local(flat.sharding)]


def _picked(found: _Found, parts: Sequence[Tensor], dtype: torch.dtype) -> Array:
    return found.spread([part[new] for part, new in zip(parts, found.begins, strict=True)], dtype)


def _values(found: _Found) -> Array:
    return _picked(found, found.sorted.values, found.flat.dtype)


def _counts(found: _Found) -> Array:
    """From where one begins to where the next does, which may be in a later part."""
    held = found.flat.sharding
    parts = []
    for (k, _), new in zip(found.flat.space.local(held), found.begins, strict=True):
        later = [held.offsets[j] + found.first[j] for j in range(k + 1, len(held.places)) if found.counts[j]]
        end = (later[0] if later else sum(held.sizes)) - held.offsets[k]
        at = new.nonzero().flatten()
        parts.append(torch.diff(at, append=at.new_full((1,), end)) if len(at) else at)
    return found.spread(parts, torch.int64)


def _inverse(x: Array, found: _Found) -> Array:
    """The number of each element among the different ones, back where the element came from."""
    flat, done = found.flat, found.sorted
    held, space = flat.sharding, flat.space
    numbers = []
    for (k, _), new, merge in zip(space.local(held), found.begins, done.merge, strict=True):
        own = torch.cumsum(new, 0) + (sum(found.counts[:k]) - 1)
        numbers.append(torch.empty_like(own).index_put_((merge,), own))
    back = [[row[j] for row in done.sent] for j in range(len(held.places))]
    parts = []
    for came, local in zip(swapped(flat, back, numbers, torch.int64, found.name), done.local, strict=True):
        own = torch.cat(came)
        parts.append(torch.empty_like(own).index_put_((local,), own))
    return _shaped(Array(tuple(parts), held, flat.shape, torch.int64, space), x)


def _shaped(flat: Array, x: Array) -> Array:
    """What `flattened` made one dim of, in the shape of `x` again, and lying so where that moves nothing."""
    held, space = x.sharding, x.space
    if held.dim is None:
        parts = tuple(part.reshape(x.shape) for part in flat.parts)
        return Array(parts, sharding(flat.sharding.places), x.shape, flat.dtype, space)
    if any(length != 1 for length in x.shape[: held.dim]):
        held = evenly(x.shape[0], held.places)
    shapes = (held.part_shape(x.shape, k) for k, _ in space.local(held))
    return Array(tuple(map(torch.reshape, flat.parts, shapes)), held, x.shape, flat.dtype, space)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "unique_all": unique_all,
    "unique_inverse": unique_inverse,
    "unique_counts": unique_counts,
    "unique_values": unique_values,
}
