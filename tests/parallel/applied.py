"""A plan without an engine: applied together with optimizers made before, and the backward of a step on any number of
devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.parallel.apply import apply, bind
from meshwise.parallel.rebind import rebind
from meshwise.parallel.technique import Setup
from meshwise.spec.plan import Plan
from meshwise.spec.world import World


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its id."""
    return {id(p): name for name, p in model.named_parameters()}


def apply_with(model: nn.Module, plan: Plan, world: World, *optimizers: Optimizer) -> Setup:
    """`apply`, and what it makes of the parameters for `optimizers`, which held them before."""
    names = names_of(model)
    setup = apply(model, plan, world)
    for optimizer in optimizers:
        rebind(optimizer, names, dict(model.named_parameters()))
        bind(optimizer, plan, world)
    return setup


def backward(
    setup: Setup,
    loss: Tensor,
    *,
    factor: Callable[[], Tensor] | None = None,
    value: Tensor | None = None,
    **settings: Any,
) -> Tensor | None:
    """`Reduction.backward`; on one device what it promises, done by hand."""
    if setup.reduction is not None:
        return setup.reduction.backward(loss, factor=factor, value=value, **settings)
    loss.backward()
    for p in setup.model.parameters():
        if factor is not None and p.grad is not None:
            p.grad.mul_(factor().to(p.grad.dtype))
    return value
