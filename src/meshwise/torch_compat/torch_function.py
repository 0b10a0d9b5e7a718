"""Switch `__torch_function__` off, and name the functions that it gets.

torch calls this method of a tensor subclass for each operator on such a tensor.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import Function
from torch.utils import checkpoint

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
"""The arguments of `__torch_function__`: a function of torch, and that function's arguments."""


def on_parts() -> AbstractContextManager[None]:
    """Return a context manager that disables `__torch_function__` of tensor subclasses. Operators then run on this
    rank's local part of each tensor."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return off


def is_asked() -> bool:
    """Return whether operators call `__torch_function__` of tensor subclasses now.
    Inside `on_parts`, they do not."""
    return bool(torch._C._is_torch_function_enabled())


def named(names: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by their names. `names`: of the arguments that may be given by position."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def argument(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    """Return one argument of a call, which may be given by position or by name."""
    return args[at] if len(args) > at else kwargs.get(name, default)


def called(func: Callable[..., Any]) -> str:
    """Return the name of a function that `__torch_function__` gets. For the read of a property, return its name after a
    dot, such as `.shape`."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    read: Any = func.__self__  # type: ignore[attr-defined]
    read = read.fget if isinstance(read, property) else read  # a property written in Python has the name of its getter
    return f".{read.__name__}"


@functools.cache
def written_out(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that ignores `__torch_function__` of tensor subclasses. Its body
    always runs, so the subclasses get the operators in the body instead of the function."""
    asked = ["has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"]
    known = {**func.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    body = types.FunctionType(func.__code__, known, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def determinism_of_parts() -> str:
    """Return a `determinism_check` for `torch.utils.checkpoint` that works with tensor subclasses.

    torch's own check would see whole shapes in the forward, but local shapes in the recomputation. The new check
    compares the local tensors in both."""
    table: Any = checkpoint._allowed_determinism_checks_to_fns
    plain = table["default"]

    def of_part(tensor: torch.Tensor) -> Any:
        with on_parts():
            return plain(tensor)

    table.setdefault("meshwise", of_part)
    return "meshwise"


def check_parts_by_default() -> None:
    """Let `torch.utils.checkpoint` compare local tensors from now on, see `determinism_of_parts`."""
    table: Any = checkpoint._allowed_determinism_checks_to_fns
    table["default"] = table[determinism_of_parts()]


changed: set[str] = set()
"""Names of torch's own functions whose arguments are changed too, such as the function of full backward hooks."""


@functools.cache
def change_arguments_of_functions(change: Callable[[str, Sequence[Any]], Sequence[Any]]) -> None:
    """Change the arguments of the user's subclasses of `torch.autograd.Function`, from now on. `change(name,
    arguments)` gets the name of a subclass, and returns the new arguments.

    torch does not pass such calls to `__torch_function__` of tensor subclasses. Unchanged arguments would be whole
    tensors in the forward, but local tensors in the backward. torch's own functions are not changed."""
    own = inspect.getattr_static(Function, "apply")  # written in Python, or in C since torch 2.15

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if is_asked() and (cls.__name__ in changed or not cls.__module__.startswith("torch.")):
            args = tuple(change(cls.__name__, args))
        return own.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
