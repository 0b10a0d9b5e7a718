"""Lifted precision: casts to float32 and below, written inside a model, become casts to float64.

A model in float64 that says `.float()` in its attention rounds to 1e-7 all the same, and no difference below that can
be seen. With the casts lifted two sides that compute the same agree to 1e-13, so that 1e-9 is a fault.
Not covered: tensors made from float32 arrays of numpy, and casts by the name of a type (`"torch.FloatTensor"`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwise.compat.dispatch import operators_through

LOWER = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
REINTERPRETS = (Tensor.view,)  # a dtype here says how bytes are read


class _LiftedMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CASTS:
            return args[0].to(torch.float64)
        if func in REINTERPRETS:
            return func(*args, **(kwargs or {}))
        return func(*map(_lift, args), **{name: _lift(value) for name, value in (kwargs or {}).items()})


def _lift(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


def _lift_operator(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "dtype" in kwargs:
        kwargs = {**kwargs, "dtype": _lift(kwargs["dtype"])}
    return operator(*args, **kwargs)


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """In the with-body: casts to float32, float16 and bfloat16 give float64, and so do new tensors without a dtype."""
    with _float64_by_default(), _LiftedMode():
        yield


@contextlib.contextmanager
def lifted_backward() -> Iterator[None]:
    """`lifted` for a backward, which may recompute parts of the forward: torch leaves function modes for it, so that
    casts are met where operators are."""
    with _float64_by_default(), operators_through(_lift_operator):
        yield


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
