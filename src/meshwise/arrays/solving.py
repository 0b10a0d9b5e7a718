"""Solve linear systems; compute determinants, inverses, powers and Cholesky factors.

Matrices and stacks may be split along any dim.

Stacks are computed where they lie (`stacks.py`). One large divided matrix is factored in blocks (`factors.py`). A small
divided matrix is gathered, which moves fewer bytes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.arrays import elementwise, factors, layout, products
from meshwise.arrays.align import broadcast_shape
from meshwise.arrays.array import Array, like, numbered
from meshwise.arrays.casting import astype
from meshwise.arrays.dtypes import real_of, result_type
from meshwise.arrays.gathering import placed_as
from meshwise.arrays.lanes import fullest
from meshwise.arrays.moves import combined, reshard, stacked, to_single
from meshwise.arrays.products import Terms, product
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import evenly, sharding
from meshwise.arrays.stacks import (
    adjoint,
    as_matrices,
    called,
    is_large,
    is_one_split,
    matrix_of_each,
    of_each,
    one_matrix,
    with_stack,
)
from meshwise.arrays.statistics import as_floats


class SlogDet(NamedTuple):
    """The result of `slogdet`."""

    sign: Array
    logabsdet: Array


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """Return the lower Cholesky factor of a positive-definite matrix, or with `upper` the upper one."""
    x = as_matrices("cholesky", x, square=True)
    if not (is_one_split(x) and is_large(x)):
        return matrix_of_each(x, "cholesky", partial(torch.linalg.cholesky, upper=upper))
    flat = one_matrix(x)
    lower = factors.cholesky(adjoint(flat) if upper else flat)
    return with_stack(adjoint(lower) if upper else lower, x)


def inv(x: Array, /) -> Array:
    """Invert a matrix, or each matrix of a stack."""
    x = as_matrices("inv", x, square=True)
    if not (is_one_split(x) and is_large(x)):
        return matrix_of_each(x, "inv", torch.linalg.inv)
    columns = _by_columns(one_matrix(x), "inv")
    lu = factors.LU(columns, "inv", _identity(columns))
    lu.invertible()
    return with_stack(like(columns, lu.solution()), x)


def det(x: Array, /) -> Array:
    """Return the determinant of a matrix, or of each matrix of a stack."""
    x = as_matrices("det", x, square=True)
    if not (is_one_split(x) and is_large(x)):
        return matrix_of_each(x, "det", torch.linalg.det)
    sign, log = slogdet(x)
    return elementwise.FUNCTIONS["multiply"](sign, elementwise.FUNCTIONS["exp"](log))


def slogdet(x: Array, /) -> SlogDet:
    """Return the sign of the determinant and the logarithm of its absolute value."""
    x = as_matrices("slogdet", x, square=True)
    if not (is_one_split(x) and is_large(x)):
        return SlogDet(*of_each(x, "slogdet", torch.linalg.slogdet))
    lu = factors.LU(one_matrix(x), "slogdet")
    places, (signs, logs) = lu.held.places, lu.signs_and_logs()
    terms = ((signs, torch.prod, x.dtype), (logs, torch.sum, real_of(x.dtype)))
    found = (
        combined(stacked(lu.x, places, parts, (), kind), partial(add, dim=0), sharding(places[:1]), kind, "slogdet")
        for parts, add, kind in terms
    )
    return SlogDet(*(with_stack(each, x) for each in found))


def solve(x1: Array, x2: Array, /) -> Array:
    """Solve x1 @ y = x2 for y."""
    a, given = as_matrices("solve", x1, square=True), as_floats("solve", x2)
    if not given.shape or given.shape[-2 if given.ndim > 1 else 0] != a.shape[-1]:
        raise ValueError(f"solve of shapes {a.shape} and {given.shape}: the second array needs {a.shape[-1]} rows.")
    b = layout.expand_dims(given, axis=-1) if given.ndim == 1 else given
    stack = broadcast_shape("solve", [a.shape[:-2], b.shape[:-2]])
    dtype = result_type(a, b)
    a, b = (astype(each, dtype, copy=False) for each in (a, b))
    if is_one_split(a) and is_large(a) and math.prod(stack) == 1:
        return _squeezed(_solved_by_columns(one_matrix(a), one_matrix(b)), given, stack)
    if math.prod(stack) == 1 and _rather_on_one(a, b):
        return _squeezed(_solved_on_one(a, b), given, stack)
    count = len(stack)
    x = (*products.stack_labels(a.shape[:-2], stack), None, None)
    y = (*products.stack_labels(b.shape[:-2], stack), None, count)
    terms = Terms(x, y, (*range(count), count + 1, count), (*stack, *b.shape[-2:]))
    return _squeezed(product(a, b, terms, _solved, "solve"), given, stack)


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """Solve `a @ y = b` on one device, for matrices or stacks of matrices."""
    b = b[None] if b.dim() == a.dim() - 1 else b
    solved: Tensor = called("solve", torch.linalg.solve, a, b)
    return solved


def _rather_on_one(a: Array, b: Array) -> bool:
    """Return whether to solve `a @ y = b` on one device."""
    if not (a.sharding.divided or b.sharding.divided):
        return False
    places = len((a if a.sharding.divided else b).sharding.places)
    n, columns = b.shape[-2:]
    return columns < places or (a.sharding.divided and n * places > 2 * columns)


def _solved_on_one(a: Array, b: Array) -> Array:
    place = fullest(a.sharding)
    every = sharding(a.space.places if a.space.over_ranks else (place,))
    solved = _solved(reshard(a, every, "solve").parts[0], reshard(b, every, "solve").parts[0])
    return placed_as(solved, place, a.space, b.sharding, "solve")


def _solved_by_columns(a: Array, b: Array) -> Array:
    """Solve `a @ y = b` for a large matrix `a` that is divided over devices."""
    columns, count = _by_columns(a, "solve"), b.shape[1]
    held = columns.sharding
    if count * len(held.places) > a.shape[0]:
        right = reshard(b, evenly(count, held.places, 1), "solve")
        lu = factors.LU(columns, "solve", right)
        lu.invertible()
        return like(right, lu.solution())
    lu = factors.LU(columns, "solve")
    lu.invertible()
    right = to_single(b, held.places[lu.filled[0]], "solve")
    return Array(tuple(lu.solve_travelling(right)), held.along(0), b.shape, b.dtype, b.space)


def matrix_power(x: Array, n: int, /) -> Array:
    """Return the matrix to the power of `n`. For `n` below 0, return the inverse to the power of -n."""
    x = as_matrices("matrix_power", x, square=True)
    x = inv(x) if n < 0 else x
    found: Array | None = None
    for bit in bin(abs(n))[2:]:
        found = found if found is None else products.matmul(found, found)
        if bit == "1":
            found = x if found is None else products.matmul(found, x)
    return _identity(x) if found is None else found


def _identity(x: Array) -> Array:
    parts = []
    for k, part in numbered(x):
        rows, columns = x.sharding.interval(x.shape, k)[-2:]
        own = torch.arange(rows.start, rows.stop, device=part.device)[:, None]
        ones = own == torch.arange(columns.start, columns.stop, device=part.device)
        parts.append(ones.to(x.dtype).expand(part.shape).clone())
    return like(x, parts)


def _by_columns(x: Array, name: str) -> Array:
    return x if x.sharding.dim == 1 else reshard(x, evenly(x.shape[1], x.sharding.places, 1), name)


def _squeezed(found: Array, given: Array, stack: tuple[int, ...]) -> Array:
    """Add missing stack dims to a solution, and remove its last dim if the right-hand side was a vector."""
    if found.ndim < 2 + len(stack):
        found = with_stack(found, Array((), found.sharding, (*stack, 0, 0), found.dtype, found.space))
    return layout.squeeze(found, -1) if given.ndim == 1 else found


FUNCTIONS = by_name(cholesky, inv, det, slogdet, solve, matrix_power)
