"""Compute functions of matrices over parts of a stack.

A stack is an array of matrices, which lie in its last two dims. If a stack is split along one of its other dims, it is
computed where it lies.

A stack that is split along the rows or columns of its matrices is first split along its longest other dim, which moves
as much as a transpose. One split matrix of less than `LARGE` bytes is gathered, and the result is split as the matrix
was, because dividing the work would move more bytes. A larger split matrix is computed by `factors.py` if there is a
method for it, and is otherwise gathered with a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.gathering import gathered, placed_as
from meshwise.arrays.lanes import freed, fullest
from meshwise.arrays.moves import replicate, to_single
from meshwise.arrays.statistics import as_floats

LARGE = 32 << 20  # the work of factoring a matrix of at least this many bytes is divided over the devices
Function = Callable[[Tensor], Any]


def as_matrices(name: str, given: Any, *, square: bool = False) -> Array:
    """Convert integers in a matrix or stack of matrices to floats.
    Raises ValueError for any other shape, and with `square`, for matrices that are not square."""
    x = as_floats(name, given)
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        raise ValueError(
            f"{name} needs {'square ' if square else ''}matrices in the last two dims, but the shape is {x.shape}."
        )
    return x


def called(name: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call `function` on tensors. Raises NumPy's LinAlgError in place of torch's."""
    try:
        return function(*given)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise np.linalg.LinAlgError(f"{name}: {error}") from error


def is_large(x: Array) -> bool:
    """Return whether `x` has at least `LARGE` bytes, so that several devices factor it together."""
    size = x.nbytes
    return size > 0 and size >= LARGE


def is_one_split(x: Array) -> bool:
    """Return whether `x` is one matrix, not a stack of several, and is divided along its rows or columns."""
    dim, stack = x.sharding.dim, x.shape[:-2]
    return dim is not None and dim >= len(stack) and all(length <= 1 for length in stack)


def by_stack(x: Array, name: str, function: Function) -> Any:
    """Apply `function` to each matrix of a stack."""
    stack = x.ndim - 2
    x = freed(x, {stack, stack + 1}, name)
    made = [called(name, function, part) for part in x.parts]
    # Another rank holds the whole array, so find the result's shape and dtype without values.
    if not made:
        made = [function(torch.empty(x.shape, dtype=x.dtype, device="meta"))]
        return _arrays(made, lambda each: Array((), x.sharding, tuple(each[0].shape), each[0].dtype, x.space))

    def array(parts: list[Tensor]) -> Array:
        shape = (*x.shape[:stack], *parts[0].shape[stack:])
        return Array(tuple(parts), x.sharding, shape, parts[0].dtype, x.space)

    return _arrays(made, array)


def _arrays(made: list[Any], array: Callable[[list[Tensor]], Array]) -> Any:
    if isinstance(made[0], Tensor):
        return array(made)
    return tuple(array(list(each)) for each in zip(*made, strict=True))


def on_one(x: Array, name: str, function: Function, *, told: bool) -> Any:
    """Gather a divided matrix on one device, and apply `function` to it."""
    place = fullest(x.sharding)
    if told or is_large(x):
        whole = gathered(x, name, place)
    else:
        whole = replicate(x, operation=name) if x.space.over_ranks else to_single(x, place, name)
    made = called(name, function, whole.parts[0])
    if isinstance(made, Tensor):
        return placed_as(made, place, x.space, x.sharding, name)
    return tuple(placed_as(each, place, x.space, x.sharding, name) for each in made)


def of_each(x: Array, name: str, function: Function, *, told: bool = False) -> tuple[Array, ...]:
    """Apply `function` to one matrix or to each matrix of a stack."""
    made = on_one(x, name, function, told=told) if is_one_split(x) else by_stack(x, name, function)
    return (made,) if isinstance(made, Array) else tuple(made)


def matrix_of_each(x: Array, name: str, function: Function) -> Array:
    """Apply a function that returns one tensor to a matrix, or to each matrix of a stack."""
    return of_each(x, name, function)[0]


def adjoint(x: Array) -> Array:
    """Return the conjugate transpose. No data moves between devices. The result may share memory with `x`."""
    held, last = x.sharding, x.ndim - 1
    dim = {last: last - 1, last - 1: last}.get(-1 if held.dim is None else held.dim, held.dim)
    parts = tuple(part.mH.resolve_conj() for part in x.parts)
    return Array(parts, held.along(dim), (*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype, x.space)


def one_matrix(x: Array) -> Array:
    """Remove the leading dims of `x`, a stack that consists of one matrix."""
    held, more = x.sharding, x.ndim - 2
    parts = tuple(part.reshape(part.shape[-2:]) for part in x.parts)
    return Array(parts, held.shifted(-more), x.shape[-2:], x.dtype, x.space)


def with_stack(found: Array, x: Array) -> Array:
    """Add the leading dims of `x`, all of length 1, to a result that was computed without them."""
    more = x.shape[:-2]
    if not more:
        return found
    parts = tuple(part.reshape(more + tuple(part.shape)) for part in found.parts)
    return Array(parts, found.sharding.shifted(len(more)), more + found.shape, found.dtype, found.space)
