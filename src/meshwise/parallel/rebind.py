"""Point optimizers and checkpoints at the parameters that a plan made.

The plan replaces a model's parameters with this rank's parts.

An optimizer made before the plan would step the old parameters, without an error and without effect. When it is
re-bound, it stays the same object, with the same groups, settings and state. Schedulers that refer to it need no
change. `load_state_dict` of a model and of an optimizer accepts what one device has saved: whole tensors are sharded
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwise.parallel.step_hooks import held_parameters
from meshwise.spec.errors import PlanError
from meshwise.transfer.sharded import shard_like


def rebind(optimizer: Optimizer, names: Mapping[int, str], now: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of `optimizer` in place with the parameters that the model has now. Shard the optimizer's
    state like the new parameters.

    names: maps the id of each parameter that the optimizer holds to the parameter's name.
    now: the model's present parameters, by name.

    Raises PlanError if a parameter of the optimizer has no name.
    """
    new: dict[nn.Parameter, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise PlanError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(p.shape)} which is not in "
                    "the model. Give the optimizer the parameters of the distributed model, or distribute both models."
                )
            new[p] = now[names[id(p)]]
    for group in optimizer.param_groups:
        group["params"] = [new[p] for p in group["params"]]
    state = {to: _sharded_as(to, optimizer.state[old]) for old, to in new.items() if old in optimizer.state}
    optimizer.state.clear()
    optimizer.state.update(state)  # type: ignore[arg-type]


def register_model_load_hooks(model: nn.Module) -> None:
    """Let the modules of `model` that have sharded parameters accept whole tensors in `load_state_dict`."""
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_shard_parameters)


def _shard_parameters(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == p.shape:  # for another shape, torch raises its own error
            state[prefix + name] = shard_like(value, p)


COUNTERS = ("step", "eta", "mu")  # numbers in optimizers' state that are never sharded, even for a scalar parameter


def register_optimizer_load_hook(optimizer: Optimizer) -> None:
    """Let `optimizer`, which holds sharded parameters, accept whole state tensors in `load_state_dict`."""
    optimizer.register_load_state_dict_pre_hook(_shard_state)


def _shard_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = held_parameters(optimizer)
    if len(numbers) != len(held):  # torch raises its own error for this
        return saved
    state = dict(saved["state"])
    for number, p in zip(numbers, held, strict=True):
        if number in state:
            state[number] = _sharded_as(p, state[number])
    return {**saved, "state": state}


def _sharded_as(p: Tensor, entry: Any) -> Any:
    """Shard the optimizer state of one parameter like the parameter `p`. Counters stay unchanged."""
    if not isinstance(entry, dict):
        return entry
    like = {k for k, v in entry.items() if isinstance(v, Tensor) and (v.ndim or (not p.ndim and k not in COUNTERS))}
    return {name: shard_like(value, p) if name in like else value for name, value in entry.items()}
