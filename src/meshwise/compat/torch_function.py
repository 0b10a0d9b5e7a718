"""Handle `__torch_function__`: switch it off, and name what was called.

torch calls it on tensor subclasses.

Tensor subclasses have it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import Function
from torch.utils import checkpoint


def on_parts() -> AbstractContextManager[None]:
    """Inside, a tensor subclass is the plain tensor that it is in memory."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return off


def called(func: Callable[..., Any]) -> str:
    """The name of a function that `__torch_function__` is given; `.shape` of a property that is read."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    read: Any = func.__self__  # type: ignore[attr-defined]
    read = read.fget if isinstance(read, property) else read  # one that torch wrote in Python
    return f".{read.__name__}"


@functools.cache
def written_out(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch wrote in Python, which calls its operators on subclasses instead of telling these of
    itself."""
    body = types.FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, func.__name__, func.__defaults__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def determinism_of_parts() -> str:
    """The `determinism_check` of torch's checkpoint under which it compares tensors as they are in memory: it would
    take the shape of the whole for that of a part. Its own where torch has no table of them (read in 2.11 to 2.15)."""
    table = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    if "default" not in table:
        return "default"
    plain = table["default"]

    def of_part(tensor: torch.Tensor) -> Any:
        with on_parts():
            return plain(tensor)

    table.setdefault("meshwise", of_part)
    return "meshwise"


def change_arguments_of_functions(change: Callable[[str, Sequence[Any]], Sequence[Any]]) -> None:
    """Let `change(name, arguments)` change what autograd functions of the user are given: torch tells no subclass of
    them, and their backward finds parts where their forward was given wholes. Torch's own, and ours, take parts."""
    own = inspect.getattr_static(Function, "apply")  # in Python, or since torch 2.15 in C

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_enabled() and not cls.__module__.startswith("torch."):
            args = tuple(change(cls.__name__, args))
        return own.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
