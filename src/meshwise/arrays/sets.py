"""Find distinct elements of arrays, and compute unions and intersections.

The array is sorted, and each device counts the distinct values that begin in its part.

These bytes are moved: those of the sort, one element from each part to the next, and for the inverse, one number per
element back to the device from which the element came. For `unique_values`, each device first drops its duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.indexing import counted
from meshwise.arrays.moves import Move, exchange, reshard
from meshwise.arrays.reductions import as_array, as_arrays
from meshwise.arrays.reshaping import reshape
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.selection import sort_values
from meshwise.arrays.sharding import sharding
from meshwise.arrays.sorting import SortedParts, indices, sort_parts, swapped


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Array
    inverse_indices: Array


def unique_all(x: Array, /) -> UniqueAll:
    """Return the distinct elements of `x` sorted, with their first positions, the inverse indices and the counts."""
    found = _found(x, "unique_all", where=True)
    first = _picked(found, indices(found.flat, found.sorted, found.name), torch.int64)
    return UniqueAll(_values(found), first, _inverse(x, found), _counts(found))


def unique_inverse(x: Array, /) -> UniqueInverse:
    """Return the distinct elements of `x` sorted, and for each element of `x` its index among the distinct elements."""
    found = _found(x, "unique_inverse", where=True)
    return UniqueInverse(_values(found), _inverse(x, found))


def unique_counts(x: Array, /) -> UniqueCounts:
    """Return the distinct elements of `x` sorted, and how often each of them occurs. Waits for the values."""
    found = _found(x, "unique_counts")
    return UniqueCounts(_values(found), _counts(found))


def unique_values(x: Array, /) -> Array:
    """Return the distinct elements of `x`, sorted. Waits for the values."""
    return _values(_found(x, "unique_values", alone=True))


@dataclass(frozen=True)
class _Found:
    """A flattened array after sorting, with the positions of its distinct elements."""

    flat: Array
    sorted: SortedParts
    begins: list[Tensor]
    counts: list[int]
    first: list[int]
    name: str

    def spread(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Array:
        """Make a vector with one value for each distinct element, such as its count."""
        lies = sharding(self.flat.sharding.places, 0, tuple(self.counts))
        return Array(tuple(parts), lies, (sum(self.counts),), dtype, self.flat.space)


def _found(x: Array, name: str, *, where: bool = False, alone: bool = False) -> _Found:
    """Sort an array and find its distinct elements."""
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
    """Mark the elements of a sorted vector that differ from the previous one, and the first element."""
    new = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    new[1:] = values[1:] != values[:-1]
    return new


def _unique(part: Tensor) -> Tensor:
    values = sort_values(part)
    return values[_begins(values)]


def flattened(x: Array, name: str) -> Array:
    """Flatten `x` in row-major order, and split the resulting vector over the devices of `x`."""
    if x.sharding.dim is None:
        x = reshard(x, sharding(x.sharding.places[:1]), name)
    found = reshape(x, (-1,))
    if found.sharding.dim is None:
        found.sharding = sharding(found.sharding.places, 0, found.shape)
    return found


def _lasts(flat: Array, values: Sequence[Tensor], name: str) -> list[Tensor | None]:
    """Return, for each local part, the last element before this part, or None if there is none."""
    places, sizes = flat.sharding.places, flat.sharding.sizes
    filled = [k for k, size in enumerate(sizes) if size]
    own = {k: part[-1:] for (k, _), part in zip(flat.space.local(flat.sharding), values, strict=True)}
    pieces = [Move(places[a], places[b], b, (1,), flat.dtype, own.get(a)) for a, b in pairwise(filled)]
    came = exchange(flat.space, pieces, name)
    return [came.get(k) for k, _ in flat.space.local(flat.sharding)]


def _picked(found: _Found, parts: Sequence[Tensor], dtype: torch.dtype) -> Array:
    return found.spread([part[new] for part, new in zip(parts, found.begins, strict=True)], dtype)


def _values(found: _Found) -> Array:
    return _picked(found, found.sorted.values, found.flat.dtype)


def _counts(found: _Found) -> Array:
    """Return how often each distinct value occurs."""
    held = found.flat.sharding
    parts = []
    for (k, _), new in zip(found.flat.space.local(held), found.begins, strict=True):
        later = [held.offsets[j] + found.first[j] for j in range(k + 1, len(held.places)) if found.counts[j]]
        end = (later[0] if later else sum(held.sizes)) - held.offsets[k]
        at = new.nonzero().flatten()
        parts.append(torch.diff(at, append=at.new_full((1,), end)) if len(at) else at)
    return found.spread(parts, torch.int64)


def _inverse(x: Array, found: _Found) -> Array:
    """Return, for each element of `x`, its index among the distinct elements. The result has the shape of `x`."""
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
    return reshape(Array(tuple(parts), held, flat.shape, torch.int64, space), x.shape)


def _of_two(name: str, says: str, rule: Callable[[Any, Array, Array], Array]) -> Callable[..., Array]:
    """Make a set function of two arrays, such as their union."""

    def of_two(x1: Any, x2: Any, /) -> Array:
        x1, x2 = as_arrays(name, x1, x2)
        return rule(x1.__array_namespace__(), unique_values(x1), unique_values(x2))

    return named(of_two, name, f"Return the distinct elements of {says}, in ascending order.")


def _either(xp: Any, a: Array, b: Array) -> Array:
    """Return the elements that occur in exactly one of two arrays."""
    return unique_values(xp.concat([a[~xp.isin(a, b)], b[~xp.isin(b, a)]]))


OF_TWO = [
    _of_two("union1d", "both", lambda xp, a, b: unique_values(xp.concat([a, b]))),
    _of_two("intersect1d", "the first that are in the second", lambda xp, a, b: a[xp.isin(a, b)]),
    _of_two("setdiff1d", "the first that are not in the second", lambda xp, a, b: a[~xp.isin(a, b)]),
    _of_two("setxor1d", "one that are not in the other", _either),
]
FUNCTIONS = by_name(unique_all, unique_inverse, unique_counts, unique_values, *OF_TWO)
