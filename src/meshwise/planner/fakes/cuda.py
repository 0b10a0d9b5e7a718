"""Redirect a rehearsed script's `cuda` to the simulated device.

The script and the libraries that it calls see one GPU. The code of torch and of meshwise does not. The script is told
that a tensor on the simulated device is on `cuda:0`. Without a device (`there=False`), CUDA is not available, even if
this machine has a GPU.
Based on torch 2.11, 2.13 and 2.15: `overrides.py`, `cuda/__init__.py`, `amp/autocast_mode.py`, `fake_tensor.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode

from meshwise.spec.user_code import OURS, is_users
from meshwise.torch_compat.fake_device import NAME, Event, Stream, stream_of
from meshwise.torch_compat.fake_values import value_of
from meshwise.torch_compat.program_calls import TORCH

MEMORY = 80 * 2**30
"""The bytes of GPU memory that `torch.cuda.mem_get_info` reports to a script while it is traced without a GPU."""
_CUDA = torch.device("cuda", 0)
_OF_GPU: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *a, **k: True),
    **dict.fromkeys(("device_count",), lambda: 1),
    **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated"), lambda *a: 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda *a: 0),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "init", "ipc_collect"), lambda *a: None),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "reset_peak_memory_stats"), lambda *a: None),
    **dict.fromkeys(("set_rng_state", "set_rng_state_all"), lambda *a: None),
    "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    "get_device_name": lambda *a: "a GPU that is not there",
    "get_device_capability": lambda *a: (9, 0),
    "mem_get_info": lambda *a: (MEMORY, MEMORY),
    "Stream": Stream,
    "Event": Event,
    "stream": lambda stream: stream,
    "current_stream": lambda *a: stream_of(),
    "default_stream": lambda *a: stream_of(),
}
_OF_NONE: dict[str, Callable[..., Any]] = {"is_available": lambda: False, "device_count": lambda: 0}


def by_its_name(text: str) -> str:
    """Replace the name of the fake device with `cuda:0` in an error message of torch."""
    return text.replace(f"{NAME}:0", str(_CUDA))


@contextmanager
def cuda_by_name(there: bool) -> Iterator[None]:
    """Within the context, redirect `cuda` to the fake device.
    If not `there`, CUDA is not available."""
    with ExitStack() as stack:
        table = _OF_GPU if there else _OF_NONE
        stack.enter_context(
            patch.multiple(torch.cuda, **{name: _replacement(name, own) for name, own in table.items()})
        )
        if there:
            stack.enter_context(patch.object(autocast, "__init__", _named_autocast(autocast.__init__)))
            stack.enter_context(patch.object(FakeTensor, "device", _named_device(FakeTensor.device)))
        names = stack.enter_context(_Named(there))
        real: Any = vars(torch.autograd)["_engine_run_backward"]
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", names.inside(real)))
        stack.callback(_back_to, _default_device())
        yield


def _default_device() -> object:
    """Return the mode that `torch.set_default_device` has entered, or None if it was not called."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _back_to(before: object) -> None:
    if _default_device() is not before:
        torch.set_default_device(None)


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """On exit, restore the process-wide settings of torch that a program may have changed."""
    flags = {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    settings: list[tuple[Callable[..., Any], Any]] = [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()),
    ]
    try:
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.backends.cudnn, name, flag)
        for put, value in settings:
            put(value)


def _replacement(name: str, own: Callable[..., Any]) -> Any:
    """Return a replacement for the function `name` of `torch.cuda`."""
    real = getattr(torch.cuda, name)
    if isinstance(real, type):
        return own

    @functools.wraps(real)
    def tell(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_code.co_filename
        return real(*args, **kwargs) if asks.startswith((TORCH, OURS)) else own(*args, **kwargs)

    return tell


def _named_autocast(real: Any) -> Any:
    @functools.wraps(real)
    def begin(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = NAME, dtype or torch.get_autocast_dtype("cuda")
        real(self, device_type, dtype, *args, **kwargs)

    return begin


def _named_device(real: Any) -> Any:
    def device(self: Any) -> torch.device:
        found: torch.device = real.fget(self)
        told = found.type == NAME and is_users(sys._getframe(1).f_code.co_filename)
        return _CUDA if told else found

    return property(device)


class _Named(TorchFunctionMode):
    """A torch function mode that replaces `cuda` with the fake device in the arguments of torch's functions."""

    def __init__(self, there: bool) -> None:
        super().__init__()
        self._there = there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return args[0].device.type == NAME if func.__self__ is Tensor.is_cuda and self._there else func(*args)
        if name in ("numpy", "__array__", "tolist") and isinstance(args[0], FakeTensor):
            known = value_of(args[0])
            return func(args[0] if known is None else known, *args[1:], **kwargs)
        if name in ("pin_memory", "is_pinned", "record_stream"):
            return args[0] if name == "pin_memory" else name == "is_pinned"
        if func is torch.device and not sys._getframe(1).f_code.co_filename.startswith((TORCH, OURS)):
            return func(*args, **kwargs)  # the script sees `cuda`, which `_mapped` replaces where it is used
        if self._there:
            args, kwargs = self._mapped(func, args, kwargs)
            func = Tensor.to if func is Tensor.cuda else func
        return func(*args, **kwargs)

    def inside(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `real` so that this mode is active in it: a backward may run code of the script again."""

        @functools.wraps(real)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self:
                return real(*args, **kwargs)

        return named

    def _mapped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if func is Tensor.cuda:
            return (args[0], NAME), {name: value for name, value in kwargs.items() if name == "non_blocking"}
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], NAME, *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs = kwargs | {"device": NAME}
        return tuple(map(_named, args)), {key: _named(value) for key, value in kwargs.items()}


def _named(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device(NAME, 0) if value.type == "cuda" else value
    return NAME if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value
