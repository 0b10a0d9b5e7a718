"""Decide how large a difference is a fault, relative to what."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LIMIT = 1e-9
FLOOR = 1e-3  # of the largest value of a kind: what is smaller is measured by it


def ratio(difference: Tensor, scale: Tensor) -> float:
    """Return the largest element of `difference / scale`. Return 0 if nothing differs."""
    if not difference.numel() or not bool((difference != 0).any()):
        return 0.0
    return finite(float((difference / scale).max()))


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite absolute value in the floating-point tensors. Return 0 if there is none."""
    sizes = (t.abs().masked_fill(~t.isfinite(), 0.0) for t in tensors if t.is_floating_point())
    return max((float(size.max()) for size in sizes if size.numel()), default=0.0)


def apart(mine: Tensor, other: Tensor) -> Tensor:
    """Return `mine - other` by element, with 0 where both are the same infinity or both are NaN."""
    alike = (mine == other) | (mine.isnan() & other.isnan())
    return (mine - other).masked_fill(alike, 0.0)


def finite(value: float) -> float:
    """Return the value, or infinity if it is NaN."""
    return math.inf if math.isnan(value) else value


def precision_of(tensor: Tensor) -> str:
    """Return the lowest precision that holds every value of a float64 tensor exactly. Return an empty string if there
    is none, or if all values are 0."""
    if not tensor.is_floating_point() or not bool((tensor != 0).any()):
        return ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(tensor.to(dtype).double(), tensor):
            return str(dtype).removeprefix("torch.")
    return ""
