"""View the real and imaginary parts of complex arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import strides_of, viewed
from meshwise.arrays.array import Alias, Array, ViewedMemory, mapped
from meshwise.arrays.dtypes import real_of
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.reductions import as_array
from meshwise.arrays.rules import Table, by_name
from meshwise.arrays.strides import named, of


def real(x: Any, /) -> Array:
    """Return a view of the real parts. If `x` is real, return `x` itself."""
    x = as_array("real", x)
    return _part(x, torch.real) if x.dtype.is_complex else x


def imag(x: Any, /) -> Array:
    """Return a view of the imaginary parts. If `x` is real, return read-only zeros."""
    x = as_array("imag", x)
    if x.dtype.is_complex:
        return _part(x, torch.imag)
    found = mapped(x, torch.zeros_like)
    found.alias = Alias(ViewedMemory(), read_only=True)
    return found


def _part(x: Array, part_of: Callable[[Tensor], Tensor]) -> Array:
    strides = named(x.shape, tuple(2 * stride for stride in of(x.shape, strides_of(x))))
    return viewed(x, lambda x: mapped(x, part_of, real_of(x.dtype)), strides)


def conjugated(x: Array, /) -> Array:
    """Return the complex conjugates. If `x` is real, return `x` itself."""
    return ELEMENTWISE["conj"](x) if x.dtype.is_complex else x


FUNCTIONS = PROPERTIES = by_name(real, imag)
METHODS: Table = {"conj": conjugated, "conjugate": conjugated}
