"""Casts to float32 and below, written inside a model, become casts to float64.

A model in float64 that says `.float()` in its attention rounds to 1e-7 all the same, and no difference below that can
be seen. With the casts changed two sides that compute the same agree to 1e-13, so that 1e-9 is a fault.

Casts are changed where operators are: a forward, what of it runs again in the backward, and selective recomputation,
which counts operators, see the same ones. Not covered: tensors made from float32 arrays of numpy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from meshwise.compat.dispatch import intercept_operators, operator_name

LOWER = (torch.float32, torch.float16, torch.bfloat16)
FACTORIES = {"rand", "randn", "rand_like", "randn_like"}


@contextlib.contextmanager
def upcast(active: bool = True) -> Iterator[None]:
    """In the with-body, and in a backward that it runs: casts to float32, float16 and bfloat16 give float64, and so do
    new tensors without a dtype."""
    if not active:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with intercept_operators(_in_float64):
            yield
    finally:
        torch.set_default_dtype(before)


def _in_float64(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return _random(operator, args, kwargs)
    if kwargs.get("dtype") in LOWER:
        kwargs = {**kwargs, "dtype": torch.float64}
    result = operator(*args, **kwargs)
    if operator_name(operator) == "lift_fresh" and result.dtype in LOWER:  # torch.tensor(..., dtype=torch.float32)
        return result.to(torch.float64)
    return result


def _random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers are those of float32: start values, and data that a script makes, are those of the program."""
    name, first = operator_name(operator), args[0] if args else None
    if name.endswith("_") and isinstance(first, torch.Tensor) and first.dtype == torch.float64:
        return first.copy_(operator(first.float(), *args[1:], **kwargs))
    if name in FACTORIES and kwargs.get("dtype") in (None, *LOWER):
        return operator(*args, **{**kwargs, "dtype": torch.float32}).to(torch.float64)
    return operator(*args, **kwargs)
