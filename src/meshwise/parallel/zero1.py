"""Divide the optimizer's state among data-parallel ranks: ZeRO-1.

Every rank holds all parameters and gradients, but the optimizer state of only some parameters.

Each parameter has an owner rank. On each rank, the optimizer steps only the parameters that the rank owns, so it makes
state only for these parameters. The new values are then sent from the owner to all ranks. Parameters are assigned
whole, the largest first, to the rank with the fewest bytes so far. So any optimizer that treats each parameter
separately works unchanged. A rank holds at most the average plus the largest parameter. This is stage 1 of ZeRO
(Rajbhandari and others, SC 2020).

The optimizer stays the same object, and its groups keep all parameters: `zero_grad`, schedulers and clipping work as
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.parallel.holding import is_absent, own_state
from meshwise.parallel.probe_optimizer import unlike_by_parameters
from meshwise.parallel.step_hooks import Order, buckets_of, has_closure, held_parameters, subscribe
from meshwise.parallel.technique import Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.modules import after_method, takes_hooks
from meshwise.transfer import collectives

BUCKET = 25 << 20  # bytes sent in one collective


class DividedOptimizer:
    """Divides the state of `optimizer` over the ranks, in place. From then on, the optimizer's steps are collective."""

    def __init__(self, optimizer: Optimizer, rank: int, size: int) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PlanError(
                "zero1 divides an optimizer's state by parameters, but LBFGS steps all of them as one. Set zero1=false."
            )
        if not takes_hooks(optimizer):
            raise PlanError(
                f"zero1 cannot divide {type(optimizer).__name__}, because it wraps another optimizer and is not a "
                "torch optimizer itself. Use data alone."
            )
        if size > 1 and (why := unlike_by_parameters(optimizer)):
            raise PlanError(
                f"zero1: each rank steps only some of the parameters, and {type(optimizer).__name__} may then compute "
                f"different values: {why}. Use data alone, or another optimizer."
            )
        self._rank = rank
        self._owned = owners([p for p in held_parameters(optimizer) if not is_absent(p)], size)
        self._owner = {id(p): owner for owner, held in enumerate(self._owned) for p in held}
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        for p in [p for p in optimizer.state if self._owner.get(id(p), rank) != rank]:
            del optimizer.state[p]
        optimizer.register_load_state_dict_pre_hook(self._own_part)
        for switch in ("train", "eval"):  # schedule-free optimizers write the parameters in these methods
            after_method(optimizer, switch, self._send)
        subscribe(Order.ZERO1, self._before, self._after, self._give_back, optimizer=optimizer)

    def _own_part(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return own_state(optimizer, saved, lambda p: self._owner.get(id(p)) != self._rank)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set aside the gradients of parameters that other ranks own, because an optimizer skips parameters without a
        gradient."""
        if has_closure(args, kwargs):
            raise PlanError("zero1 does not support optimizer.step(closure). Call backward, then optimizer.step().")
        others = [p for owner, held in enumerate(self._owned) if owner != self._rank for p in held]
        self._set_aside = [(p, p.grad) for p in others if p.grad is not None]
        for p, _ in self._set_aside:
            p.grad = None

    def _give_back(self, optimizer: Optimizer) -> None:
        for p, gradient in self._set_aside:
            p.grad = gradient
        self._set_aside = []

    def _after(self, optimizer: Optimizer) -> None:
        """Restore the gradients that `_before` set aside, and broadcast each parameter from its owner."""
        self._give_back(optimizer)
        self._send()

    def _send(self) -> None:
        for owner, held in enumerate(self._owned):
            for bucket in buckets_of([p for p in held if p.requires_grad and not is_absent(p)], BUCKET):
                _broadcast(bucket, owner, own=owner == self._rank)


def _broadcast(bucket: Sequence[Tensor], owner: int, *, own: bool) -> None:
    """Broadcast the parameters of a bucket from the rank `owner`, in one temporary tensor."""
    flat = torch.cat([p.detach().reshape(-1) for p in bucket])
    collectives.broadcast(flat, owner, of="parameters")
    if not own:
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.detach().copy_(part.view_as(p))


def owners(parameters: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Assign parameters to `size` ranks, the largest first, each to the rank with the fewest bytes so far."""
    held: list[list[nn.Parameter]] = [[] for _ in range(size)]
    loads = [0] * size
    for p in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        held[least].append(p)
        loads[least] += p.numel() * p.element_size()
    return held


def _bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    DividedOptimizer(optimizer, world.rank, world.size)


ZERO1 = Technique(bind=_bind)
