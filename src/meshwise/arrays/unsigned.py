"""Compute in uint16, uint32 and uint64 with signed integers.

torch stores these types, but has almost no kernels for them.

uint16 and uint32 are computed in a signed type of twice their width, and the result is cut to their width. For uint64
there is no wider type. Its sums and products have the same bits as those of int64. It is compared as int64 with the
highest bit flipped. Other operations are implemented in this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwise.arrays.dtypes import WIDE, comparable

Op = Callable[..., Tensor]
LOWEST = torch.iinfo(torch.int64).min


def of_wide(name: str, op: Op) -> Op:
    """Wrap `op`, a function of one or two tensors, to support uint16, uint32 and uint64."""
    of_64 = _by_order(op) if name in _ORDERS else _OF_64.get(name, op)

    def run(*given: Tensor) -> Tensor:
        dtype = given[0].dtype
        if dtype is not torch.uint64:
            found = op(*(each.to(WIDE[dtype]) for each in given))
            return found if found.dtype is torch.bool else found.to(dtype)
        found = of_64(*(each.view(torch.int64) for each in given))
        return found if found.dtype is torch.bool else found.view(dtype)

    return run


def extreme(op: Op) -> Op:
    """Wrap torch.amax or torch.amin to support uint16, uint32 and uint64, too."""

    def run(part: Tensor, dims: tuple[int, ...]) -> Tensor:
        if part.dtype not in WIDE:
            return op(part, dims)
        found = op(comparable(part, part.dtype), dims)
        return (found ^ LOWEST).view(part.dtype) if part.dtype is torch.uint64 else found.to(part.dtype)

    return run


def _by_order(op: Op) -> Op:
    """Wrap a comparison, maximum or minimum to work on uint64 numbers that are passed as int64 with the same bits."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        found = op(a ^ LOWEST, b ^ LOWEST)
        return found if found.dtype is torch.bool else found ^ LOWEST

    return run


def _shifted(a: Tensor, by: Tensor | int) -> Tensor:
    """Shift the bits to the right, with zeros coming in from the left."""
    kept = (a >> by) & ~((LOWEST >> by) << 1)
    return kept * ((by >= 0) & (by < 64)) if isinstance(by, Tensor) else kept


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """Divide uint64 numbers that are stored as int64 with the same bits."""
    small = b.clamp(min=1)
    near = torch.div(_shifted(a, 1), small, rounding_mode="trunc") << 1
    near = near + ((a - near * small) ^ LOWEST).ge(small ^ LOWEST)
    return (near * (b > 0)) + (b < 0) * (a ^ LOWEST).ge(b ^ LOWEST)


def _power(a: Tensor, b: Tensor) -> Tensor:
    """Return powers, modulo 2**64, of uint64 numbers that are stored as int64 with the same bits."""
    return torch.pow(a, torch.where(b < 0, (b & (2**62 - 1)) + 2**62, b))


_ORDERS = ("less", "less_equal", "greater", "greater_equal", "maximum", "minimum")
_OF_64: dict[str, Op] = {
    "abs": torch.clone,
    "sign": lambda a: (a != 0).to(a.dtype),
    "reciprocal": lambda a: (a == 1).to(a.dtype),
    "signbit": lambda a: torch.zeros_like(a, dtype=torch.bool),
    "bitwise_right_shift": _shifted,
    "floor_divide": _divided,
    "remainder": lambda a, b: (a - _divided(a, b) * b) * (b != 0),
    "pow": _power,
}
"""Functions that compute with uint64 numbers, whose bits are passed and returned as int64."""
