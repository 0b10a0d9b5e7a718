"""Compute elementwise functions part by part, after aligning the operands.

Operands that are already placed alike need no alignment.

Integers and booleans are converted to the default float dtype if the function has no integer result. A Python number
takes the array's dtype. A NumPy number promotes as an array without dims does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_of
from meshwise.arrays.align import aligned
from meshwise.arrays.array import Array, cast, like
from meshwise.arrays.dtypes import (
    BOOL,
    COMPLEXES,
    FLOATS,
    INTEGERS,
    UNSIGNED,
    WHOLE,
    WIDE,
    compared,
    of_scalar,
    promoted,
    real_of,
)
from meshwise.arrays.unsigned import of_wide

Op = Callable[..., Tensor]
Rule = Callable[..., Array]
FUNCTIONS: dict[str, Rule] = {}
"""The array functions that are defined in this file, by name."""
BINARY: list[str] = []
"""The names of the functions that take two arrays."""

ANY = WHOLE | FLOATS
NUMBERS = INTEGERS | FLOATS
REALS = FLOATS - COMPLEXES
ORDERED = WHOLE | REALS
PYTHON = (bool, int, float, complex)
NUMERIC = (int, float, complex)
HOST = torch.device("cpu")


class NoArrayGiven(TypeError):
    """Raised if an array function gets no `Array`, or gets a list, a tensor or another type."""


def is_python_number(value: Any) -> bool:
    """Return whether a value is a Python number, which takes the dtype of an array, unlike a NumPy scalar."""
    return type(value) in PYTHON


def unary(name: str, op: Op, takes: frozenset[torch.dtype], result: torch.dtype | None = None) -> Rule:
    """Make a function of one array from the torch function `op`."""

    wide = of_wide(name, op)

    def rule(x: Any, /) -> Array:
        if type(x) is not Array:
            raise NoArrayGiven(f"{name} needs an array, not {type(x).__name__}. Write xp.asarray(value) first.")
        dtype, parts = x.dtype, x.parts
        if dtype not in takes:
            dtype = _lifted(name, dtype, takes, x.space.default_float)
            parts = tuple([part.to(dtype) for part in parts])
        run = wide if dtype in WIDE else op
        found = Array(tuple([run(part) for part in parts]), x.sharding, x.shape, result or dtype, x.space)
        return found if x.alias is None or x.alias.strides is None else in_order_of(found, (x,))

    return _named(name, rule)


def binary(
    name: str,
    op: Op,
    takes: frozenset[torch.dtype],
    result: torch.dtype | None = None,
    *,
    numbers: bool = True,
    otherwise: tuple[frozenset[torch.dtype], Op] | None = None,
) -> Rule:
    """Make a function of two arrays, or of an array and a number, from the torch function `op`."""
    at_once = (takes - otherwise[0] if otherwise else takes) - WIDE.keys()
    wide = of_wide(name, otherwise[1] if otherwise and otherwise[0] & INTEGERS else op)

    def choose(dtype: torch.dtype) -> Op:
        if dtype in WIDE:
            return wide
        return op if otherwise is None or dtype not in otherwise[0] else otherwise[1]

    def rule(x1: Any, x2: Any, /) -> Array:
        if type(x1) is Array:
            if type(x2) is Array:
                placed, dtype = x1.sharding, x1.dtype
                if placed is x2.sharding and x1.shape == x2.shape and x1.space is x2.space:
                    if dtype is not x2.dtype:
                        dtype = _together(dtype, x2.dtype)  # type: ignore[assignment]
                    if dtype in at_once:
                        parts = tuple([op(a, b) for a, b in zip(x1.parts, x2.parts)])  # noqa: B905 equal by sharding
                        found = Array(parts, placed, x1.shape, result or dtype, x1.space)
                        return found if x1.alias is None or x1.alias.strides is None else in_order_of(found, (x1, x2))
            elif numbers and type(x2) in NUMERIC:
                dtype = x1.dtype
                if result is BOOL:
                    x2 = compared(x2, dtype)
                if dtype in at_once and of_scalar(x2, dtype, x1.space.default_float) is dtype:
                    parts = tuple([op(part, x2) for part in x1.parts])
                    found = Array(parts, x1.sharding, x1.shape, result or dtype, x1.space)
                    return found if x1.alias is None or x1.alias.strides is None else in_order_of(found, (x1,))
        elif type(x2) is Array and type(x1) in NUMERIC:
            dtype = x2.dtype
            if result is BOOL:
                x1 = compared(x1, dtype)
            if dtype in at_once and of_scalar(x1, dtype, x2.space.default_float) is dtype:
                number = torch.scalar_tensor(x1, dtype=dtype, device=HOST)
                parts = tuple([op(number, part) for part in x2.parts])
                found = Array(parts, x2.sharding, x2.shape, result or dtype, x2.space)
                return found if x2.alias is None or x2.alias.strides is None else in_order_of(found, (x2,))
        return _in_general(name, choose, takes, result, (x1, x2))

    BINARY.append(name)
    rule.op, rule.takes, rule.numbers = op, at_once, numbers and result is None  # type: ignore[attr-defined]
    return _named(name, rule)


_TOGETHER: dict[tuple[torch.dtype, torch.dtype], torch.dtype | None] = {}


def _together(one: torch.dtype, other: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which NumPy promotes two dtypes, or None if torch promotes them to another dtype."""
    try:
        return _TOGETHER[one, other]
    except KeyError:
        dtype = promoted(one, other)
        try:
            found = dtype if torch.promote_types(one, other) is dtype else None
        except RuntimeError:  # torch does not promote uint16, uint32 or uint64
            found = None
        return _TOGETHER.setdefault((one, other), found)


def _in_general(
    name: str,
    choose: Callable[[torch.dtype], Op],
    takes: frozenset[torch.dtype],
    result: torch.dtype | None,
    given: tuple[Any, ...],
) -> Array:
    """Compute an elementwise function of arrays and numbers, at least one of which is an array."""
    arrays = operands(name, given)
    real = [x for x in arrays if isinstance(x, Array)]
    space = real[0].space
    dtype = real[0].dtype
    for x in real[1:]:
        dtype = promoted(dtype, x.dtype)
    if result is BOOL:
        arrays = [compared(x, dtype) for x in arrays]
    for x in arrays:
        if not isinstance(x, Array):
            dtype = of_scalar(x, dtype, space.default_float)
    dtype = _lifted(name, dtype, takes, space.default_float)
    shape, placed, parts = aligned(name, real)
    cast = [own if x.dtype is dtype else [part.to(dtype) for part in own] for x, own in zip(real, parts, strict=True)]
    here, count = iter(cast), len(parts[0])
    every = [
        next(here) if type(x) is Array else (torch.scalar_tensor(x, dtype=dtype, device=HOST),) * count for x in arrays
    ]
    made = tuple(map(choose(dtype), *every))
    return in_order_of(Array(made, placed, shape, result or dtype, space), real)


def operands(name: str, given: tuple[Any, ...]) -> list[Any]:
    """Return arrays and Python numbers unchanged. Raises NoArrayGiven for any other type, or if there is no array."""
    some = False
    for value in given:
        if type(value) is Array:
            some = True
        elif type(value) not in PYTHON:
            raise NoArrayGiven(f"{name} needs an array, not {type(value).__name__}. Write xp.asarray(value) first.")
    if not some:
        raise NoArrayGiven(f"{name} needs at least one array, not only Python numbers. Write xp.asarray(value).")
    return list(given)


def _lifted(name: str, dtype: torch.dtype, takes: frozenset[torch.dtype], default_float: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute.
    Raises TypeError if the function does not support `dtype`."""
    if dtype in takes:
        return dtype
    if dtype in WHOLE and not takes & INTEGERS and torch.float64 in takes:
        return default_float
    raise TypeError(f"{name} does not support {str(dtype).removeprefix('torch.')}. Cast the array: xp.astype.")


def _named(name: str, rule: Rule) -> Rule:
    rule.__name__ = rule.__qualname__ = name
    FUNCTIONS[name] = rule
    return rule


def _rounding(op: Op) -> Op:
    return lambda part: op(part) if part.is_floating_point() else part.clone()


def _round(part: Tensor) -> Tensor:
    return torch.complex(part.real.round(), part.imag.round()) if part.is_complex() else _rounding(torch.round)(part)


def _sign(part: Tensor) -> Tensor:
    if part.is_complex():
        return torch.sgn(part)
    signs = torch.sign(part)
    return torch.where(part.isnan(), part, signs) if part.is_floating_point() else signs


def _by_parts(op: Op) -> Op:
    """Make torch.add or torch.sub work on real and imaginary parts separately, so that inf does not become nan."""

    def of_parts(a: Tensor, b: Tensor) -> Tensor:
        if a.dim() and b.dim():
            return torch.view_as_complex(op(torch.view_as_real(a), torch.view_as_real(b)))
        # view_as_real adds a dim, but a tensor on the host must be 0-d to work with tensors on other devices.
        return torch.complex(op(a.real, b.real), op(a.imag, b.imag))

    return of_parts


def _also_infinite(op: Op, other: Op) -> Op:
    """Return a function that applies `other` to complex numbers with inf or nan, and `op` to all other numbers."""

    def of_part(part: Tensor) -> Tensor:
        return torch.where(torch.isfinite(part), op(part), other(part)) if part.is_complex() else op(part)

    return of_part


def by_no_zero(op: Op) -> Op:
    """Make integer division by zero give 0, as in NumPy. torch raises on a CPU, and gives arbitrary values on a GPU."""
    return lambda a, b: op(a, b + (b == 0)) * (b != 0)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """Return the remainder with the sign of the divisor, even if the remainder is zero."""
    if not a.is_floating_point():
        return by_no_zero(torch.remainder)(a, b)
    rest = torch.remainder(a, b)
    return torch.where(rest == 0, torch.copysign(rest, b), rest)


def _power(a: Tensor, b: Tensor) -> Tensor:
    """Return `a ** b` of complex numbers. `a ** 0` is 1 for every `a`, even for 0, for which torch gives nan."""
    return torch.where(b == 0, torch.ones((), dtype=a.dtype), torch.pow(a, b)) if b.dim() else torch.pow(a, b)


def _absolute(x: Any, /) -> Array:
    """Return absolute values. They have the dtype of `x`, or if `x` is complex, the dtype of its real parts."""
    if type(x) is not Array:
        raise NoArrayGiven(f"abs needs an array, not {type(x).__name__}. Write xp.asarray(value) first.")
    parts = [part.clone() if part.dtype in (BOOL, *UNSIGNED) else torch.abs(part) for part in x.parts]
    return in_order_of(like(x, parts, real_of(x.dtype)), (x,))


for _name, _op in {
    **{name: getattr(torch, name) for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh")},
    **{name: getattr(torch, name) for name in ("exp", "log", "log10", "log2")},
    **{name: getattr(torch, name) for name in ("sin", "sinh", "sqrt", "tan", "tanh")},
}.items():
    unary(_name, _op, FLOATS)
unary("expm1", _also_infinite(torch.expm1, lambda part: torch.exp(part) - 1), FLOATS)
unary("log1p", _also_infinite(torch.log1p, torch.log), FLOATS)
for _name in ("ceil", "floor", "trunc"):
    unary(_name, _rounding(getattr(torch, _name)), INTEGERS | REALS)
unary("reciprocal", lambda part: 1 / part if part.dtype in FLOATS else part * (abs(part) == 1), NUMBERS)
unary("round", _round, NUMBERS)
unary("sign", _sign, NUMBERS)
unary("square", torch.square, NUMBERS)
unary("negative", torch.neg, NUMBERS)
unary("positive", torch.clone, NUMBERS)
unary("conj", lambda part: torch.conj_physical(part) if part.is_complex() else part.clone(), NUMBERS)
unary("bitwise_invert", torch.bitwise_not, WHOLE)
unary("logical_not", torch.logical_not, ANY, BOOL)
unary("isfinite", torch.isfinite, ANY, BOOL)
unary("isinf", torch.isinf, ANY, BOOL)
unary("isnan", torch.isnan, ANY, BOOL)
unary("signbit", torch.signbit, ORDERED, BOOL)
_named("abs", _absolute)

binary("add", torch.add, ANY, otherwise=(COMPLEXES, _by_parts(torch.add)))
binary("subtract", torch.sub, NUMBERS, otherwise=(COMPLEXES, _by_parts(torch.sub)))
binary("multiply", torch.mul, ANY)
binary("divide", torch.div, FLOATS)
binary("floor_divide", torch.floor_divide, INTEGERS | REALS, otherwise=(INTEGERS, by_no_zero(torch.floor_divide)))
binary("remainder", torch.remainder, INTEGERS | REALS, otherwise=(INTEGERS | REALS, _remainder))
binary("pow", torch.pow, NUMBERS, otherwise=(COMPLEXES, _power))
for _name in ("atan2", "hypot", "logaddexp", "copysign", "nextafter"):
    binary(_name, getattr(torch, _name), REALS, numbers=False)
for _name in ("maximum", "minimum"):
    binary(_name, getattr(torch, _name), ORDERED, numbers=False)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    binary(_name, getattr(torch, _name), WHOLE)
binary("bitwise_left_shift", torch.bitwise_left_shift, INTEGERS)
binary("bitwise_right_shift", torch.bitwise_right_shift, INTEGERS)
for _name in ("logical_and", "logical_or", "logical_xor"):
    binary(_name, getattr(torch, _name), ANY, BOOL, numbers=False)
for _name, _op in {"equal": torch.eq, "not_equal": torch.ne}.items():
    binary(_name, _op, ANY, BOOL)
for _name, _op in {
    "less": torch.lt,
    "less_equal": torch.le,
    "greater": torch.gt,
    "greater_equal": torch.ge,
}.items():
    binary(_name, _op, ORDERED, BOOL)


def clip(x: Array, /, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> Array:
    """Clip the elements of `x` to the range from `min` to `max`, which are numbers, arrays that broadcast, or None."""
    (given, *_) = operands("clip", (x,))
    x = given
    min, max = a_min if min is None else min, a_max if max is None else max
    for bound, choose in ((min, "maximum"), (max, "minimum")):
        beyond = type(bound) is int and compared(bound, x.dtype) == (-inf if choose == "maximum" else inf)
        if bound is not None and not beyond:
            x = cast(FUNCTIONS[choose](x, bound), x.dtype)
    return x if x is not given else FUNCTIONS["positive"](x)


FUNCTIONS["clip"] = clip
