"""Add NumPy and CuPy functions that the standard spells differently.

The functions are composed of the standard's functions.

`ALIASES` has other names for functions and dtypes of the namespace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshwise.arrays import elementwise
from meshwise.arrays.aliases import as_array_without_dims, copied, in_order_of, is_number, strides_of
from meshwise.arrays.array import Array, like
from meshwise.arrays.creation import asarray
from meshwise.arrays.dtypes import WHOLE, promoted
from meshwise.arrays.norms import diagonal, trace
from meshwise.arrays.reading import number
from meshwise.arrays.reductions import as_array, as_arrays
from meshwise.arrays.reshaping import along_dim
from meshwise.arrays.rules import Table, by_name
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError

ALIASES = {
    "absolute": "abs",
    "power": "pow",
    "true_divide": "divide",
    "mod": "remainder",
    "amax": "max",
    "amin": "min",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctanh": "atanh",
    "arctan2": "atan2",
    "conjugate": "conj",
    "invert": "bitwise_invert",
    "bitwise_not": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
    "concatenate": "concat",
    "bool_": "bool",
    "double": "float64",
    "int_": "int64",
    "intp": "int64",
    "cfloat": "complex128",
    "asanyarray": "asarray",
    "fmax": "maximum",
    "fmin": "minimum",
    "fix": "trunc",
    "row_stack": "vstack",
}
"""NumPy's name -> the array API standard's name, for functions that do the same."""


def array(
    space: Space,
    obj: Any,
    dtype: Any = None,
    *,
    copy: bool = True,
    ndmin: int = 0,
    device: Any = None,
    sharding: Any = None,
) -> Array:
    """Make an array as `asarray` does, by default as a copy. Dims of length 1 are added in front up to `ndmin` dims."""
    if ndmin:
        found = asarray(space, obj, dtype)
        obj = found.reshape((1,) * max(0, ndmin - found.ndim) + found.shape)
    return asarray(space, obj, dtype, device=device, sharding=sharding, copy=copy or None)


def identity(space: Space, n: int, dtype: Any = None) -> Any:
    """Return the identity matrix of size `n`."""
    xp = _names_of(space)
    return xp.eye(n, dtype=dtype)


def logspace(space: Space, start: float, stop: float, num: int = 50, *, base: float = 10.0, **how: Any) -> Any:
    """Return `num` logarithmically spaced numbers from `base**start` to `base**stop`."""
    return base ** _names_of(space).linspace(start, stop, num, **how)


def _names_of(x: Any) -> Any:
    return x.__array_namespace__() if isinstance(x, Array) else asarray(x, 0).__array_namespace__()


def dot(x1: Any, x2: Any, /) -> Any:
    """Multiply as NumPy's `dot`: vectors and matrices as by `@`, numbers elementwise."""
    x1, x2 = as_arrays("dot", x1, x2)
    if not x1.shape or not x2.shape:
        return x1 * x2
    if x2.ndim <= 2:
        return x1 @ x2
    return _names_of(x1).tensordot(x1, x2, axes=((-1,), (-2,)))


def transpose(x: Any, /, axes: Any = None) -> Any:
    """Permute the dims into the order `axes`, by default reversed."""
    x = as_array("transpose", x)
    return x.T if axes is None and x.ndim < 3 else x.transpose(axes or tuple(reversed(range(x.ndim))))


def swapaxes(x: Any, /, axis1: int, axis2: int) -> Any:
    """Swap two dims."""
    return as_array("swapaxes", x).swapaxes(axis1, axis2)


def ravel(x: Any, /) -> Any:
    """Flatten the elements to one dim, in row-major order."""
    return as_array("ravel", x).ravel()


def vstack(arrays: Any, /) -> Any:
    """Concatenate arrays along the first dim. Vectors become rows."""
    return _stacked(arrays, lambda xp, x: xp.reshape(x, (1, -1)) if x.ndim < 2 else x, 0)


def hstack(arrays: Any, /) -> Any:
    """Concatenate arrays along the second dim, or vectors along their only dim."""
    return _stacked(arrays, lambda xp, x: xp.reshape(x, (-1,)) if not x.shape else x, -1)


def dstack(arrays: Any, /) -> Any:
    """Concatenate arrays along the third dim. Vectors get the shape (1, n, 1)."""
    return _stacked(arrays, lambda xp, x: xp.atleast_3d(x), 2)


def column_stack(arrays: Any, /) -> Array:
    """Concatenate arrays along the second dim. Vectors become columns."""
    return _stacked(arrays, lambda xp, x: xp.reshape(x, (-1, 1)) if x.ndim < 2 else x, 1)


def _stacked(arrays: Any, grown: Callable[[Any, Array], Array], axis: int) -> Array:
    first = next((x for x in arrays if isinstance(x, Array)), None)
    xp = _names_of(as_array("stack", first))
    every = [grown(xp, xp.asarray(x)) for x in arrays]
    joined: Array = xp.concat(every, axis=0 if axis == -1 and len(every[0].shape) == 1 else abs(axis))
    return joined


def isclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False) -> Any:
    """Return whether elements differ by at most `atol` plus `rtol` times the absolute value in `x2`."""
    x1, x2 = as_arrays("isclose", x1, x2)
    xp = _names_of(x1)
    bound = xp.abs(x2) * rtol + atol
    near: Array = (x1 == x2) | ((xp.abs(x1 - x2) <= bound) & xp.isfinite(x1) & xp.isfinite(x2))
    return near | (xp.isnan(x1) & xp.isnan(x2)) if equal_nan else near


def allclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False) -> bool:
    """Return whether all pairs of elements are close, as `isclose` defines it. Waits for the result."""
    return bool(isclose(x1, x2, rtol, atol, equal_nan=equal_nan).all())


def array_equal(x1: Any, x2: Any, /) -> Any:
    """Return whether two arrays have the same shape and equal elements. Waits for the result."""
    x1, x2 = as_arrays("array_equal", x1, x2)
    return x1.shape == x2.shape and bool((x1 == x2).all())


def ptp(x: Any, /, axis: Any = None) -> Any:
    """Return the greatest element minus the least, over `axis` or over all elements."""
    x = as_array("ptp", x)
    return x.max(axis) - x.min(axis)


def average(x: Any, /, axis: Any = None, weights: Any = None) -> Any:
    """Return the mean, or with `weights` the weighted mean."""
    x = as_array("average", x)
    if weights is None:
        return x.mean(axis)
    w = _names_of(x).asarray(weights)
    if w.shape != x.shape and isinstance(axis, int):
        w = along_dim(w, axis % x.ndim, x.ndim)
    return (x * w).sum(axis) / (w + x * 0).sum(axis)


def diag(x: Any, /) -> Any:
    """Return the diagonal of a matrix, or the matrix that has the vector `x` on its diagonal."""
    x = as_array("diag", x)
    if x.ndim == 2:
        return diagonal(x)
    xp = _names_of(x)
    found: Array = xp.where(xp.eye(x.shape[0], dtype=xp.bool), x[:, None], xp.asarray(0, dtype=x.dtype))
    return found


def nan_to_num(
    x: Any, /, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """Replace NaN with `nan`, and infinities with `posinf` and `neginf`, by default the greatest and the least finite
    number. With copy=False, `x` itself is changed."""
    x = as_array("nan_to_num", x)
    found = in_order_of(like(x, [part.nan_to_num(nan, posinf, neginf) for part in x.parts]), [x])
    if copy:
        return found
    x[...] = found
    return x if x.shape else found


def around(x: Any, /, decimals: int = 0) -> Any:
    """Round to `decimals` decimal places. A half is rounded to even."""
    x = as_array("round", x)
    rounded = elementwise.FUNCTIONS["round"]
    whole = x.dtype in WHOLE and decimals >= 0
    return rounded(x * 10.0**decimals) / 10.0**decimals if decimals and not whole else rounded(x)


def sort_in_place(x: Array, /, axis: int = -1) -> None:
    """Sort `x` in place, like `x[...] = xp.sort(x)`."""
    x[...] = _names_of(x).sort(x, axis=axis)


def item(x: Array, /, *index: Any) -> Any:
    """Return one element as a Python number."""
    if not index:
        return number(x)
    if len(index) == 1 and not isinstance(index[0], tuple):
        count = x.size
        if not hasattr(index[0], "__index__") or not -count <= index[0] < count:
            raise IndexError(f"item({index[0]}) of an array of {count} elements: pass an integer within bounds.")
        return number(x[tuple(map(int, np.unravel_index(index[0] % count, x.shape)))])
    return number(x[index[0] if len(index) == 1 else index])


def fill(x: Array, value: Any, /) -> None:
    """Set all elements to `value`, like `x[...] = value`."""
    x[...] = value


def copy_of(x: Array, /) -> Array:
    """Copy the array to new memory, in row-major order."""
    found = copied(x)
    return found if is_number(x) else as_array_without_dims(found)


def in_row_major_order(x: Any, /) -> Any:
    """Implement NumPy's `ascontiguousarray`."""
    x = as_array("ascontiguousarray", x)
    return copy_of(x) if strides_of(x) is not None else x if x.shape else x.reshape(1)


def cumsum(x: Any, /, axis: int | None = None, dtype: Any = None) -> Any:
    """Return the cumulative sums along an axis. If `axis` is None, the array is flattened first."""
    x = as_array("cumsum", x)
    return _names_of(x).cumulative_sum(x.reshape(-1) if axis is None else x, axis=axis or 0, dtype=dtype)


def cumprod(x: Any, /, axis: int | None = None, dtype: Any = None) -> Any:
    """Return the cumulative products along an axis. If `axis` is None, the array is flattened first."""
    x = as_array("cumprod", x)
    return _names_of(x).cumulative_prod(x.reshape(-1) if axis is None else x, axis=axis or 0, dtype=dtype)


def float_power(x1: Any, x2: Any, /) -> Any:
    """Return `x1 ** x2`, computed in float64 or in complex128 for complex numbers."""
    x1 = as_array("float_power", x1)
    return x1.astype(promoted(x1.dtype, torch.float64)) ** x2


def unique(
    x: Any, /, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False, axis: Any = None
) -> Any:
    """Return the distinct elements in ascending order, and after them what the `return_` options ask for."""
    x = as_array("unique", x)
    if axis is not None:
        raise UsageError(f"unique(axis={axis}) is not supported. Leave axis out to find distinct elements.")
    if not (return_index or return_inverse or return_counts):
        return _names_of(x).unique_values(x)
    values, *others = _names_of(x).unique_all(x)
    asked = (return_index, return_inverse, return_counts)
    return (values, *(each for each, wanted in zip(others, asked, strict=True) if wanted))


def formatted(x: Array, how: str, /) -> str:
    """Implement `format(x, how)`, as in f-strings. An array without dims is formatted as a number."""
    return format(x.item() if how and not x.shape else str(x), how)


def sized(x: Any, /, axis: int | None = None) -> Any:
    """Return the number of elements, or with `axis`, the length of this axis."""
    return as_array("size", x).size if axis is None else x.shape[axis]


FUNCTIONS = by_name(
    *(dot, transpose, swapaxes, ravel, vstack, hstack, column_stack, dstack, isclose, allclose, array_equal, ptp),
    *(average, trace, diagonal, diag, nan_to_num, around, cumsum, cumprod, float_power, unique),
)
FUNCTIONS |= {
    "round": around,
    "copy": lambda x: in_order_of(as_array_without_dims(as_array("copy", x).copy()), [x]),
    "ascontiguousarray": in_row_major_order,
    "ndim": lambda x: as_array("ndim", x).ndim,
    "shape": lambda x: as_array("shape", x).shape,
    "size": sized,
}
MAKERS = by_name(array, identity, logspace)
METHODS: Table = {
    "copy": copy_of,
    "fill": fill,
    "dot": dot,
    "tolist": lambda x: x.numpy().tolist(),
    "clip": lambda x, min=None, max=None, **how: _names_of(x).clip(x, min, max, **how),
    "round": around,
    "trace": trace,
    "diagonal": diagonal,
    "ptp": ptp,
    "cumsum": cumsum,
    "cumprod": cumprod,
    "__copy__": copy_of,
    "sort": sort_in_place,
    "searchsorted": lambda x, v, side="left", sorter=None: _names_of(x).searchsorted(x, v, side=side, sorter=sorter),
    "tobytes": lambda x: x.numpy().tobytes(),
    "item": item,
    "__deepcopy__": lambda x, memo: copy_of(x),
    "__format__": formatted,
    "__round__": lambda x, decimals=None: round(x.item(), decimals),
    "__divmod__": lambda x, other: (x // other, x % other),
    "__rdivmod__": lambda x, other: (other // x, other % x),
    "argsort": lambda x, axis=-1: _names_of(x).argsort(x, axis=axis),
}
