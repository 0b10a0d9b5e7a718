"""Compute norms, diagonals, traces and cross products.

Each device computes with its own part; only partial results move.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays import layout, reductions
from meshwise.arrays.aliases import strides_of, viewed
from meshwise.arrays.align import aligned
from meshwise.arrays.array import Array, cast, mapped, numbered
from meshwise.arrays.dtypes import real_of, result_type
from meshwise.arrays.lanes import freed
from meshwise.arrays.moves import replicate
from meshwise.arrays.products import UNMULTIPLIED
from meshwise.arrays.reductions import as_array, as_axes
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import sharding
from meshwise.arrays.spectra import svdvals
from meshwise.arrays.stacks import as_matrices
from meshwise.arrays.statistics import as_floats
from meshwise.arrays.strides import named, of


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:
    """Return the vector norm sum(abs(x)^ord)^(1/ord) over the given axes, by default over all."""
    x = as_floats("vector_norm", x)
    size = x if ord == 2 and not x.dtype.is_complex else mapped(x, torch.abs, real_of(x.dtype))
    words: Any = {"axis": axis, "keepdims": keepdims}
    if math.isinf(ord):
        none = math.prod(x.shape[dim] for dim in as_axes("vector_norm", axis, x.ndim)) == 0
        if none and ord > 0:
            return reductions.total(size, **words)
        extreme: Array = reductions.FUNCTIONS["max" if ord > 0 else "min"](size, **words)
        return extreme
    if ord == 0:
        return cast(reductions.count_nonzero(size, **words), size.dtype)
    powers = mapped(size, lambda part: part.square() if ord == 2 else part.pow(ord))
    root = torch.sqrt if ord == 2 else lambda part: part.pow(1 / ord)
    return mapped(reductions.total(powers, **words), root)


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """Return the norm of each matrix in the last two dims. ord: "fro", "nuc", 1, -1, 2, -2, inf or -inf."""
    x = as_matrices("matrix_norm", x)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        sums = reductions.total(mapped(x, torch.abs, real_of(x.dtype)), axis=-2 if abs(ord) == 1 else -1)
        found = _extreme(sums, ord)
    elif ord in ("nuc", 2, -2):
        values = svdvals(x)
        found = reductions.total(values, axis=-1) if ord == "nuc" else _extreme(values, ord)
    else:
        raise ValueError(f"matrix_norm: ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, but is {ord!r}.")
    return layout.expand_dims(found, axis=(-2, -1)) if keepdims else found


def _extreme(values: Array, ord: float) -> Array:
    """Return the greatest value along the last dim, or the least value if `ord` is below 0."""
    if ord > 0 and not values.shape[-1]:
        return reductions.total(values, axis=-1)
    found: Array = reductions.FUNCTIONS["max" if ord > 0 else "min"](values, axis=-1)
    return found


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """Return the diagonal of each matrix in the last two dims, as a read-only view."""
    x = as_array("diagonal", x)
    if x.ndim < 2:
        raise ValueError(f"diagonal needs two dims or more, but this array has shape {x.shape}.")
    return diagonal_of(x, offset, read_only=True)


def diagonal_of(x: Array, offset: int, *, read_only: bool) -> Array:
    """Return the diagonal of each matrix in the last two dims, as a view, which is writable unless `read_only`."""
    *stack, rows, columns = of(x.shape, strides_of(x))
    found = _diagonal(x, offset)
    strides = named(found.shape, (*stack, rows + columns))
    return viewed(x, lambda x: _diagonal(x, offset), strides, read_only=read_only, found=found)


def _diagonal(x: Array, offset: int) -> Array:
    held, last = x.sharding, x.ndim - 1
    parts = []
    for k, part in numbered(x):
        begin = held.offsets[k] if held.dim is not None and held.dim >= last - 1 else 0
        own = offset + (begin if held.dim == last - 1 else -begin)
        parts.append(torch.diagonal(part, own, -2, -1))
    rows, columns = x.shape[-2:]
    shape = (*x.shape[:-2], max(0, min(rows + min(offset, 0), columns - max(offset, 0))))
    if held.dim is not None and held.dim >= last - 1:
        spans = zip(held.offsets, held.sizes, strict=True)
        first = max(0, -offset) if held.dim == last - 1 else max(0, offset)
        ends = first, first + shape[-1]
        sizes = tuple(max(0, min(begin + size, ends[1]) - max(begin, ends[0])) for begin, size in spans)
        held = sharding(held.places, last - 1, sizes)
    return Array(tuple(parts), held, shape, x.dtype, x.space)


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """Sum the diagonal of each matrix in the last two dims. Integers are summed in 64 bits."""
    return reductions.total(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Return the cross products of the vectors of length 3 along `axis`."""
    x, y = as_array("cross", x1), as_array("cross", x2)
    if not -min(x.ndim, y.ndim) <= axis < 0 or x.shape[axis] != 3 or y.shape[axis] != 3:
        raise ValueError(f"cross(axis={axis}) of {x.shape} and {y.shape}: axis must be negative, and its length 3.")
    dtype = result_type(x, y)
    whole = [freed(each, {axis % each.ndim}, "cross") for each in (x, y)]
    for at, each in enumerate(whole):
        if each.sharding.dim is not None and each.shape[each.sharding.dim] == 1:
            whole[at] = replicate(each, each.sharding.places, "cross")
    shape, placed, parts = aligned("cross", whole)
    inner = torch.int64 if dtype in UNMULTIPLIED else dtype

    def made(a: Tensor, b: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(a.to(inner), b.to(inner))
        found: Tensor = torch.linalg.cross(a, b, dim=axis)
        return found.to(dtype)

    return Array(tuple(made(a, b) for a, b in zip(*parts, strict=True)), placed, shape, dtype, x.space)


FUNCTIONS = by_name(vector_norm, matrix_norm, diagonal, trace, cross)
