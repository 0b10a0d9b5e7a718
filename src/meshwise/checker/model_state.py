"""Copy a model's, optimizer's and scheduler's state to the CPU.

Parameters and modules have the names that they have in the user's model. The functions are collective if a plan has
divided what they copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwise.checker.trace import Named
from meshwise.torch_compat.modules import as_real
from meshwise.torch_compat.sharding import groups_of, sharded_modules
from meshwise.transfer import stages
from meshwise.transfer.sharded import full_tensor

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean(name: str) -> str:
    """Return the name of a module or parameter as in the user's model, without the prefixes that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU."""
    copy = as_real(full_tensor(tensor.detach()).to(device="cpu", copy=True))
    return copy.to(torch.float64) if copy.is_floating_point() else copy


def is_replicated(tensor: Tensor) -> bool:
    """Return True if `tensor` is a DTensor that is replicated on every rank of its mesh."""
    return isinstance(tensor, DTensor) and all(placement.is_replicate() for placement in tensor.placements)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that this rank's pipeline stage trains."""
    parts = {}
    for _, module in sharded_modules(model):
        for group in groups_of(module):
            parts.update(group.made_from())
    lacking = stages.lacks(model)
    for name, p in model.named_parameters():
        if name not in lacking:
            yield clean(name), parts.get(id(p), p)


def parameters_of(model: nn.Module) -> Named:
    """Copy the parameters to the CPU, by name. A parameter with several names is copied once."""
    return {name: copied(p) for name, p in named_parameters(model)}


def buffers_of(model: nn.Module) -> Named:
    """Copy the buffers to the CPU, by name."""
    return {clean(name): copied(b) for name, b in model.named_buffers() if name not in stages.lacks(model)}


def gradients_of(model: nn.Module) -> Named:
    """Copy all gradients that are not None to the CPU, by the name of the parameter."""
    return {name: copied(p.grad) for name, p in named_parameters(model) if p.grad is not None}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_norms(model: nn.Module) -> dict[str, float]:
    """Return the norm of each gradient on this rank. For a sharded gradient, this is the norm of the rank's shard."""
    return {name: float(_local(p.grad).norm()) for name, p in named_parameters(model) if p.grad is not None}


def local_sums(model: nn.Module, *, buffers: bool = True) -> dict[str, float]:
    """Return the sum of the elements of each parameter (or shard) and of each buffer on this rank."""
    every = [*named_parameters(model), *((clean(name), b) for name, b in model.named_buffers() if buffers)]
    return {name: float(as_real(_local(t).detach()).double().nan_to_num(0.0, 0.0, 0.0).sum()) for name, t in every}


def tied_in(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of names in the model that refer to the same parameter."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(clean(name))
    return sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1)


def optimizer_state_of(optimizer: Optimizer, model: nn.Module) -> Named:
    """Return the tensors in an optimizer's state, copied to the CPU."""
    names = {id(p): name for name, p in named_parameters(model)}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{names.get(id(p), f'unknown_param_{number}')} {key}": copied(value)
        for number, p in enumerate(held)
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def learning_rates_of(optimizer: Optimizer, first: int = 0) -> dict[str, float]:
    """Return the learning rate of each parameter group, by the name `group N`. first: the number of the first group."""
    return {f"group {n}": float(group["lr"]) for n, group in enumerate(optimizer.param_groups, first) if "lr" in group}


def scheduler_numbers(scheduler: Any) -> dict[str, float]:
    """Return the numbers in the state dict of a learning rate scheduler."""
    state = {} if scheduler is None else scheduler.state_dict()
    return {k: float(v) for k, v in state.items() if isinstance(v, int | float) and not isinstance(v, bool)}
