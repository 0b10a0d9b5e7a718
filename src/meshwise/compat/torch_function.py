"""Tensor subclasses and what torch calls on them: `__torch_function__` off, and the name of what was called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def on_parts() -> AbstractContextManager[None]:
    """Inside, a tensor subclass is the plain tensor that it is in memory."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return off


def called(func: Callable[..., Any]) -> str:
    """The name of a function that `__torch_function__` is given; `.shape` of a property that is read."""
    name = getattr(func, "__name__", "")
    return f".{func.__self__.__name__}" if name == "__get__" else name  # type: ignore[attr-defined]
