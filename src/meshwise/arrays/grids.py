"""Build grids of coordinates: `xp.mgrid[0:2, 0:3]`, `xp.r_[0:3, 7]`, `xp.ix_`, `xp.indices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwise.arrays.array import Array
from meshwise.arrays.creation import as_shape, asarray
from meshwise.arrays.dtypes import BOOL
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.reshaping import along_dim
from meshwise.arrays.rules import by_name
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError


class Grid:
    """The object `xp.mgrid` or `xp.ogrid`, which returns the coordinates of a grid for ranges in brackets."""

    def __init__(self, xp: Any, *, sparse: bool) -> None:
        self._xp, self._sparse = xp, sparse

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return line_of(self._xp, key)
        grown = list(ix_(self._xp.space, *(line_of(self._xp, each) for each in key)))
        return grown if self._sparse else self._xp.stack(self._xp.broadcast_arrays(*grown))


def line_of(xp: Any, key: Any) -> Array:
    """Return the numbers of a slice, such as 0, 1, 2 for `0:3` in `xp.mgrid[0:3]`."""
    if not isinstance(key, slice) or key.stop is None:
        raise UsageError(f"{key!r} must be a slice with a stop: start:stop or start:stop:step, such as xp.mgrid[0:5].")
    count = int(abs(key.step)) if isinstance(key.step, complex) else None
    given = key.start or 0, key.stop
    line: Array = xp.arange(*given, key.step or 1) if count is None else xp.linspace(*given, count)
    return line


class Joined:
    """The object `xp.r_` or `xp.c_`, which joins arrays that are written in brackets."""

    def __init__(self, xp: Any, *, columns: bool) -> None:
        self._xp, self._columns = xp, columns

    def __getitem__(self, key: Any) -> Array:
        found = []
        for each in key if isinstance(key, tuple) else (key,):
            if isinstance(each, str):
                raise UsageError(f"r_ does not take strings, such as {each!r}. Write xp.concat(arrays, axis=...).")
            x = line_of(self._xp, each) if isinstance(each, slice) else self._xp.asarray(each)
            x = x.reshape(-1) if not x.shape else x
            found.append(x[:, None] if self._columns and x.ndim == 1 else x)
        joined: Array = self._xp.concat(found, axis=-1 if self._columns else 0)
        return joined


def ix_(space: Space, *vectors: Any) -> tuple[Array, ...]:
    """Make index arrays that select the given rows and columns: `x[xp.ix_([0, 2], [1, 3])]`."""
    found = []
    for at, each in enumerate(vectors):
        x = asarray(space, each)
        if x.ndim != 1:
            raise ValueError(f"ix_ takes vectors, but this array has shape {x.shape}. Write x.reshape(-1).")
        x = x.__array_namespace__().nonzero(x)[0] if x.dtype is BOOL else x
        found.append(along_dim(x, at, len(vectors)))
    return tuple(found)


def indices(space: Space, dimensions: Sequence[int], dtype: Any = int, sparse: bool = False) -> Any:
    """Return the indices of every element of an array of the shape `dimensions`, as NumPy does."""
    shape = as_shape(dimensions)
    xp = asarray(space, 0).__array_namespace__()
    lines = ix_(space, *(xp.arange(length, dtype=dtype) for length in shape))
    if sparse:
        return lines
    return xp.stack([xp.broadcast_to(line, shape) for line in lines]) if lines else xp.zeros((0,), dtype=dtype)


def fromfunction(space: Space, function: Callable[..., Any], shape: Sequence[int], *, dtype: Any = float) -> Any:
    """Call `function` once with the coordinates of all elements, as one array per dim, and return the result."""
    return function(*indices(space, shape, dtype))


def tri(space: Space, n: int, m: int | None = None, k: int = 0, dtype: Any = None) -> Array:
    """Return a matrix with ones on and below diagonal number `k`, and zeros above it."""
    xp = asarray(space, 0).__array_namespace__()
    found: Array = xp.tril(xp.ones((n, n if m is None else m), dtype=dtype), k=k)
    return found


def tril_indices(space: Space, n: int, k: int = 0, m: int | None = None) -> tuple[Array, ...]:
    """Return the indices (rows, columns) of the elements of a matrix on and below diagonal number `k`."""
    found: tuple[Array, ...] = tri(space, n, m, k, BOOL).nonzero()
    return found


def triu_indices(space: Space, n: int, k: int = 0, m: int | None = None) -> tuple[Array, ...]:
    """Return the indices (rows, columns) of the elements of a matrix on and above diagonal number `k`."""
    found: tuple[Array, ...] = ELEMENTWISE["logical_not"](tri(space, n, m, k - 1, BOOL)).nonzero()
    return found


MAKERS = by_name(ix_, indices, fromfunction, tri, tril_indices, triu_indices)
