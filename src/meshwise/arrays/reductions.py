"""Reduce arrays; only partial results move.

Each device reduces the part that it holds. Partial results move only if the split dim is reduced.

Partial results are added in the order of the devices, so that the same program gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_left
from meshwise.arrays.array import Array, mapped
from meshwise.arrays.dtypes import BOOL, COMPLEX, COMPLEXES, REAL, UNSIGNED, WHOLE, as_dtype
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.moves import combined, plainly, stacked
from meshwise.arrays.rules import Table, by_name, named
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding
from meshwise.arrays.unsigned import extreme as of_ordered

Axes = tuple[int, ...]
Reduce = Callable[[Tensor, Axes], Tensor]
"""A function (tensor, dims) that reduces the tensor over these dims, of which there is at least one."""
IN_ORDER = frozenset((*REAL, *COMPLEX))
"""Dtypes in which partial sums of devices are added one by one. float16 and bfloat16 are added in float32."""


def as_array(name: str, x: Any) -> Array:
    """Return `x` if it is an `Array`, and raise NoArrayGiven otherwise."""
    if type(x) is not Array:
        raise NoArrayGiven(f"{name} needs an array, not {type(x).__name__}. Write xp.asarray(value) first.")
    return x


def as_arrays(name: str, x: Any, other: Any) -> tuple[Array, Array]:
    """Return `x`, which must be an `Array`, and `other` as an array of the same namespace."""
    x = as_array(name, x)
    return x, x.__array_namespace__().asarray(other)


def as_axes(name: str, axis: Any, dims: int) -> Axes:
    """Return the dims that `axis` names, sorted."""
    if axis is None:
        return tuple(range(dims))
    try:
        given = tuple(map(index, axis if isinstance(axis, tuple | list) else (axis,)))
    except TypeError:
        raise TypeError(
            f"{name} over axis {axis!r}: axis must be an integer, a tuple of integers, or None for all axes."
        ) from None
    for each in given:
        if not -dims <= each < dims:
            use = f"Use {-dims} to {dims - 1}" if dims else "Use axis=None"
            raise IndexError(f"{name} over axis {each}: the array has {dims} dims. {use}.")
    found = tuple(sorted({each % dims for each in given}))
    if len(found) < len(given):
        raise ValueError(f"{name} over axis {axis} names an axis twice. Name each axis once.")
    return found


def reduced_shape(shape: Shape, axes: Axes, keepdims: bool) -> Shape:
    """Return the shape of the result of a reduction over `axes`."""
    if keepdims:
        return tuple(1 if dim in axes else length for dim, length in enumerate(shape))
    return tuple(length for dim, length in enumerate(shape) if dim not in axes)


def left(placed: Sharding, axes: Axes, keepdims: bool) -> Sharding:
    """Return the sharding of the result if an array sharded as `placed` is reduced over `axes`. If they include the
    sharded dim, all of it is on one device."""
    if placed.dim in axes:
        return sharding(placed.places)
    if placed.dim is None or keepdims:
        return placed
    return placed.along(placed.dim - sum(axis < placed.dim for axis in axes))


def together(x: Array, shape: Shape) -> Sharding:
    """Return the sharding for a result that is combined from partial results of several devices."""
    places = x.sharding.places
    return evenly(shape[0], places) if shape else sharding(places[:1])


def reduced(
    name: str,
    x: Array,
    axes: Axes,
    keepdims: bool,
    dtype: torch.dtype,
    reduce: tuple[Reduce, Callable[[Tensor], Tensor]],
    *,
    of_empty: bool = True,
) -> Array:
    """Reduce `x` over axes: each part by the first function of `reduce`, then the partial results by the second."""
    part_reduce, partial_reduce = reduce
    shape = reduced_shape(x.shape, axes, keepdims)
    parts = [_of_part(part_reduce, part, axes, keepdims) for part in x.parts if of_empty or _has_some(part, axes)]
    placed = x.sharding
    if placed.dim not in axes or placed.single:
        if len(parts) < len(x.parts):  # empty parts were left out above
            parts = _with_empty(x, axes, keepdims, dtype, part_reduce)
        found = Array(tuple(parts), left(placed, axes, keepdims), shape, dtype, x.space)
        return in_order_left(found, x, axes, keepdims)
    holders = [place for place, size in zip(placed.places, placed.sizes, strict=True) if of_empty or size]
    partials = stacked(x, holders, parts, shape, dtype)
    return in_order_left(combined(partials, partial_reduce, together(x, shape), dtype, name), x, axes, keepdims)


def _of_part(reduce: Reduce, part: Tensor, axes: Axes, keepdims: bool) -> Tensor:
    made = reduce(part, axes) if axes else reduce(part.unsqueeze(0), (0,))
    if keepdims:
        for axis in axes:
            made = made.unsqueeze(axis)
    return made


def _has_some(part: Tensor, axes: Axes) -> bool:
    return all(part.shape[axis] for axis in axes)


def _with_empty(x: Array, axes: Axes, keepdims: bool, dtype: torch.dtype, reduce: Reduce) -> list[Tensor]:
    def one(part: Tensor) -> Tensor:
        if _has_some(part, axes):
            return _of_part(reduce, part, axes, keepdims)
        return torch.empty(reduced_shape(tuple(part.shape), axes, keepdims), dtype=dtype, device=part.device)

    return [one(part) for part in x.parts]


def sum_dtype(dtype: torch.dtype, given: Any) -> torch.dtype:
    """Return the dtype of a sum or product of elements of `dtype`: `given`, or NumPy's choice if it is None."""
    if given is not None:
        return as_dtype(given)
    if dtype in UNSIGNED:
        return torch.uint64
    return torch.int64 if dtype in WHOLE else dtype


def total(x: Any, /, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
    """Sum the elements over the given axes, by default over all."""
    x = as_array("sum", x)
    whole = axis is None and dtype is None and not keepdims
    if whole and x.dtype in IN_ORDER and x.sharding.dim is not None and plainly(x.space):
        added = _in_order([part.sum() for part in x.parts])  # the code below takes as long as 100,000 additions
        return Array((added,), sharding(x.sharding.places[:1]), (), x.dtype, x.space)
    kind = sum_dtype(x.dtype, dtype)
    run = _calculated(kind)

    def add(part: Tensor, dims: Axes) -> Tensor:
        return torch.sum(part, dim=dims, dtype=run).to(kind)

    def join(partials: Tensor) -> Tensor:
        if partials.dim() == 1 and kind in IN_ORDER:
            return _in_order(partials.unbind(0))
        return add(partials, (0,))

    axes = as_axes("sum", axis, x.ndim)
    return reduced("sum", x, axes, keepdims, kind, (add, join))


def _in_order(partials: Sequence[Tensor]) -> Tensor:
    """Add partial results one after another, so that the result has the same bits every time."""
    first, *others = partials
    return sum(others, first)


def product(x: Any, /, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
    """Multiply the elements over the given axes, by default over all."""
    x = as_array("prod", x)
    kind = sum_dtype(x.dtype, dtype)
    run = _calculated(kind)

    def multiply(part: Tensor, dims: Axes) -> Tensor:
        if part.dim() == len(dims):
            return torch.prod(part, dtype=run).to(kind)
        for dim in sorted(dims, reverse=True):
            part = torch.prod(part, dim=dim, dtype=run)
        return part.to(kind)

    axes = as_axes("prod", axis, x.ndim)
    return reduced("prod", x, axes, keepdims, kind, (multiply, lambda partials: multiply(partials, (0,))))


def _calculated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes a sum or product whose result has the dtype `dtype`."""
    return torch.int64 if dtype in UNSIGNED else dtype


def _extreme(name: str, torch_name: str) -> Callable[..., Array]:
    op = of_ordered(getattr(torch, torch_name))

    def extreme(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
        x = as_array(name, x)
        axes = as_axes(name, axis, x.ndim)
        refuse_none(name, x, axes)
        if x.dtype in COMPLEXES:
            raise TypeError(f"{name} cannot compare complex numbers ({x.dtype}). Write abs(x) or xp.real(x).")
        pair = (op, lambda partials: op(partials, (0,)))
        return reduced(name, x, axes, keepdims, x.dtype, pair, of_empty=False)

    doc = f"Return the {name}imum over axes; nan if an element is nan. Raises ValueError if there are none."
    return named(extreme, name, doc)


def refuse_none(name: str, x: Array, axes: Axes) -> None:
    """Raise ValueError if a reduction over `axes` would have no elements to reduce."""
    if any(x.shape[axis] == 0 for axis in axes):
        raise ValueError(f"{name} over axes {axes} of shape {x.shape} needs at least one element, but there is none.")


def _logical(name: str) -> Callable[..., Array]:
    op = getattr(torch, name)

    def logical(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
        x = as_array(name, x)

        def reduce(part: Tensor, dims: Axes) -> Tensor:
            found: Tensor = op(part, dims)
            return found.to(BOOL)

        pair = (reduce, lambda partials: reduce(partials, (0,)))
        return reduced(name, x, as_axes(name, axis, x.ndim), keepdims, BOOL, pair)

    return named(logical, name, f"Return whether {name} elements over axes are nonzero.")


def count_nonzero(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Count the nonzero elements over the given axes, by default over all."""
    x = as_array("count_nonzero", x)
    return total(mapped(x, lambda part: part != 0, BOOL), axis=axis, keepdims=keepdims)


FUNCTIONS: Table = {"sum": total, "prod": product}
FUNCTIONS |= by_name(_extreme("max", "amax"), _extreme("min", "amin"), _logical("any"), _logical("all"), count_nonzero)
