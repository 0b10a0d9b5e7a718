"""Compute mean, variance, standard deviation, argmax and argmin.

Each device computes partial results for its part, which are combined once. For a variance, they are counts, means and
sums of squared distances, combined as by Chan, Golub and LeVeque. For argmax and argmin, they are values with their
global indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_left, in_order_of
from meshwise.arrays.array import Array, cast, like, mapped
from meshwise.arrays.casting import astype
from meshwise.arrays.dtypes import BOOL, COMPLEXES, FLOATS, UNSIGNED, comparable, real_of
from meshwise.arrays.moves import combined, reshard, stacked
from meshwise.arrays.reductions import as_array, as_axes, left, reduced_shape, refuse_none, together, total
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.sharding import Shape


def as_floats(name: str, x: Any) -> Array:
    """Return `x` with integers converted to the default float. Float and complex arrays are returned unchanged."""
    found = as_array(name, x)
    return found if found.dtype in FLOATS else cast(found, found.space.default_float)


def mean(x: Any, /, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
    """Return the mean over the given axes, by default of all elements. The mean of no elements is NaN.

    Integers are converted to the default float.
    """
    x = as_floats("mean", x if dtype is None else astype(x, dtype, copy=False))
    axes = as_axes("mean", axis, x.ndim)
    count = math.prod(x.shape[each] for each in axes)
    added = total(x, axis=axis, keepdims=keepdims)
    return in_order_of(mapped(added, lambda part: part / count), [added])


def var(x: Any, /, axis: Any = None, *, correction: float = 0.0, ddof: float = 0.0, keepdims: bool = False) -> Array:
    """Return the variance over the given axes, by default of all elements."""
    x = as_floats("var", x)
    axes, dim = as_axes("var", axis, x.ndim), x.sharding.dim
    kind, shape = real_of(x.dtype), reduced_shape(x.shape, axes, keepdims)
    count = math.prod(x.shape[each] for each in axes)
    over = max(count - (correction or ddof), 0)
    if dim not in axes or x.sharding.single:
        parts = tuple(_spread(part, axes, keepdims)[1] / over for part in x.parts)
        alone = Array(parts, left(x.sharding, axes, keepdims), shape, kind, x.space)
        return in_order_left(alone, x, axes, keepdims)
    assert dim is not None
    rows = {place: size for place, size in zip(x.sharding.places, x.sharding.sizes, strict=True) if size and count}
    if not rows:
        return mapped(mean(x, axis=axes, keepdims=keepdims), real_of_nan, kind)
    found = [torch.stack(_spread(part, axes, keepdims), -1) for part in x.parts if part.shape[dim]]
    counts = [size * (count // x.shape[dim]) for size in rows.values()]

    def combine(partials: Tensor) -> Tensor:
        """Combine the means and sums of squares of all parts into the variance."""
        means, squares = partials.unbind(-1)
        centre = torch.zeros_like(means[0])
        for number, own in zip(counts, means, strict=True):
            centre += own * (number / count)
        spread = squares.real.sum(0) if squares.is_complex() else squares.sum(0)
        for number, own in zip(counts, means, strict=True):
            spread += (own - centre).abs().square() * number
        found: Tensor = spread / over
        return found

    partials = stacked(x, tuple(rows), found, (*shape, 2), x.dtype)
    return in_order_left(combined(partials, combine, together(x, shape), kind, "var", shape), x, axes, keepdims)


def real_of_nan(part: Tensor) -> Tensor:
    """Return the real part of a complex tensor. A real tensor is returned unchanged."""
    return part.real.clone() if part.is_complex() else part


def _spread(part: Tensor, axes: tuple[int, ...], keepdims: bool) -> tuple[Tensor, Tensor]:
    """Return the mean of a part over axes, and the sum of squared distances from this mean, in the part's dtype."""
    if not axes:
        return part, (part - part).abs()  # the distances are 0, or NaN if the value is not finite
    centre = part.mean(axes, keepdim=True)
    apart = part - centre
    squares = (apart.abs().square() if apart.is_complex() else apart.mul_(apart)).sum(axes, keepdim=keepdims)
    return centre.reshape(squares.shape), squares


def std(x: Any, /, axis: Any = None, *, correction: float = 0.0, ddof: float = 0.0, keepdims: bool = False) -> Array:
    """Return the standard deviation over the given axes, by default of all elements. It is the square root of `var`."""
    spread = var(x, axis=axis, correction=correction or ddof, keepdims=keepdims)
    return in_order_of(mapped(spread, torch.sqrt), [spread])


def _argument(name: str, pick: Callable[..., Tensor], best: Callable[..., Tensor]) -> Callable[..., Array]:
    """Make the function argmax or argmin."""

    def argument(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
        x = as_array(name, x)
        axes = as_axes(name, axis, x.ndim)
        if len(axes) != 1 and axis is not None:
            raise TypeError(f"{name}: axis must be one integer, or None for all elements, but it is {axis}.")
        refuse_none(name, x, axes)
        if x.dtype in COMPLEXES:
            raise TypeError(f"{name} cannot compare complex numbers ({x.dtype}). Write abs(x) or xp.real(x).")
        if x.dtype in UNSIGNED:  # torch has no argmax for wide unsigned types
            keys = [comparable(part, x.dtype) for part in x.parts]
            x = like(x, keys, comparable(torch.zeros(0), x.dtype).dtype)
        shape, dim = reduced_shape(x.shape, axes, keepdims), x.sharding.dim
        found = [_first(pick, part, None if axis is None else axes[0], keepdims) for part in x.parts]
        if dim not in axes or x.sharding.single:
            placed = left(x.sharding, axes, keepdims)
            return Array(tuple(index for _, index in found), placed, shape, torch.int64, x.space)
        here = [(part, pair) for (part, _), pair in zip(x.space.local(x.sharding), found, strict=True)]
        here = [(part, pair) for part, pair in here if x.sharding.sizes[part]]
        indices = [_global(index, part, x, axis is None) for part, (_, index) in here]
        holders = [place for place, size in zip(x.sharding.places, x.sharding.sizes, strict=True) if size]
        wanted = together(x, shape)
        above = wanted.shifted(1)
        values = reshard(stacked(x, holders, [value for _, (value, _) in here], shape, x.dtype), above, name)
        where = reshard(stacked(x, holders, indices, shape, torch.int64), above, name)
        parts = tuple(_choose(best, *pair) for pair in zip(values.parts, where.parts, strict=True))
        return Array(parts, wanted, shape, torch.int64, x.space)

    doc = f"Return the index of the first {name[3:]}imum along an axis; for None, in the flattened array."
    return named(argument, name, doc)


def _first(pick: Callable[..., Tensor], part: Tensor, axis: int | None, keepdims: bool) -> tuple[Tensor, Tensor]:
    """Return the greatest or least value of a part of an array, and its index in the part."""
    run = part.to(torch.uint8) if part.dtype is BOOL else part
    if axis is None:
        index = pick(run) if part.numel() else torch.zeros((), dtype=torch.int64, device=part.device)
        value = part.reshape(-1)[index] if part.numel() else torch.zeros((), dtype=part.dtype, device=part.device)
        return (value.reshape((1,) * part.dim()), index.reshape((1,) * part.dim())) if keepdims else (value, index)
    if not part.shape[axis]:
        shape: Shape = reduced_shape(tuple(part.shape), (axis,), keepdims)
        return part.new_zeros(shape), part.new_zeros(shape, dtype=torch.int64)
    index = pick(run, dim=axis, keepdim=True)
    value = part.gather(axis, index)
    return (value, index) if keepdims else (value.squeeze(axis), index.squeeze(axis))


def _global(index: Tensor, part: int, x: Array, flat: bool) -> Tensor:
    """Convert an index within a part to an index within the array."""
    dim, placed = x.sharding.dim or 0, x.sharding
    if not flat:
        return index + placed.offsets[part]
    after = math.prod(x.shape[dim + 1 :])
    inner, own = index % after, placed.sizes[part]
    row, outer = index // after % own, index // after // own
    return (outer * x.shape[dim] + row + placed.offsets[part]) * after + inner


def _choose(best: Callable[..., Tensor], values: Tensor, indices: Tensor) -> Tensor:
    """Return the index of the greatest or least value among the results of all devices."""
    run = values.to(torch.uint8) if values.dtype is BOOL else values
    top = best(run, 0)
    equal = (run == top) | (run.isnan() & top.isnan() if run.is_floating_point() else False)
    return torch.where(equal, indices, torch.iinfo(torch.int64).max).amin(0)


FUNCTIONS = by_name(mean, var, std)
FUNCTIONS |= by_name(_argument("argmax", torch.argmax, torch.amax), _argument("argmin", torch.argmin, torch.amin))
