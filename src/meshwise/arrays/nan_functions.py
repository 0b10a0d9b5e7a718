"""Reduce arrays, ignoring NaN: `xp.nansum`, `xp.nanmean`.

Each device ignores NaN in its part; the reductions that these functions call move their usual data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshwise.arrays.array import Array
from meshwise.arrays.casting import astype
from meshwise.arrays.dtypes import FLOATS, real_of
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.reductions import FUNCTIONS as REDUCTIONS
from meshwise.arrays.reductions import as_array, total
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.statistics import as_floats


def _without(x: Array, value: float) -> Array:
    if x.dtype not in FLOATS:
        return x
    filled: Array = x.__array_namespace__().where(ELEMENTWISE["isnan"](x), value, x)
    return filled


def _count(x: Array, axis: Any, keepdims: bool) -> Array:
    numbers = ELEMENTWISE["logical_not"](ELEMENTWISE["isnan"](x))
    return astype(total(numbers, axis=axis, keepdims=keepdims), real_of(x.dtype))


def _filled(name: str, value: float) -> Callable[..., Any]:
    def rule(x: Any, /, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        return REDUCTIONS[name](_without(as_array(f"nan{name}", x), value), axis=axis, dtype=dtype, keepdims=keepdims)

    return named(rule, f"nan{name}", f"Compute `{name}` and ignore nan.")


def _extreme(name: str, value: float) -> Callable[..., Any]:
    def rule(x: Any, /, axis: Any = None, keepdims: bool = False) -> Any:
        x = as_array(f"nan{name}", x)
        found = REDUCTIONS[name](_without(x, value), axis=axis, keepdims=keepdims)
        if x.dtype not in FLOATS:
            return found
        none = REDUCTIONS["all"](ELEMENTWISE["isnan"](x), axis=axis, keepdims=keepdims)
        return ELEMENTWISE["positive"](x.__array_namespace__().where(none, math.nan, found))

    return named(rule, f"nan{name}", f"Compute `{name}` and ignore nan. The result is nan if all elements are.")


def nanmean(x: Any, /, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """Return the mean of the elements that are not NaN. The result is NaN if there are no such elements."""
    x = as_floats("nanmean", x if dtype is None else as_array("nanmean", x).astype(dtype))
    return total(_without(x, 0.0), axis=axis, keepdims=keepdims) / _count(x, axis, keepdims)


def nanvar(x: Any, /, axis: Any = None, *, ddof: float = 0.0, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Return the variance of the elements that are not NaN."""
    x = as_floats("nanvar", x)
    apart = ELEMENTWISE["abs"](_without(x - nanmean(x, axis, keepdims=True), 0.0))
    over = _count(x, axis, keepdims) - (ddof or correction)
    spread = total(apart * apart, axis=axis, keepdims=keepdims) / over
    return ELEMENTWISE["positive"](x.__array_namespace__().where(ELEMENTWISE["greater"](over, 0), spread, math.nan))


def nanstd(x: Any, /, axis: Any = None, *, ddof: float = 0.0, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Return the standard deviation of the elements that are not NaN, the square root of `nanvar`."""
    return ELEMENTWISE["sqrt"](nanvar(x, axis, ddof=ddof, correction=correction, keepdims=keepdims))


def _scanned(name: str, value: float) -> Callable[..., Any]:
    def rule(x: Any, /, axis: int | None = None, dtype: Any = None) -> Any:
        filled = _without(as_array(f"nan{name}", x), value)
        return getattr(filled, name)(axis, dtype)

    return named(rule, f"nan{name}", f"Compute `{name}` and count nan as {value:g}.")


FUNCTIONS = by_name(
    *(_filled("sum", 0.0), _filled("prod", 1.0), _extreme("max", -math.inf), _extreme("min", math.inf)),
    *(nanmean, nanvar, nanstd, _scanned("cumsum", 0.0), _scanned("cumprod", 1.0)),
)
