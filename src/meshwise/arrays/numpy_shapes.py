"""Add NumPy's functions of shapes and entries that the standard lacks.

They are composed of the array API standard's functions, and move the data that those functions move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwise.arrays.array import Array
from meshwise.arrays.choosing import take
from meshwise.arrays.indexing import cut_along, nonzero
from meshwise.arrays.joining import concat
from meshwise.arrays.layout import arranged, flipped, moveaxis, permute_dims
from meshwise.arrays.reshaping import flat
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.sharding import evenly, resized
from meshwise.arrays.views import axis_of


def array_split(x: Array, sections: int | Sequence[int], /, axis: int = 0) -> list[Array]:
    """Split an array along a dim into a list of views."""
    dim = axis_of(axis, x.ndim, "array_split")
    length = x.shape[dim]
    if isinstance(sections, int):
        if sections < 1:
            raise ValueError(f"array_split: the number of sections must be 1 or more, but it is {sections}.")
        borders = list(evenly(length, tuple(range(sections))).offsets[1:])
    else:
        borders = [slice(0, int(border)).indices(length)[1] for border in sections]
    bounds = zip([0, *borders], [*borders, length], strict=True)
    return [cut_along(x, dim, range(begin, max(begin, end))) for begin, end in bounds]


def split(x: Array, sections: int | Sequence[int], /, axis: int = 0) -> list[Array]:
    """Split an array along a dim, as `array_split`.

    Raises ValueError if a number of parts does not divide the length.
    """
    dim = axis_of(axis, x.ndim, "split")
    if isinstance(sections, int) and sections > 0 and x.shape[dim] % sections:
        raise ValueError(f"split cannot divide {x.shape[dim]} entries into {sections} equal parts. Use array_split.")
    return array_split(x, sections, axis=dim)


def atleast_1d(x: Array, /) -> Array:
    """Return the array with at least one dim."""
    return x if x.shape else arranged(x, [None])


def atleast_2d(x: Array, /) -> Array:
    """Return the array with at least two dims. A vector becomes a row."""
    return x if x.ndim > 1 else arranged(x, [None, 0] if x.shape else [None, None])


def atleast_3d(x: Array, /) -> Array:
    """Return the array with at least three dims. A vector gets the shape (1, n, 1), a matrix the shape (m, n, 1)."""
    if x.ndim > 2:
        return x
    orders: list[list[int | None]] = [[None, None, None], [None, 0, None], [0, 1, None]]
    return arranged(x, orders[x.ndim])


def fliplr(x: Array, /) -> Array:
    """Reverse the order of the columns, the entries of the second dim."""
    return flipped(x, [axis_of(1, x.ndim, "fliplr")])


def flipud(x: Array, /) -> Array:
    """Reverse the order of the rows, the entries of the first dim."""
    return flipped(x, [axis_of(0, x.ndim, "flipud")])


def rot90(x: Array, /, k: int = 1, axes: Sequence[int] = (0, 1)) -> Array:
    """Rotate by `k` quarter turns in the plane of two dims, from the first dim towards the second."""
    first, second = (axis_of(each, x.ndim, "rot90") for each in axes)
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    turned = flipped(x, [first, second] if k % 4 in (2, 3) else [])
    return flipped(permute_dims(turned, order), [first]) if k % 2 else turned


def append(x: Array, values: Array, /, axis: int | None = None) -> Array:
    """Join two arrays along `axis`. Without an axis, both arrays are flattened first."""
    return concat([x, values], axis=axis)


def argwhere(x: Array, /) -> Array:
    """Return the indices of the elements that are not zero, one row per element."""
    columns = [arranged(each, [0, None]) for each in nonzero(x)]
    return concat(columns, axis=1)


def flatnonzero(x: Array, /) -> Array:
    """Return the indices of the nonzero elements in the flattened array."""
    return nonzero(flat(x))[0]


def rollaxis(x: Array, /, axis: int, start: int = 0) -> Array:
    """Move the dim `axis` to the position before the dim `start`, as NumPy's `rollaxis`."""
    dim = axis_of(axis, x.ndim, "rollaxis")
    before = start + x.ndim if start < 0 else start
    return moveaxis(x, dim, before - 1 if dim < before else before)


def insert(x: Array, at: Any, values: Any, /, axis: int | None = None) -> Array:
    """Insert values before the entries `at` along `axis`."""
    x, dim = (flat(x), 0) if axis is None else (x, axis_of(axis, x.ndim, "insert"))
    xp = x.__array_namespace__()
    added = xp.asarray(values).astype(x.dtype)
    added = added.reshape((1,) * (x.ndim - added.ndim) + added.shape)
    where = _where(at)
    if not isinstance(where, slice) and where.ndim == 0:
        added = moveaxis(added, 0, dim)
        count = added.shape[dim]
    else:
        count = len(_named("insert", dim, lambda: np.insert(np.zeros(x.shape[dim]), where, 0))) - x.shape[dim]
    added = xp.broadcast_to(added, resized(x.shape, dim, count))
    where = int(where) if not isinstance(where, slice) and where.ndim == 0 else where
    length = x.shape[dim]
    order = _named("insert", dim, lambda: np.insert(np.arange(length), where, np.arange(length, length + count)))
    found: Array = take(concat([x, added], axis=dim), order, axis=dim)
    return found


def _where(at: Any) -> Any:
    """Convert positions to a slice or a NumPy array. An empty list becomes an array of integers."""
    found: Any = at if isinstance(at, slice) else np.asarray(at)
    return found if isinstance(found, slice) or found.size else found.astype(np.int64)


def _named(name: str, dim: int, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, and name the function and the axis in its errors."""
    try:
        return call()
    except (IndexError, ValueError) as error:
        raise type(error)(f"{name} along axis {dim}: {str(error).replace('axis 0', 'the axis')}.") from None


def delete(x: Array, at: Any, /, axis: int | None = None) -> Array:
    """Return `x` without the entries `at` along `axis`."""
    x, dim = (flat(x), 0) if axis is None else (x, axis_of(axis, x.ndim, "delete"))
    where = _where(at)
    kept = _named("delete", dim, lambda: np.delete(np.arange(x.shape[dim]), where))
    found: Array = take(x, kept, axis=dim)
    return found


def _split_along(name: str, dim: int) -> Callable[..., list[Array]]:
    def rule(x: Array, sections: int | Sequence[int], /) -> list[Array]:
        return split(x, sections, axis=0 if name == "hsplit" and x.ndim == 1 else dim)

    return named(rule, name, f"Split along dim {dim}, as `split` does.")


def extract(condition: Array, x: Any, /) -> Array:
    """Return the elements of `x` at which the condition is true."""
    found: Array = condition.__array_namespace__().asarray(x)[condition]
    return found


FUNCTIONS = by_name(
    *(array_split, split, atleast_1d, atleast_2d, atleast_3d, fliplr, flipud, rot90, append, argwhere),
    *(flatnonzero, rollaxis, insert, delete, extract),
)
FUNCTIONS |= {name: _split_along(name, dim) for dim, name in enumerate(("vsplit", "hsplit", "dsplit"))}
