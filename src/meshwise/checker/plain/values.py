"""Copy and sketch the values of one process of a plain script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.checker.plain.record import Step
from meshwise.checker.sketches import pieces
from meshwise.training.autograd.loss_graph import LEAF
from meshwise.transfer.sharded import full_tensor


def parameters_in(loss: Tensor) -> list[Tensor]:
    """Return the parameters that a loss has gradients for, in the order of its graph."""
    found, seen = list[Tensor](), {loss.grad_fn}
    queue: list[Any] = [loss.grad_fn]
    for node in queue:
        if node is not None and node.name() == LEAF and isinstance(node.variable, nn.Parameter):
            found.append(node.variable)
        below = [each for each, _ in (node.next_functions if node is not None else ()) if each not in seen]
        seen.update(below)
        queue += dict.fromkeys(below)
    return found


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a whole tensor on the CPU. Collective if the tensor is a DTensor."""
    return full_tensor(tensor.detach()).to("cpu", copy=True)


def sketched(tensor: Tensor) -> Tensor:
    """Return a sketch of a whole tensor. Collective if the tensor is a DTensor."""
    return pieces(full_tensor(tensor.detach())).clone()  # a small tensor is returned as it is


def value_after(ranks: Sequence[Step], name: str) -> Tensor | None:
    """Return a parameter's value after a step on the ranks. Return None if it is known only after an exchange."""
    owners = [step for step in ranks if name in step.gradients] or list(ranks)
    held = [step.parameters[name] for step in owners if name in step.parameters]
    gradients = [step.gradients[name] for step in owners if name in step.gradients]
    parts = any(not torch.equal(other, held[0]) for other in held[1:])
    if parts and all(torch.equal(other, gradients[0]) for other in gradients[1:]):
        return None  # each rank has updated a part of it
    return held[0] if held else None


def settings_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among an optimizer's settings: by the name, or by `betas 0` for the first of several."""
    found = dict[str, float]()
    for key, value in group.items():
        several = isinstance(value, tuple)
        for at, number in enumerate(value if several else (value,)):
            if isinstance(number, int | float) and type(number) is not bool:
                found[f"{key} {at}" if several else key] = float(number)
    return found


def take_settings(group: dict[str, Any], settings: dict[str, float]) -> None:
    """Give a group of parameters the settings of another, as `settings_of` returns them."""
    for name, number in settings.items():
        key, _, at = name.partition(" ")
        held = group.get(key)
        if isinstance(held, tuple):
            group[key] = (*held[: int(at)], number, *held[int(at) + 1 :])
        elif isinstance(held, float):
            group[key] = number
