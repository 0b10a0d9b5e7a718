"""Run a script that names GPUs on CPU workers.

`.to(rank)`, `.cuda()`, `device_ids=[rank]` and nccl mean the CPU and gloo. If torch finds a GPU, nothing is changed.
Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from meshwise.compat.program_calls import End, put
from meshwise.spec.devices import STREAMED

GPU = STREAMED[0]
OF_GPUS = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Replace every GPU that the script names by the CPU, inside the with block. Does nothing if torch finds a GPU."""
    if torch.get_device_module(GPU).is_available():
        yield
        return
    module, load, gpus = [nn.Module], [torch], torch.get_device_module(GPU)
    ends: list[End] = [
        put(module, "to", _moved),
        put(module, GPU, lambda plain: lambda model, device=None: model),
        put(load, "load", _moved),
        put([DistributedDataParallel], "__init__", _without("device_ids", "output_device")),
        put([dist, dist.distributed_c10d], "init_process_group", _group),
        put([dist, dist.distributed_c10d], "barrier", _without("device_ids")),
        *(put([gpus], name, lambda plain: lambda *given, **named: None) for name in OF_GPUS),
        put([gpus], "current_device", lambda plain: lambda: 0),
    ]
    try:
        with _Moving():
            yield
    finally:
        for end in reversed(ends):
            end()


class _Moving(TorchFunctionMode):
    """Replaces GPUs by the CPU in the device arguments of torch's functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is getattr(Tensor, GPU):
            return args[0]
        if function is Tensor.to:
            args = (args[0], *map(_cpu_for, args[1:]))
        named = {key: _cpu_for(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        return function(*args, **named)


def _cpu_for(device: Any) -> Any:
    """Return "cpu" if the argument names a GPU, because the check runs the script on CPUs. Return any other argument
    unchanged."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    named = isinstance(device, str) and device.startswith(GPU)
    return "cpu" if is_number or named or (isinstance(device, torch.device) and device.type == GPU) else device


def _moved(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def moved(first: Any, *arguments: Any, **named: Any) -> Any:
        for name in ("device", "map_location"):
            if name in named:
                named[name] = _cpu_for(named[name])
        return plain(first, *map(_cpu_for, arguments), **named)

    return moved


def _without(*names: str) -> Callable[[Any], Any]:
    def making(plain: Any) -> Any:
        @functools.wraps(plain)
        def called(*arguments: Any, **named: Any) -> Any:
            given = arguments[:2] if plain.__name__ == "__init__" else arguments  # DDP(model, [rank])
            return plain(*given, **{key: value for key, value in named.items() if key not in names})

        return called

    return making


def _group(plain: Any) -> Any:
    @functools.wraps(plain)
    def made(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        return plain("gloo" if "nccl" in str(backend) else backend, *arguments, **named)

    return made
