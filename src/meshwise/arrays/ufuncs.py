"""Add NumPy's elementwise functions, and ufunc methods such as `reduce`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_of
from meshwise.arrays.array import Array, mapped
from meshwise.arrays.complex_parts import imag, real
from meshwise.arrays.dtypes import INTEGERS
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.elementwise import REALS, binary, by_no_zero
from meshwise.arrays.reductions import as_array
from meshwise.arrays.rules import Table
from meshwise.spec.errors import UsageError

REDUCED = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "logical_and": "all",
    "logical_or": "any",
}
METHODS = {
    "reduce": (REDUCED, "Loop over the entries of the axis: xp.unstack(x)."),
    "accumulate": (
        {"add": "cumulative_sum", "multiply": "cumulative_prod"},
        "Loop over the entries of the axis: xp.unstack(x).",
    ),
    "at": ({}, "Write x[i] = f(x[i], v) if all indices differ, or x += xp.bincount(i, weights=v, minlength=len(x))."),
    "reduceat": ({}, "Write xp.cumsum(x), and subtract its values at the borders."),
}
"""For each ufunc method, such as `xp.add.reduce`: the functions that compute it, and what to write if there is none."""


def _of_floats(name: str, op: Callable[..., Any]) -> Callable[..., Array]:
    def rule(x: Any, /) -> Array:
        x = as_array(name, x)
        if x.dtype.is_complex:
            raise TypeError(f"{name} is not defined for complex numbers. Pass real numbers: xp.abs(x) or xp.real(x).")
        x = x if x.dtype.is_floating_point else x.astype(x.space.default_float)
        return in_order_of(mapped(x, op), [x])

    rule.__name__ = name
    return rule


def _cube_root(part: Tensor) -> Tensor:
    """Return the cube root, computed as a power and one Newton step, which makes the roots of cubes exact."""
    root = torch.copysign(part.abs().pow(1 / 3), part)
    step = (root * root * root - part) / (3 * root * root)
    return torch.where(step.isfinite(), root - step, root)


def angle(x: Any, /, deg: bool = False) -> Any:
    """Return the angle of complex numbers, from -pi to pi."""
    x = as_array("angle", x)
    found = ELEMENTWISE["atan2"](imag(x), real(x))
    return found * (180 / math.pi) if deg else found


def quotient_and_rest(x1: Any, x2: Any, /) -> tuple[Array, Array]:
    """Return `(x1 // x2, x1 % x2)`."""
    return ELEMENTWISE["floor_divide"](x1, x2), ELEMENTWISE["remainder"](x1, x2)


SMALLER = INTEGERS - {torch.uint64}
binary("fmod", torch.fmod, SMALLER | REALS, otherwise=(SMALLER, by_no_zero(torch.fmod)))
binary("gcd", torch.gcd, SMALLER, numbers=False)
binary("lcm", torch.lcm, SMALLER, numbers=False)
_FLOAT_OPS: Table = {"fabs": torch.abs, "rint": torch.round, "exp2": torch.exp2}
_FLOAT_OPS |= {"sinc": torch.sinc, "cbrt": _cube_root, "deg2rad": torch.deg2rad, "radians": torch.deg2rad}
_FLOAT_OPS |= {"rad2deg": torch.rad2deg, "degrees": torch.rad2deg}
FUNCTIONS: Table = {name: _of_floats(name, op) for name, op in _FLOAT_OPS.items()}
FUNCTIONS |= {"angle": angle, "divmod": quotient_and_rest}


def _outer(x1: Array, x2: Any, name: str) -> Any:
    xp = x1.__array_namespace__()
    x2 = xp.asarray(x2)
    return getattr(xp, name)(xp.reshape(x1, (*x1.shape, *(1,) * x2.ndim)), x2)


def as_ufunc(xp: Any, name: str, call: Any) -> None:
    """Add the methods of NumPy's ufuncs to a function of two arrays."""
    call.outer = lambda x1, x2: _outer(xp.asarray(x1), x2, name)
    for method, (names, instead) in METHODS.items():
        rule = getattr(xp, names[name]) if name in names else None
        setattr(call, method, _refused(f"{name}.{method}", instead) if rule is None else _along(rule))


def _along(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis=0, **how: rule(x, axis=axis, **how)


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(f"{name} is not supported for arrays on many devices. {instead}")

    return refuse
