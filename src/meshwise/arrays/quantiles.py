"""Compute quantile, percentile, median and the k largest.

Along a dim that is not split, each device sorts what it holds. For a quantile of all elements of a split array, only
the wanted elements are read: each part is sorted where it lies, and `selection.py` finds the elements at a position in
the sorted order of all parts. For quantiles along a split dim of an array with other dims, the array is first split
along another dim, which moves as much as a transpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.arrays.array import Array, numbered
from meshwise.arrays.dtypes import FLOATS
from meshwise.arrays.lanes import freed
from meshwise.arrays.reductions import as_array, as_axes, left, reduced_shape
from meshwise.arrays.rules import by_name
from meshwise.arrays.selection import cuts, order, picked, sort_values
from meshwise.arrays.sharding import Shape, Sharding, resized, sharding
from meshwise.arrays.views import axis_of

METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


class TopK(NamedTuple):
    """The result of `topk`: the values in sorted order, and their positions along the axis."""

    values: Array
    indices: Array


def quantile(x: Array, q: Any, /, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """Return the quantiles of the elements over `axis`, by default over all elements."""
    return _quantile(x, q, axis, method, keepdims, "quantile")


def percentile(x: Array, q: Any, /, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """Return `quantile` for `q` given in percent, from 0 to 100."""
    return _quantile(x, q, axis, method, keepdims, "percentile", 100)


def median(x: Array, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Return the median over `axis`, by default of all elements."""
    return _quantile(x, 0.5, axis, "midpoint", keepdims, "median")


def _quantile(x: Array, q: Any, axis: Any, method: str, keepdims: bool, name: str, most: int = 1) -> Array:
    x = as_array(name, x)
    shares = torch.as_tensor(q, dtype=torch.float64) / most
    axes = as_axes(name, axis, x.ndim)
    length = math.prod(x.shape[dim] for dim in axes)
    if method not in METHODS or shares.dim() > 1 or bool(((shares < 0) | (shares > 1)).any()):
        raise ValueError(
            f"{name}(q={q!r}, method={method!r}): q must be a number or a list of numbers from 0 to {most}, and method "
            f"one of {', '.join(METHODS)}."
        )
    if x.dtype.is_complex or not length:
        raise TypeError(
            f"{name} needs at least one real number, not {x.dtype} of shape {x.shape}. Use xp.real(x) if x is complex."
        )
    at = shares.reshape(-1) * (length - 1)
    dtype = x.dtype if x.dtype in FLOATS else x.space.default_float
    shape = reduced_shape(x.shape, axes, keepdims)
    if x.sharding.dim in axes and x.size == length:
        values = _between(_of_all(x, at), at, method, 0).to(dtype).reshape(shares.shape + shape)
        lies = sharding(x.sharding.places[:1])
        made = tuple(values.to(x.space.devices[place]) for _, place in x.space.local(lies))
        return Array(made, lies, tuple(values.shape), dtype, x.space)
    x = freed(x, axes, name)
    lies = left(x.sharding, axes, keepdims).shifted(shares.dim())
    parts = []
    for part in x.parts:
        rest = [dim for dim in range(x.ndim) if dim not in axes]
        line = part.permute(*rest, *axes).reshape([part.shape[dim] for dim in rest] + [length])
        values = order(line, -1)[0]
        found = values[..., _ranks(at, length).to(values.device)].movedim(-1, 0)
        found = _between(found, at.to(values.device), method, len(rest)).to(dtype)
        own = reduced_shape(tuple(part.shape), axes, keepdims)
        parts.append(found.reshape(tuple(shares.shape) + own))
    return Array(tuple(parts), lies, tuple(shares.shape) + shape, dtype, x.space)


def _ranks(at: Tensor, length: int) -> Tensor:
    """Return which sorted elements to read for an interpolation at the positions `at`, such as 2.5."""
    return torch.cat([at.floor(), at.ceil(), at.new_tensor([length - 1])]).to(torch.int64)


def _between(found: Tensor, at: Tensor, method: str, rest: int) -> Tensor:
    """Interpolate between sorted elements at the positions `at`."""
    found = found if found.is_floating_point() else found.to(torch.float64)
    count = len(at)
    low, high, last = found[:count], found[count : 2 * count], found[2 * count :]
    share = (at - at.floor()).reshape(-1, *(1,) * rest).to(found.dtype)
    if method == "lower":
        share = torch.zeros_like(share)
    elif method == "higher":
        share = torch.ones_like(share)
    elif method == "midpoint":
        share = torch.where(share > 0, 0.5, share)
    elif method == "nearest":
        share = at.round().sub(at.floor()).reshape(share.shape).to(found.dtype)
    made = torch.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))
    made = torch.where((low == high) | (share == 0), low, torch.where(share == 1, high, made))
    return torch.where(last.isnan(), last, made)


def _of_all(x: Array, at: Tensor) -> Tensor:
    """Return the elements that `_between` needs to interpolate at the positions `at`, for a split array."""
    space, held, length = x.space, x.sharding, x.size
    sizes = tuple(math.prod(held.part_shape(x.shape, k)) for k in range(len(held.places)))
    parts = tuple(sort_values(part.reshape(-1)) for part in x.parts)
    line = Array(parts, sharding(held.places, 0, sizes), (length,), x.dtype, space)
    asked = _ranks(at, length).tolist()
    ranks = sorted({rank for each in asked for rank in (each, each + 1)})
    before = dict(zip(ranks, cuts(line, ranks), strict=True))
    owner = [next(k for k in range(len(sizes)) if before[r + 1][k] > before[r][k]) for r in asked]
    wanted = [[before[r][k] for r, own in zip(asked, owner, strict=True) if own == k] for k in range(len(sizes))]
    read = [iter(values) for values in picked(line, wanted)]
    return torch.stack([next(read[own]) for own in owner])


def topk(x: Array, k: int, /, *, axis: int = -1, largest: bool = True) -> TopK:
    """Return the `k` largest elements along `axis`, sorted, and their positions."""
    x = as_array("topk", x)
    axis = axis_of(axis, x.ndim, "topk")
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"topk: k must be from 0 to {x.shape[axis]}, the length of the axis, but it is {k}.")
    held, shape = x.sharding, resized(x.shape, axis, k)

    def both(values: Sequence[Tensor], places: Sequence[Tensor], lies: Sharding, shape: Shape) -> TopK:
        kinds = ((values, x.dtype), (places, torch.int64))
        return TopK(*(Array(tuple(parts), lies, shape, kind, x.space) for parts, kind in kinds))

    own = [order(part, axis, largest) for part in x.parts]
    values = [part.narrow(axis, 0, min(k, part.shape[axis])) for part, _ in own]
    where = [at.narrow(axis, 0, min(k, at.shape[axis])) for _, at in own]
    if held.dim != axis:
        return both(values, where, held, shape)
    sizes = tuple(min(k, size) for size in held.sizes)
    lies, candidates = sharding(held.places, axis, sizes), resized(shape, axis, sum(sizes))
    places = [at + held.offsets[part] for at, (part, _) in zip(where, numbered(x), strict=True)]
    found, at = (freed(each, {axis}, "topk") for each in both(values, places, lies, candidates))
    best = [order(part, axis, largest)[1].narrow(axis, 0, k) for part in found.parts]
    values, places = (
        [torch.take_along_dim(part, b, axis) for part, b in zip(each.parts, best, strict=True)] for each in (found, at)
    )
    return both(values, places, found.sharding, shape)


FUNCTIONS = by_name(quantile, percentile, median, topk)
