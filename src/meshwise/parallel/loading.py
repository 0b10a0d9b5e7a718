"""Loading: `load_state_dict` of a model and of an optimizer takes what one device has saved, under any plan.

Each parameter's value, and the optimizer's state that belongs to it, is laid as the parameter lies before torch looks
at it. The functions of the user and of torch stay what they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwise.transfer.sharded import shard_like


def lay_what_a_model_loads(model: nn.Module) -> None:
    """Let every module of `model` that holds parts of parameters take whole ones in `load_state_dict`."""
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_lay_parameters)


def _lay_parameters(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == p.shape:  # torch tells what has another shape
            state[prefix + name] = shard_like(value, p)


def lay_what_an_optimizer_loads(optimizer: Optimizer) -> None:
    """Let `optimizer`, whose parameters are laid already, take whole state in `load_state_dict`."""
    optimizer.register_load_state_dict_pre_hook(_lay_state)


def _lay_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(numbers) != len(held):  # torch tells how they differ
        return saved
    state = dict(saved["state"])
    for number, p in zip(numbers, held, strict=True):
        entry = state.get(number)
        if isinstance(entry, dict):
            state[number] = {key: _laid(value, p) for key, value in entry.items()}
    return {**saved, "state": state}


def _laid(value: Any, p: Tensor) -> Any:
    return shard_like(value, p) if isinstance(value, Tensor) and value.ndim > 0 else value
