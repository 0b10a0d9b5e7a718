"""Cast arrays, and describe dtypes and the namespace.

`xp.__array_namespace_info__()` returns the description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwise.arrays.array import Array
from meshwise.arrays.creation import asarray
from meshwise.arrays.dtypes import (
    COMPLEX,
    COMPLEXES,
    KINDS,
    NAMES,
    REAL,
    SIGNED,
    UNSIGNED,
    as_dtype,
    complex_of,
    real_of,
)
from meshwise.arrays.reductions import as_array
from meshwise.arrays.rules import by_name
from meshwise.arrays.space import ALL, Space


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """Cast `x` to another data type."""
    x = as_array("astype", x)
    kind = as_dtype(dtype)
    if x.dtype in COMPLEXES and kind not in COMPLEXES and kind is not torch.bool:
        raise TypeError(f"astype from {x.dtype} to {kind} would lose the imaginary part. Cast xp.real(x) instead.")
    return asarray(x.space, x, kind, device=device, copy=copy or None)


@dataclass(frozen=True)
class FloatLimits:
    """The limits of a floating-point dtype, as `xp.finfo` returns them."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: torch.dtype

    @property
    def tiny(self) -> float:
        return self.smallest_normal


@dataclass(frozen=True)
class IntegerLimits:
    """The limits of an integer dtype, as `xp.iinfo` returns them."""

    bits: int
    max: int
    min: int
    dtype: torch.dtype


def finfo(type: Any, /) -> FloatLimits:
    """Return the limits of a floating-point dtype."""
    kind = real_of(type.dtype if isinstance(type, Array) else as_dtype(type))
    if not kind.is_floating_point:
        raise TypeError(f"finfo takes a float dtype, not {kind}. For integers write xp.iinfo.")
    found = torch.finfo(kind)
    return FloatLimits(found.bits, found.eps, found.max, found.min, found.smallest_normal, kind)


def iinfo(type: Any, /) -> IntegerLimits:
    """Return the limits of an integer dtype."""
    kind = type.dtype if isinstance(type, Array) else as_dtype(type)
    if kind not in KINDS["integral"]:
        raise TypeError(f"iinfo takes an integer dtype, not {kind}. For floats write xp.finfo.")
    found = torch.iinfo(kind)
    return IntegerLimits(found.bits, found.max, found.min, kind)


class Info:
    """The devices, data types and capabilities of a namespace, as `xp.__array_namespace_info__()` returns them."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def capabilities(self) -> dict[str, Any]:
        """Return the supported features of the array API standard."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Return the name of the device on which new arrays are placed."""
        return ALL if len(self._space.names) > 1 else self._space.names[0]

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices. If there are several, `all` is added at the end."""
        return (*self._space.names, *([ALL] if len(self._space.names) > 1 else []))

    def default_dtypes(self, *, device: Any = None) -> dict[str, torch.dtype]:
        """Return the default data type of each kind, such as the type that Python's floats get."""
        real = self._space.default_float
        whole = torch.int64
        return {
            "real floating": real,
            "complex floating": complex_of(real),
            "integral": whole,
            "indexing": whole,
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, torch.dtype]:
        """Return the data types of one kind or of several kinds, as a dict from name to dtype."""
        listed = {torch.bool, *SIGNED, UNSIGNED[0], *REAL, *COMPLEX}
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for each in kinds:
            if each is not None and each not in KINDS:
                raise ValueError(f"dtypes(kind={each!r}): this kind is not known. Use one of {', '.join(KINDS)}.")
        wanted = set().union(*(KINDS[each] if each is not None else listed for each in kinds))
        return {name: dtype for name, dtype in NAMES.items() if dtype in listed & wanted}


FUNCTIONS = by_name(astype, finfo, iinfo)
