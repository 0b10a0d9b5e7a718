"""Track NumPy's strides, which decide whether `reshape` is a view.

Strides count elements. They are the strides that the array would have if it were undivided, whatever devices its parts
lie on. None stands for row-major order.
"""

from __future__ import annotations

import functools
import itertools
import math

from meshwise.arrays.sharding import Shape

Strides = tuple[int, ...] | None


@functools.lru_cache(maxsize=4096)
def row_major(shape: Shape) -> tuple[int, ...]:
    """Return the strides of an array of this shape in row-major order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def of(shape: Shape, strides: Strides) -> tuple[int, ...]:
    """Return `strides`, or the strides of row-major order if `strides` is None."""
    return row_major(shape) if strides is None else strides


@functools.lru_cache(maxsize=4096)
def named(shape: Shape, strides: tuple[int, ...]) -> Strides:
    """Return the strides, or None if they are the strides of row-major order."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if 0 not in shape and length > 1 and stride != expected:
            return strides
        expected *= length
    return None


@functools.lru_cache(maxsize=4096)
def is_descending(shape: Shape, strides: Strides) -> bool:
    """Return whether the dims are in row-major order. There may be gaps between entries."""
    own = [abs(each) for length, each in zip(shape, strides or (), strict=False) if length > 1]
    return all(outer >= inner > 0 for outer, inner in itertools.pairwise((*own, 1)))


@functools.lru_cache(maxsize=4096)
def of_cut(shape: Shape, strides: Strides, cuts: tuple[int | range, ...]) -> Strides:
    """Return the strides after each dim is cut to a range of entries or to one entry."""
    kept = [(each, stride) for each, stride in zip(cuts, of(shape, strides), strict=True) if isinstance(each, range)]
    return named(tuple(len(each) for each, _ in kept), tuple(stride * each.step for each, stride in kept))


@functools.lru_cache(maxsize=4096)
def of_order(shape: Shape, strides: Strides, order: tuple[int | None, ...]) -> Strides:
    """Return the strides after a permutation of the dims. A None in `order` is a new dim of length 1."""
    own = of(shape, strides)
    lengths = tuple(1 if dim is None else shape[dim] for dim in order)
    return named(lengths, tuple(0 if dim is None else own[dim] for dim in order))


@functools.lru_cache(maxsize=4096)
def of_reshape(shape: Shape, strides: Strides, wanted: Shape) -> tuple[bool, Strides]:
    """Return whether a view can have the shape `wanted`, and if it can, the strides of this view."""
    if strides is None:
        return True, None
    old = [(length, stride) for length, stride in zip(shape, strides, strict=True) if length != 1]
    found: list[int] = []
    i = j = 0
    while j < len(wanted):
        if wanted[j] == 1:
            found.append(0)
            j += 1
            continue
        first, begin = i, j
        a, b, i, j = old[i][0], wanted[j], i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i][0], i + 1
            else:
                b, j = b * wanted[j], j + 1
        group = old[first:i]
        if any(one[1] != other[0] * other[1] for one, other in itertools.pairwise(group)):
            return False, None
        found.extend(stride * group[-1][1] for stride in row_major(wanted[begin:j]))
    return True, named(wanted, tuple(found))


@functools.lru_cache(maxsize=4096)
def of_result(shape: Shape, operands: tuple[tuple[int, ...], ...]) -> Strides:
    """Return the strides that NumPy gives to the result of an elementwise function (NumPy's order K)."""
    inner_first: list[int] = []
    for dim in reversed(range(len(shape))):
        at = len(inner_first)
        for before in reversed(range(len(inner_first))):
            pairs = [(abs(each[inner_first[before]]), abs(each[dim])) for each in operands]
            pairs = [pair for pair in pairs if all(pair)]
            if any(inner <= outer for inner, outer in pairs):
                break
            if pairs:
                at = before
        inner_first.insert(at, dim)
    strides, expected = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = expected
        expected *= shape[dim]
    return named(shape, tuple(strides))
