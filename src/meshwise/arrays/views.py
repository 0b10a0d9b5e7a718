"""Define helpers for the parts, bits and dims of arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.array import Array, mapped
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding


def made(parts: list[Tensor], placed: Sharding, x: Array, shape: Shape | list[int]) -> Array:
    """Make an array from its parts, with the dtype and the namespace of `x`."""
    return Array(tuple(parts), placed, tuple(shape), x.dtype, x.space)


def undivided(x: Array) -> Array:
    """Return `x`, with an undivided sharding if `x` is divided into a single part."""
    return (
        x
        if x.sharding.dim is None or not x.sharding.single
        else made(list(x.parts), sharding(x.sharding.places), x, x.shape)
    )


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Unsigned type, which torch hardly supports -> the signed type of the same size, whose elements torch can move."""


def as_bits(x: Array) -> Array:
    """View an array in a signed type of the same size if torch cannot move elements of its dtype."""
    kind = SIGNED.get(x.dtype)
    return x if kind is None else as_before(x, kind)


def as_before(x: Array, dtype: torch.dtype) -> Array:
    """View an array that `as_bits` returned, or that was computed from it, in the original dtype again."""
    return x if x.dtype is dtype else mapped(x, lambda part: part.view(dtype), dtype)


def by_bits(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function also work for uint16, uint32 and uint64."""

    @functools.wraps(rule)
    def call(x: Array, /, *given: Any, **named: Any) -> Any:
        if x.dtype not in SIGNED:
            return rule(x, *given, **named)
        found = rule(as_bits(x), *given, **named)
        return (
            tuple(as_before(each, x.dtype) for each in found) if isinstance(found, tuple) else as_before(found, x.dtype)
        )

    return call


def axis_of(axis: int, ndim: int, what: str) -> int:
    """Return `axis` counted from the front. Raises IndexError if there is no such axis."""
    if not hasattr(axis, "__index__"):
        raise TypeError(f"{what}: axis must be an integer, but it is {axis!r}.")
    if not -ndim <= axis < ndim:
        raise IndexError(f"{what} along axis {axis}: an array of {ndim} dims has axes {-ndim} to {ndim - 1}.")
    return int(axis) % ndim


def first_divided(shape: Shape, places: tuple[int, ...], dim: int = 0) -> Sharding:
    """Return a sharding that divides an array evenly over devices along a dim: the first dim, from `dim` on, with more
    than one entry."""
    while shape[dim] == 1 and dim + 1 < len(shape):
        dim += 1
    return evenly(shape[dim], places, dim)


def size_of(shape: Shape) -> int:
    """Return the number of elements of an array of this shape."""
    return math.prod(shape)
