"""Define data types, their promotion and their casts.

Two types of the same kind promote as in the array API standard. Two types of different kinds, such as integers and
floats, promote as in NumPy. A Python number takes the type of the array. Unlike in torch, arrays without dims promote
as other arrays do.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.spec.errors import UsageError

BOOL = torch.bool
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
REAL = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
EVERY = (BOOL, *SIGNED, *UNSIGNED, *REAL, *COMPLEX)
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (*EVERY, torch.float16, torch.bfloat16)}
INTEGERS = frozenset((*SIGNED, *UNSIGNED))
FLOATS = frozenset((*REAL, *COMPLEX, torch.float16, torch.bfloat16))
COMPLEXES = frozenset(COMPLEX)
WHOLE = INTEGERS | {BOOL}
KINDS = {
    "bool": (BOOL,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": (*SIGNED, *UNSIGNED),
    "real floating": (*REAL, torch.float16, torch.bfloat16),
    "complex floating": COMPLEX,
    "numeric": (*SIGNED, *UNSIGNED, *REAL, torch.float16, torch.bfloat16, *COMPLEX),
}
WIDE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Unsigned type, for which torch has few kernels -> the signed type in which values are computed instead."""
_COMPARABLE = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64}
_PYTHON = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_dtype(given: Any) -> torch.dtype:
    """Convert a torch or NumPy dtype, a Python type or a name to a torch dtype. Raises TypeError for anything else."""
    if isinstance(given, torch.dtype):
        return given
    try:
        return _as_dtype(given)
    except (TypeError, KeyError) as error:
        known = ", ".join(NAMES)
        raise TypeError(f"dtype {given!r} is not supported for arrays. Use one of {known}.") from error


@functools.lru_cache(maxsize=256)
def _as_dtype(given: Any) -> torch.dtype:
    if given in _PYTHON:
        return _PYTHON[given]
    if isinstance(given, str) and given in NAMES:
        return NAMES[given]
    return NAMES[np.dtype(given).name]


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype of the same name. Raises TypeError if NumPy has none, as for bfloat16."""
    return np.dtype(str(dtype).removeprefix("torch."))


@functools.cache
def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the type of a result of arrays of these two types."""
    if one is other:
        return one
    try:
        return NAMES[np.promote_types(numpy_dtype(one), numpy_dtype(other)).name]
    except TypeError:
        return torch.promote_types(one, other)


def comparable(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast values to `dtype`, or to a dtype with the same order if torch cannot compare `dtype`."""
    values = values.to(dtype)
    if dtype is torch.uint64:
        return values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return values.to(_COMPARABLE.get(dtype, dtype))


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """Return the complex type for a real type: complex64 for float32, otherwise complex128."""
    return torch.complex64 if dtype is torch.float32 else torch.complex128


def real_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the real part of a complex type. Any other type is returned unchanged."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def of_scalar(value: bool | int | float | complex, dtype: torch.dtype, default_float: torch.dtype) -> torch.dtype:
    """Return the type of a result of an array of `dtype` and a Python number."""
    if isinstance(value, bool):
        return dtype
    if isinstance(value, int):
        if dtype is BOOL:
            return torch.int64
        if dtype in INTEGERS:
            bounds = limits(dtype)
            if not bounds[0] <= value <= bounds[1]:
                raise OverflowError(f"{value} does not fit {dtype} ({bounds[0]} to {bounds[1]}). Cast the array first.")
        return dtype
    real = default_float if dtype in WHOLE else dtype
    return complex_of(real) if isinstance(value, complex) and real not in COMPLEXES else real


@functools.cache
def limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest integer of an integer type."""
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def compared(x: Any, dtype: torch.dtype) -> Any:
    """Replace an integer outside the range of `dtype` with inf or -inf."""
    if type(x) is not int or dtype not in INTEGERS or limits(dtype)[0] <= x <= limits(dtype)[1]:
        return x
    return math.copysign(math.inf, x)


def result_type(*given: Any) -> torch.dtype:
    """Return the type to which these arrays, dtypes and Python numbers promote."""
    found: torch.dtype | None = None
    default = torch.float64
    numbers = []
    for each in given:
        if isinstance(each, bool | int | float | complex) and not isinstance(each, np.generic):
            numbers.append(each)
            continue
        if isinstance(each, Array):
            default = each.space.default_float
        own = each.dtype if hasattr(each, "dtype") else each
        found = as_dtype(own) if found is None else promoted(found, as_dtype(own))
    if found is None:
        raise ValueError("result_type needs at least one array or dtype, not Python numbers alone.")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            found = of_scalar(number, found, default)
        elif found is BOOL:
            found = torch.int64
    return found


def can_cast(given: Any, to: Any, /) -> bool:
    """Return whether the rules of promotion allow a cast to the dtype `to`."""
    dtype = given.dtype if isinstance(given, Array) else as_dtype(given)
    return promoted(dtype, as_dtype(to)) is as_dtype(to)


def isdtype(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype equals `kind` or belongs to that kind."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, each) for each in kind)
    if isinstance(kind, str) and kind in KINDS:
        return as_dtype(dtype) in KINDS[kind]
    if isinstance(kind, str) and kind not in NAMES:
        raise ValueError(f"isdtype: kind {kind!r} is not known. Use one of {', '.join(KINDS)}.")
    return as_dtype(dtype) is as_dtype(kind)


def refuse_gradients(what: str, requires_grad: bool) -> None:
    """Raise UsageError if a tensor requires grad, since arrays have no gradients."""
    if requires_grad:
        raise UsageError(f"{what}: this tensor requires grad, but arrays have no gradients. Pass tensor.detach().")
