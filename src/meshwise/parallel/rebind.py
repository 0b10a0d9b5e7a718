"""Re-bind: an optimizer made before its model's parameters were replaced goes on with the new ones.

Left alone it would step the old parameters, without an error and without effect. It stays the same object, with its
groups, their settings and its state; schedulers that hold it notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.spec.errors import PlanError

Cut = Callable[[Tensor, nn.Parameter], Tensor]
"""Lays a state tensor, of its parameter's shape, as the new parameter lies."""


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter of `model`, by its id: taken before the parameters are replaced."""
    return {id(p): name for name, p in model.named_parameters()}


def rebind(optimizer: Optimizer, names: Mapping[int, str], now: Mapping[str, nn.Parameter], cut: Cut) -> None:
    """Give `optimizer` the parameters that the model has `now`, by name, in place.

    names: those of the parameters that the optimizer holds (`names_of`). Raises PlanError for one that has none.
    """
    new: dict[nn.Parameter, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise PlanError(
                    f"the optimizer's group {index} holds a parameter of shape {tuple(p.shape)} that is not the "
                    "model's. Give the optimizer the parameters of the model that is distributed, or distribute both."
                )
            new[p] = now[names[id(p)]]
    for group in optimizer.param_groups:
        group["params"] = [new[p] for p in group["params"]]
    held = [(old, to) for old, to in new.items() if old in optimizer.state]
    state: dict[Tensor, Any] = {to: _moved(optimizer.state[old], old, to, cut) for old, to in held}
    optimizer.state.clear()
    optimizer.state.update(state)


def _moved(entry: Any, old: Tensor, new: nn.Parameter, cut: Cut) -> Any:
    """One parameter's state: what has its shape is laid as it lies now; counters stay."""
    if not isinstance(entry, dict):
        return entry
    fits = {key: isinstance(v, Tensor) and v.shape == old.shape and v.ndim > 0 for key, v in entry.items()}
    return {key: cut(value, new) if fits[key] else value for key, value in entry.items()}
