"""Take dropout, compiled code and GPUs out of a plain script.

Batch norm runs separately on each rank's samples, so the one process runs it on the same parts of its batch. Without a
GPU, `.to(rank)`, `.cuda()` and `device_ids=[rank]` mean the CPU, and nccl means gloo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from meshwise.spec.devices import STREAMED
from meshwise.torch_compat.program_calls import End, put

DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
DROPOUTS |= {torch.dropout, torch.dropout_}
MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**(kwargs or {})}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return function(*args, **(kwargs or {}))


def _still(module: nn.Module, inputs: Any) -> None:
    """Set the dropout rate of a module to 0 before its forward."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        module.dropout = 0.0
    elif isinstance(module, MODULES):
        module.p = 0.0


@contextlib.contextmanager
def neutral(rows: Mapping[int, list[int]]) -> Iterator[None]:
    """Make the results of one process and of several ranks comparable, inside the with block."""
    ends = [
        register_module_forward_pre_hook(_still).remove,
        put([torch], "compile", lambda plain: _uncompiled),
        put([F], "batch_norm", lambda plain: _by_parts(plain, rows)),
    ]
    try:
        with _NoDropout():
            yield
    finally:
        for end in ends:
            end()


def _uncompiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def _by_parts(plain: Callable[..., Tensor], rows: Mapping[int, list[int]]) -> Callable[..., Tensor]:
    inside = False

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        nonlocal inside  # a torch function mode may call this function again
        parts = _parts(len(input), rows) if training and not inside else []
        found, before, inside = list[Tensor](), inside, True
        try:
            for number, part in enumerate(input.split(parts) if len(parts) > 1 else [input]):
                held = [s if s is None or number == 0 else s.clone() for s in (running_mean, running_var)]
                found.append(plain(part, *held, weight, bias, training, *rest, **named))  # only part 0 sets statistics
        finally:
            inside = before
        return torch.cat(found) if len(found) > 1 else found[0]

    return batch_norm


def _parts(size: int, rows: Mapping[int, list[int]]) -> list[int]:
    """Return how many rows of a tensor belong to each rank."""
    for total, parts in rows.items():
        if total and size % total == 0:
            return [part * size // total for part in parts]
    return []


GPU = STREAMED[0]
OF_GPUS = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Replace each GPU that the script names with the CPU, inside the with block. Does nothing if torch finds a GPU."""
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
    """Replaces GPUs with the CPU in the device arguments of torch's functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is getattr(Tensor, GPU):
            return args[0]
        if function is Tensor.to:
            args = (args[0], *map(_cpu_for, args[1:]))
        named = {key: _cpu_for(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        return function(*args, **named)


def _cpu_for(device: Any) -> Any:
    """Return "cpu" for an argument that names a GPU, and any other argument unchanged."""
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
            given = arguments[:2] if plain.__name__ == "__init__" else arguments  # drops [rank] in DDP(model, [rank])
            return plain(*given, **{key: value for key, value in named.items() if key not in names})

        return called

    return making


def _group(plain: Any) -> Any:
    @functools.wraps(plain)
    def made(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        return plain("gloo" if "nccl" in str(backend) else backend, *arguments, **named)

    return made
