"""Change the arguments of torch's functions that bypass `__torch_function__`.

Scripted functions, `torch.tensor` and others that make tensors, and the transforms of `torch.func` read a tensor's
memory without calling its class.
The names of the transforms' implementations are private. Based on torch 2.11 and 2.13: `_functorch/apis.py`,
`_functorch/eager_transforms.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._device import _device_constructors

Change = Callable[[Any], Any]
_IMPLEMENTATIONS = [
    (apis, "vmap_impl"),
    *((eager_transforms, n) for n in ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")),
]
_SCRIPTED: list[Any] = [torch._C.ScriptFunction, torch._C.ScriptMethod]
_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
_MAKERS = ("tensor", "as_tensor", "asarray", *(f"sparse_{layout}_tensor" for layout in _SPARSE))
_change: list[Change] = []
transforming: list[str] = []
"""The names of the transforms of `torch.func`, such as `vmap`, that run now."""


@contextmanager
def beside_transforms() -> Iterator[None]:
    """In the block, run operators as if no transform of `torch.func`, such as `vmap`, were running."""
    running, transforming[:] = transforming[:], []
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        transforming[:] = running


def change_arguments(change: Change) -> None:
    """From now on, let `change` replace the arguments (args, kwargs) of all functions that this module wraps."""
    _change[:] = [change]
    _install()


@functools.cache
def _install() -> None:
    _device_constructors()  # caches torch's own functions, which `with torch.device(…)` needs
    for owner, name in _IMPLEMENTATIONS:
        setattr(owner, name, _transform(getattr(owner, name), name))
    for kind in _SCRIPTED:
        kind.__call__ = _changed(kind.__call__)
    makers = [getattr(torch, name) for name in _MAKERS]
    nested = torch.nested.nested_tensor
    replace({id(nested): _changed(nested)} | {id(make): _maker(make) for make in makers})


def replace(made: Mapping[int, Any]) -> None:
    """Replace each function or class `thing` with `made[id(thing)]` in all modules that hold it, for example after
    `from torch import tensor`. torch's inner modules stay unchanged."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._") or (name.startswith("torch.") and name.count(".") > 1):
            continue
        held = getattr(module, "__dict__", None)
        if type(held) is dict:  # skip objects in sys.modules that are not modules
            held.update({key: made[id(value)] for key, value in list(held.items()) if id(value) in made})


def _changed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _change[0]((args, kwargs))
        return function(*args, **kwargs)

    return changed


def _transform(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    inner = _changed(function)

    @functools.wraps(function)
    def transform(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        transforming.append(name)
        try:
            return inner(*args, **kwargs)
        finally:
            transforming.pop()

    return transform


def _maker(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        # Tensors in lists need no change: torch reads them by `__float__` and others, which call `__torch_function__`.
        given = any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
        if given and not torch.compiler.is_compiling():
            args, kwargs = _change[0]((args, kwargs))
        return function(*args, **kwargs)

    return made
