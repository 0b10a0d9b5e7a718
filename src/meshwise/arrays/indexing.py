"""Read `x[key]`: slices, indices, masks and index arrays.

Slices and indices are resolved by interval arithmetic. Masks are applied on the devices that hold the elements. Index
arrays fetch the entries that they select.

The data that moves is the lower bound:

- For slices of any step, indices and None: nothing. A part may become empty. A negative step reverses the order of the
  devices.
- For a mask: nothing if the mask is sharded like the array and the array is sharded along the mask's first dim.
  Otherwise, the mask is sent to all devices, or the array is resharded along that dim.
- For index arrays: nothing if the array is not sharded along the indexed dims. Otherwise, see fetching.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import strides_of, viewed
from meshwise.arrays.array import Array, mapped, numbered
from meshwise.arrays.fetching import OPERATION, ask, common_shape, everywhere, fetch, others
from meshwise.arrays.keys import ADVANCED, Cut, Key, read_key
from meshwise.arrays.layout import arranged, flipped
from meshwise.arrays.moves import agreed, reshard
from meshwise.arrays.sharding import Shape, Sharding, sharding
from meshwise.arrays.strides import of_cut
from meshwise.arrays.views import as_bits, by_bits, first_divided, made, undivided


def get_item(x: Array, given: Any, /) -> Array:
    """Return `x[given]`, as a view unless the key has arrays. A single element is a number, not a view."""
    key = read_key(given, x.shape)
    if key.arrays:
        chosen: Array = _chosen(x, key)
        return chosen
    if key.out or given is Ellipsis or (type(given) is tuple and any(each is Ellipsis for each in given)):
        return _shown(cut(x, key.cuts), key, 0)
    where = region(x, key.cuts)
    return made([view.clone() for view in where.views], where.placed, x, ())


@by_bits
def _chosen(x: Array, key: Key) -> Array:
    """Return a copy of the entries that a key with index arrays or a mask selects."""
    found = cut(x, key.cuts)
    dims_before = [sum(isinstance(each, range) for each in key.cuts[:dim]) for dim, _ in key.arrays]
    first = key.arrays[0][1]
    if len(key.arrays) == 1 and first.dtype is torch.bool and (isinstance(first, Array) or not first.shape):
        picked, depth = masked(found, dims_before[0], first), 1
    else:
        dims, indices = as_indices(dims_before, [array for _, array in key.arrays])
        picked = pick(found, dims, indices)
        depth = picked.ndim - (found.ndim - len(dims))
    return _shown(picked, key, depth)


def _shown(found: Array, key: Key, depth: int) -> Array:
    """Put the dims of `found` into the order that the key requires, and add the new dims of the key."""
    order: list[int | None] = []
    dim = depth
    for each in key.out:
        if each is None:
            order.append(None)
        elif each == ADVANCED:
            order.extend(range(depth))
        else:
            order.append(dim)
            dim += 1
    return found if order == list(range(found.ndim)) else arranged(found, order)


@dataclass(frozen=True)
class Region:
    """A region of an array, selected by one slice or index per dim. The entries of the region are in ascending
    order."""

    views: list[Tensor]
    placed: Sharding
    shape: Shape
    flipped: tuple[int, ...]


def region(x: Array, cuts: Sequence[Cut]) -> Region:
    """Return the region of `x` that one index or range per dim selects. Writing to its views writes to `x`."""
    keys, placed, shape, flipped = _plan(x.sharding, tuple(cuts))
    views = [part[keys[number]] for number, part in numbered(x) if number in keys]
    return Region(views, placed, shape, flipped)


@functools.lru_cache(maxsize=4096)
def _plan(
    placed: Sharding, cuts: tuple[Cut, ...]
) -> tuple[dict[int, tuple[int | slice, ...]], Sharding, Shape, tuple[int, ...]]:
    """Plan how to select the region that `cuts` describes by one index or range per dim."""
    kept = [each for each in cuts if isinstance(each, range)]
    shape = tuple(len(each) for each in kept)
    flipped = tuple(dim for dim, each in enumerate(kept) if each.step < 0 and len(each) > 1)
    ascending = [_ascending(each) for each in cuts]
    whole = tuple(each if isinstance(each, int) else slice(each.start, each.stop, each.step) for each in ascending)
    dim = placed.dim
    if dim is None:
        return dict.fromkeys(range(len(placed.places)), whole), placed, shape, flipped
    before, wanted, after = whole[:dim], ascending[dim], whole[dim + 1 :]
    if isinstance(wanted, int):
        holder = max(k for k, begin in enumerate(placed.offsets) if begin <= wanted and placed.sizes[k])
        key = (*before, wanted - placed.offsets[holder], *after)
        return {holder: key}, sharding((placed.places[holder],)), shape, flipped
    local = [_within(wanted, begin, size) for begin, size in zip(placed.offsets, placed.sizes, strict=True)]
    keys = {k: (*before, slice(own.start, own.stop, own.step), *after) for k, own in enumerate(local)}
    below = sum(isinstance(each, range) for each in cuts[:dim])
    return keys, sharding(placed.places, below, tuple(map(len, local))), shape, flipped


def _ascending(each: Cut) -> Cut:
    """Sort a range in ascending order, so that ranges with the same entries become equal."""
    if isinstance(each, int):
        return each
    if len(each) < 2:
        return range(each.start, each.start + len(each))
    return each[::-1] if each.step < 0 else each


def _within(entries: range, begin: int, size: int) -> range:
    """Return the entries that lie in a part of `size` entries from `begin` on, as indices in the part."""
    first = max(0, -(-(begin - entries.start) // entries.step))
    last = min(len(entries), max(first, -(-(begin + size - entries.start) // entries.step)))
    if first >= last:
        return range(0)
    return range(entries[first] - begin, entries[last - 1] - begin + 1, entries.step)


def cut(x: Array, cuts: Sequence[Cut]) -> Array:
    """Return a view of `x` that has one index or one range of each dim. No data moves."""
    alias = x.alias
    if alias is not None and alias.flips and alias.source is not None:
        x, cuts = alias.source, mirrored(cuts, alias.flips, x.shape)

    def rule(x: Array) -> Array:
        found = region(x, cuts)
        return made(found.views, found.placed, x, found.shape)

    ascending = tuple(map(_ascending, cuts))
    whole = viewed(x, rule, of_cut(x.shape, strides_of(x), ascending))
    kept = [each for each in cuts if isinstance(each, range)]
    flips = [dim for dim, each in enumerate(kept) if each.step < 0 and len(each) > 1]
    return flipped(whole, flips) if flips else whole


def cut_along(x: Array, dim: int, entries: Cut) -> Array:
    """Return a view of `x` that has one index or one range of one dim, and all entries of the other dims."""
    whole = [range(length) for length in x.shape]
    return cut(x, [*whole[:dim], entries, *whole[dim + 1 :]])


def mirrored(cuts: Sequence[Cut], dims: Collection[int], shape: Shape) -> list[Cut]:
    """Convert cuts of an array to cuts that select the same entries if the dims `dims` of the array are reversed."""
    found: list[Cut] = []
    for dim, (each, last) in enumerate(zip(cuts, (n - 1 for n in shape), strict=True)):
        turned = last - each if isinstance(each, int) else range(last - each.start, last - each.stop, -each.step)
        found.append(turned if dim in dims else each)
    return found


def as_indices(dims: Sequence[int], arrays: Sequence[Array | Tensor]) -> tuple[tuple[int, ...], list[Array | Tensor]]:
    """Return (the indexed dims, an index array for each). A mask becomes the indices of its true elements."""
    covered: list[int] = []
    indices: list[Array | Tensor] = []
    for dim, array in zip(dims, arrays, strict=True):
        if array.dtype is not torch.bool:
            covered.append(dim)
            indices.append(array)
            continue
        covered.extend(range(dim, dim + array.ndim))
        if isinstance(array, Array):
            indices.extend(nonzero(array))
        else:
            indices.extend(array.nonzero(as_tuple=True))
    return tuple(covered), indices


def pick(x: Array, dims: tuple[int, ...], indices: Sequence[Array | Tensor]) -> Array:
    """Select entries of `x` by index arrays, one for each of the dims `dims`."""
    x = undivided(x)
    if x.sharding.dim in dims:
        return fetch(x, ask(x, dims, indices))
    rest, tail = others(x, dims)
    there = everywhere(x, indices)
    shape = common_shape(there)
    parts = []
    for number, part in enumerate(x.parts):
        where = tuple(each.parts[number].to(torch.int64) for each in there)
        entries = part.permute(*dims, *rest)[where]
        parts.append(entries if shape else entries.clone())  # torch returns a view if the indices have no dims
    placed = x.sharding
    if placed.dim is not None:
        placed = placed.along(len(shape) + rest.index(placed.dim))
    return made(parts, placed, x, (*shape, *tail))


def masked(x: Array, dim: int, mask: Array | Tensor) -> Array:
    """Select the entries of `x` at which a mask is true."""
    depth = mask.ndim
    if not depth:
        one = arranged(x, [None, *range(x.ndim)])
        return mapped(one, torch.clone) if bool(mask) else cut(one, [range(0), *map(range, x.shape)])
    assert isinstance(mask, Array)  # a mask with dims is never a host tensor
    if x.sharding.dim in range(dim, dim + depth) and math.prod(x.shape[dim : x.sharding.dim]) != 1:
        x = reshard(x, first_divided(x.shape, x.sharding.places, dim), OPERATION)
    placed = x.sharding
    inside, shown, order = under_mask(x, dim, mask)
    parts = [part.permute(order)[here] for part, here in zip(x.parts, shown, strict=True)]
    rest = [x.shape[each] for each in order[depth:]]
    if inside:
        sizes = counted(x, placed, [len(part) for part in parts])
        return made(parts, sharding(placed.places, 0, tuple(sizes)), x, [sum(sizes), *rest])
    if placed.dim is not None:
        placed = placed.along(order.index(placed.dim) - depth + 1)
    return made(parts, placed, x, [max(counted(x, placed, [len(part) for part in parts])), *rest])


def under_mask(x: Array, dim: int, mask: Array) -> tuple[bool, tuple[Tensor, ...], list[int]]:
    """Lay out a mask that covers dims of `x` from `dim` on. Return whether they include the sharded dim, the parts of
    the mask, and an order of the dims of `x` in which the covered dims are first."""
    depth, placed = mask.ndim, x.sharding
    inside = placed.dim in range(dim, dim + depth)
    lies = placed.shifted(-dim) if inside else sharding(placed.places)
    order = [*range(dim, dim + depth), *range(dim), *range(dim + depth, x.ndim)]
    return inside, reshard(mask, lies, OPERATION).parts, order


def counted(x: Array, placed: Sharding, here: Sequence[int]) -> list[int]:
    """Exchange one integer per part, such as a number of entries, and return the integers of all parts."""
    at = {place: count for (_, place), count in zip(x.space.local(placed), here, strict=True)}
    every = agreed(x.space, [at.get(place, 0) for place in x.space.here], OPERATION)
    return [every[place] for place in placed.places]


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """Return the indices of elements that are not zero, as one array per dim, in row-major order."""
    if not x.shape:
        raise ValueError("nonzero needs at least one dim, but this array has none. Write xp.reshape(x, (1,)) first.")
    mask = mapped(as_bits(x), lambda part: part != 0, torch.bool)
    if mask.sharding.dim is not None and math.prod(x.shape[: mask.sharding.dim]) != 1:
        mask = reshard(mask, first_divided(mask.shape, mask.sharding.places), "nonzero")
    placed = mask.sharding
    found = [part.nonzero(as_tuple=True) for part in mask.parts]
    lengths = counted(mask, placed, [len(each[0]) for each in found])
    total = max(lengths) if placed.dim is None else sum(lengths)
    out = placed if placed.dim is None else sharding(placed.places, 0, tuple(lengths))
    columns = []
    for dim in range(x.ndim):
        parts = [each[dim] for each in found]
        if dim == placed.dim:
            parts = [part + placed.offsets[k] for part, (k, _) in zip(parts, x.space.local(placed), strict=True)]
        columns.append(Array(tuple(parts), out, (total,), torch.int64, x.space))
    return tuple(columns)
