"""Compute in uint16, uint32 and uint64 by signed integers.

torch stores these types, but has almost no kernels for them.

The narrower two fit into a signed type of twice their width, which is cut to their bits afterwards. For uint64 there is
none: sums and products have the same bits as signed, comparisons hold with the highest bit flipped, the rest is here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwise.arrays.dtypes import WIDE, comparable

Op = Callable[..., Tensor]
LOWEST = torch.iinfo(torch.int64).min


def of_wide(name: str, op: Op) -> Op:
    """Wrap `op` for one or two tensors of a wide unsigned type. The result has that type, or is boolean."""
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
    """Wrap torch's amax or amin to support wide unsigned integers, too."""

    def run(part: Tensor, dims: tuple[int, ...]) -> Tensor:
        if part.dtype not in WIDE:
            return op(part, dims)
        found = op(comparable(part, part.dtype), dims)
        return (found ^ LOWEST).view(part.dtype) if part.dtype is torch.uint64 else found.to(part.dtype)

    return run


def _by_order(op: Op) -> Op:
    """Wrap `op` to work in unsigned order: a comparison gives booleans, a choice gives one of the two operands."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        found = op(a ^ LOWEST, b ^ LOWEST)
        return found if found.dtype is torch.bool else found ^ LOWEST

    return run


def _shifted(a: Tensor, by: Tensor | int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    kept = (a >> by) & ~((LOWEST >> by) << 1)
    return kept * ((by >= 0) & (by < 64)) if isinstance(by, Tensor) else kept


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """Divide unsigned integers; division by zero gives 0. Half the dividend fits a signed integer: twice
    the quotient of that half is too small by at most one. A divisor above half the range goes in once or never."""
    small = b.clamp(min=1)
    near = torch.div(_shifted(a, 1), small, rounding_mode="trunc") << 1
    near = near + ((a - near * small) ^ LOWEST).ge(small ^ LOWEST)
    return (near * (b > 0)) + (b < 0) * (a ^ LOWEST).ge(b ^ LOWEST)


def _power(a: Tensor, b: Tensor) -> Tensor:
    """Return powers in 64 bits. An odd number to the power of 2**62 is 1, an even one to a power above 63 is 0."""
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
"""Operations on the bits of uint64, held in int64, that return the bits of the result."""
