"""Offload: what the backward needs waits in the host's memory.

Tensors that a forward keeps for its backward are copied to the host (pinned, where the device is a GPU) and back when
the backward asks for them. Parameters stay where they are: they are there anyway. The model's `forward` is laid into
this; its class, hooks and state_dict keys stay. Nothing is fetched ahead yet: the backward waits for each copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST = 1024  # bytes: below, a copy costs more than it frees


@dataclass
class Moved:
    """What has gone to the host so far: tensors, and their bytes."""

    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _OnHost:
    """A tensor that waits in the host's memory, and where it belongs."""

    copy: Tensor
    device: torch.device


def offload_activations(model: nn.Module) -> Moved:
    """Let what `model` keeps for its backward wait in the host's memory; returns the count, which goes on counting.

    A model that is only a list of models, and never called itself, passes this on to them.
    """
    moved = Moved()
    for root in _called(model):
        changed: Any = root
        changed.forward = functools.partial(_offloaded, root, root.forward, moved)
    return moved


def _called(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return [root for child in model.children() for root in _called(child)]
    return [model]


def _offloaded(model: nn.Module, forward: Callable[..., Any], moved: Moved, /, *arguments: Any, **keywords: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(_to_host, moved), _to_device):
        return forward(*arguments, **keywords)


def _to_host(moved: Moved, tensor: Tensor) -> Tensor | _OnHost:
    source = tensor if tensor._base is None else tensor._base
    if isinstance(source, nn.Parameter) or tensor.nbytes < SMALLEST or tensor.layout != torch.strided:
        return tensor
    on_gpu = tensor.device.type != "cpu"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu, requires_grad=False)
    copy.copy_(tensor.detach(), non_blocking=on_gpu)
    moved.tensors, moved.bytes = moved.tensors + 1, moved.bytes + tensor.nbytes
    return _OnHost(copy, tensor.device)


def _to_device(kept: Tensor | _OnHost) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.copy.to(kept.device, non_blocking=True)
