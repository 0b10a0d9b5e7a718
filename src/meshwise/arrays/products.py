"""Compute products that sum over common dims: matmul, vecdot, tensordot, outer.

All of them follow one rule.

The dims of both operands have labels, as in einsum, and the work is divided along one label. An operand that has this
label is split along it. An operand without it is copied to every device. If the result does not have the label, each
device computes a partial sum, and the partial sums are added into a result split along its first dim. A product divided
in this way must at least move these bytes, and moves no more:

    what each device needs of the operands and does not hold, + (devices - 1) x result where sums are partial

The label that moves the fewest bytes is taken. Rows times a replicated matrix, a replicated matrix times columns, and
batches that are split alike move nothing. If both operands are split along the summed dim, only the partial sums move.
If both are split by rows, the smaller of one operand and the result moves. An operand that every device needs whole,
but that is too large for this, is sent in blocks, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from operator import index
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import as_array_without_dims
from meshwise.arrays.align import broadcast_shape, common_space
from meshwise.arrays.array import Array, numbered
from meshwise.arrays.dtypes import BOOL, promoted
from meshwise.arrays.moves import Move, combined, elements_moved, exchange, reshard, stacked
from meshwise.arrays.reductions import as_array
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding

BLOCKS_FROM = 64 << 20  # an operand that is needed whole is sent in blocks if it has at least this many bytes
UNMULTIPLIED = {
    torch.uint16,
    torch.uint32,
    torch.uint64,
}  # torch cannot multiply these, so they are multiplied as int64, which is the same modulo 2^64
Labels = tuple[int | None, ...]  # one label per dim of an operand, None for a dim of length 1 that is broadcast
Local = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Terms:
    """The structure of a product of two arrays, without their values."""

    x: Labels
    y: Labels
    out: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class _Division:
    """How the work of a product is divided over the devices: each device computes with a range of one dim."""

    label: int | None
    x: Sharding
    y: Sharding
    result: Sharding | None


def matmul(x1: Array, x2: Array, /) -> Array:
    """Multiply vectors, matrices, or stacks of matrices. The leading dims of stacks are broadcast."""
    x1, x2 = as_array("matmul", x1), as_array("matmul", x2)
    return product(x1, x2, _matmul_terms(x1.shape, x2.shape), torch.matmul, "matmul")


@lru_cache(maxsize=1024)
def _matmul_terms(a: Shape, b: Shape) -> Terms:
    """Return the labels of all dims in a matrix product, as in einsum, and the shape of the result."""
    if not a or not b:
        raise ValueError(f"matmul of shapes {a} and {b}: both arrays need at least one dim. Write x1 * x2.")
    if a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ValueError(f"matmul of shapes {a} and {b}: x1 has {a[-1]} columns, but x2 has {b[-2:][0]} rows.")
    stack = broadcast_shape("matmul", [a[:-2], b[:-2]])
    count = len(stack)
    row, column, inner = count, count + 1, count + 2
    out = tuple(range(count)) + (row,) * (len(a) > 1) + (column,) * (len(b) > 1)
    shape = stack + a[-2:-1] + (b[-1:] if len(b) > 1 else ())
    x = stack_labels(a[:-2], stack) + ((row, inner) if len(a) > 1 else (inner,))
    y = stack_labels(b[:-2], stack) + ((inner, column) if len(b) > 1 else (inner,))
    return Terms(x, y, out, shape)


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Sum `conj(x1) * x2` along an axis."""
    x1, x2 = as_array("vecdot", x1), as_array("vecdot", x2)
    a, b = x1.shape, x2.shape
    if not -min(len(a), len(b)) <= axis < 0:
        raise ValueError(f"vecdot of {a} and {b}: axis must be negative and exist in both arrays, but it is {axis}.")
    if a[axis] != b[axis]:
        raise ValueError(f"vecdot along axis {axis} needs equal lengths along this axis, not shapes {a} and {b}.")
    rest = [shape[:axis] + shape[axis:][1:] for shape in (a, b)]
    stack = broadcast_shape("vecdot", rest)
    inner = len(stack)
    x, y = (list(stack_labels(shape, stack)) for shape in rest)
    x.insert(len(x) + axis + 1, inner)
    y.insert(len(y) + axis + 1, inner)
    terms = Terms(tuple(x), tuple(y), tuple(range(inner)), stack)
    return product(x1, x2, terms, partial(_vecdot, axis=axis), "vecdot")


def tensordot(x1: Array, x2: Array, /, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """Sum products over pairs of axes."""
    x1, x2 = as_array("tensordot", x1), as_array("tensordot", x2)
    a, b = x1.shape, x2.shape
    asked = f"tensordot of shapes {a} and {b} over {axes!r}"
    if isinstance(axes, int):
        if not 0 <= axes <= min(len(a), len(b)):
            raise ValueError(f"{asked}: the number of axes must be from 0 to {min(len(a), len(b))}.")
        axes = tuple(range(len(a) - axes, len(a))), tuple(range(axes))
    ours, theirs = (
        [_axis(axis, shape, asked) for axis in _listed(each)] for each, shape in zip(axes, (a, b), strict=True)
    )
    if (
        [a[axis] for axis in ours] != [b[axis] for axis in theirs]
        or len({*ours}) < len(ours)
        or len({*theirs}) < len(theirs)
    ):
        raise ValueError(f"{asked}: axes must pair dims of the two arrays with equal lengths, and name no dim twice.")
    x = tuple(range(len(a)))
    names = iter(range(len(a), len(a) + len(b)))
    y = tuple(ours[theirs.index(axis)] if axis in theirs else next(names) for axis in range(len(b)))
    out = tuple(label for label in x if label not in ours) + tuple(label for label in y if label >= len(a))
    shape = tuple(a[k] for k in x if k not in ours) + tuple(b[k] for k in range(len(b)) if k not in theirs)
    found = product(x1, x2, Terms(x, y, out, shape), partial(torch.tensordot, dims=(ours, theirs)), "tensordot")
    return as_array_without_dims(found)


def outer(x1: Array, x2: Array, /) -> Array:
    """Return the outer product of two vectors: the products of all pairs of their elements."""
    x1, x2 = as_array("outer", x1), as_array("outer", x2)
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError(f"outer of shapes {x1.shape}, {x2.shape}: both must be vectors. Write xp.reshape(x, (-1,)).")
    return product(x1, x2, Terms((0,), (1,), (0, 1), x1.shape + x2.shape), _outer, "outer")


def product(x: Array, y: Array, terms: Terms, local: Local, operation: str) -> Array:
    """Compute the product that `terms` describe."""
    space = common_space(operation, [x, y])
    dtype = promoted(x.dtype, y.dtype)
    if dtype is BOOL:
        raise TypeError(f"{operation} needs numbers, but both arrays are bool. Cast one: xp.astype(x, xp.int64).")
    cast = dtype in UNMULTIPLIED or not x.dtype is y.dtype is dtype
    compute = partial(_cast, local=local, dtype=dtype) if cast else local
    how = _divided(x.shape, y.shape, x.sharding, y.sharding, terms, x.dtype.itemsize, y.dtype.itemsize, dtype.itemsize)
    if how.result is not None:
        if _in_blocks(y, terms.y, how.y):
            return _by_blocks(reshard(x, how.x, operation), y, terms, compute, how.result, operation)
        if _in_blocks(x, terms.x, how.x):
            terms = replace(terms, x=terms.y, y=terms.x)
            return _by_blocks(reshard(y, how.y, operation), x, terms, lambda b, a: compute(a, b), how.result, operation)
    x, y = reshard(x, how.x, operation), reshard(y, how.y, operation)
    parts = [compute(a, b) for a, b in zip(x.parts, y.parts, strict=True)]
    if dtype in UNMULTIPLIED:
        parts = [part.to(dtype) for part in parts]
    if how.result is not None:
        return Array(tuple(parts), how.result, terms.shape, dtype, space)
    partials = stacked(x, how.x.places, parts, terms.shape, dtype)
    wanted = evenly(terms.shape[0], how.x.places) if terms.shape else sharding(how.x.places[:1])
    return combined(partials, partial(added, dtype=dtype), wanted, dtype, operation)


@lru_cache(maxsize=1024)
def _divided(
    a: Shape, b: Shape, x: Sharding, y: Sharding, terms: Terms, x_size: int, y_size: int, size: int
) -> _Division:
    """Choose how to divide the work of a product over the devices, so that the fewest bytes move."""
    if not (x.divided or y.divided):
        common = tuple(place for place in x.places if place in y.places)
        if not common:  # no device has both operands: move the smaller one
            common = x.places if prod(b) * y_size <= prod(a) * x_size else y.places
        return _Division(None, sharding(common), sharding(common), sharding(common))
    best: tuple[int, _Division] | None = None
    places = x.places if x.divided else y.places
    for label, sizes in _labels(a, b, x, y, terms):
        lies = sharding(places, terms.x.index(label), sizes) if label in terms.x else sharding(places)
        other = sharding(places, terms.y.index(label), sizes) if label in terms.y else sharding(places)
        result = sharding(places, terms.out.index(label), sizes) if label in terms.out else None
        moved = elements_moved(a, x, lies) * x_size + elements_moved(b, y, other) * y_size
        if result is None:
            moved += (len(places) - 1) * prod(terms.shape) * size
        if best is None or moved < best[0]:
            best = moved, _Division(label, lies, other, result)
    assert best is not None
    return best[1]


def _labels(a: Shape, b: Shape, x: Sharding, y: Sharding, terms: Terms) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (label, sizes) of each dim along which the work of a product can be divided."""
    places = x.places if x.divided else y.places
    seen = set()
    for labels, lies in ((terms.x, x), (terms.y, y)):
        if lies.dim is not None and len(lies.places) == len(places) and (label := labels[lies.dim]) is not None:
            yield label, lies.sizes
            seen.add(label)
    for labels, shape in ((terms.x, a), (terms.y, b)):
        for label, length in zip(labels, shape, strict=True):
            if label is not None and label not in seen:
                yield label, evenly(length, places).sizes
                seen.add(label)


def _in_blocks(x: Array, labels: Labels, wanted: Sharding) -> bool:
    """Return whether several devices need all of `x`, but `x` is too large to copy to them at once."""
    if wanted.dim is not None or len(wanted.places) == 1 or x.sharding.dim is None:
        return False
    return labels[x.sharding.dim] is not None and x.nbytes >= BLOCKS_FROM


def _by_blocks(x: Array, y: Array, terms: Terms, compute: Local, how: Sharding, operation: str) -> Array:
    """Multiply `x`, which does not move, by `y`, whose parts are sent to all devices one after another."""
    space, held = x.space, y.sharding
    assert held.dim is not None
    label = terms.y[held.dim]
    inner = terms.x.index(label) if label in terms.x else None
    along = terms.out.index(label) if label in terms.out else None
    own = dict(numbered(y))
    sums: list[list[Tensor]] = [[] for _ in x.parts]
    for k, (begin, size) in enumerate(zip(held.offsets, held.sizes, strict=True)):
        if not size and any(sums):
            continue
        shape = held.part_shape(y.shape, k)
        pieces = [Move(held.places[k], place, place, shape, y.dtype, own.get(k)) for place in x.sharding.places]
        blocks = exchange(space, pieces, operation)
        for found, part, (_, place) in zip(sums, x.parts, space.local(x.sharding), strict=True):
            term = compute(part if inner is None else part.narrow(inner, begin, size), blocks[place])
            if along is None and found:
                found[0] += term
            else:
                found.append(term)
    dtype = promoted(x.dtype, y.dtype)
    parts = tuple((found[0] if along is None else torch.cat(found, along)).to(dtype) for found in sums)
    return Array(parts, how, terms.shape, dtype, space)


def _cast(a: Tensor, b: Tensor, local: Local, dtype: torch.dtype) -> Tensor:
    """Apply `local` to two parts cast to `dtype`, or to int64 if torch cannot multiply numbers of type `dtype`."""
    inner = torch.int64 if dtype in UNMULTIPLIED else dtype
    return local(a.to(inner), b.to(inner))


def added(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partial sums over their first dim, and return the sum as `dtype`."""
    inner = torch.int64 if dtype in UNMULTIPLIED else dtype
    return partials.to(inner).sum(0, dtype=inner).to(dtype)


def _vecdot(a: Tensor, b: Tensor, axis: int) -> Tensor:
    return (a.conj().movedim(axis, -1) * b.movedim(axis, -1)).sum(-1, dtype=a.dtype)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] * b[None, :]


def stack_labels(own: Shape, stack: Shape) -> Labels:
    """Return labels, as in einsum, for the leading dims of a stack of matrices that is broadcast."""
    first = len(stack) - len(own)
    return tuple(first + k if length == stack[first + k] else None for k, length in enumerate(own))


def _listed(axes: Any) -> list[int]:
    return [axes] if isinstance(axes, int) else [index(axis) for axis in axes]


def _axis(axis: int, shape: Shape, asked: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{asked}: shape {shape} has no axis {axis}.")
    return axis % len(shape)


FUNCTIONS = by_name(matmul, vecdot, tensordot, outer)
