"""Propose a plan with less memory, after running out of it.

The plan computes the same numbers. It is for a job or script whose step ran out of memory.

First, microbatches are halved, if the step is known to be a mean over samples: it is already divided over ranks or
microbatches, no batch norm sees a microbatch, and the model draws no random numbers, which depend on the microbatch.
Else blocks run again in the backward, with the same draws; then, on an accelerator, activations wait on the host.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

from torch import nn

from meshwise.guards.replicas import BATCH_NORMS
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World

_DRAWS = re.compile(r"drop|rand|bernoulli|multinomial|normal_|uniform_|noise|sample", re.IGNORECASE)


def smaller_plan(
    plan: Plan, model: nn.Module, batch_size: int | None, world: World, *, apart: bool = False
) -> tuple[Plan, str] | None:
    """Return a plan that needs less memory than `plan`, and a text that says what it changes. Return None if no such
    plan is known.

    batch_size: the size of the global batch; None for a user's own loop, which determines the size itself.
    world: the ranks that divide a batch.
    apart: whether the loss is known to be a mean of terms, each of which depends on only one sample.
    """
    rows = 0 if batch_size is None else batch_size // (world.size * plan.accumulate)
    divided = world.size > 1 or plan.accumulate > 1
    if apart and rows >= 2 and divided and not has_batch_norm(model) and not may_draw(model):
        several = 2 * plan.accumulate
        if fewer := _changed(plan, accumulate=several):
            return fewer, f"accumulate={several}: microbatches of half the size"
    if plan.recompute != "full" and (again := _changed(plan, recompute="full")):
        return again, "recompute=full: blocks run again in the backward"
    if batch_size is None and plan.data > 1 and (parts := _changed(plan, data=1, shard=plan.shard * plan.data)):
        return parts, f"shard={parts.shard}: each rank holds a part of the parameters, gradients and optimizer state"
    if world.kind != "cpu" and "activations" not in plan.offload:
        away = (*plan.offload, "activations")
        if hosted := _changed(plan, offload=away):
            return hosted, f"offload={','.join(away)}: activations wait in the host's memory"
    return None


def has_batch_norm(model: nn.Module) -> bool:
    """Check whether the model has a batch norm."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def may_draw(model: nn.Module) -> bool:
    """Check whether a forward pass may draw random numbers, judged by the settings and the source code of the modules.
    Return True if this is unclear.
    """
    kinds = {type(module) for module in model.modules()}
    shares = [getattr(module, name, 0) for module in model.modules() for name in ("p", "dropout")]
    active = any(isinstance(share, int | float) and share > 0 for share in shares)
    return active or any(_draws(kind) for kind in kinds if not kind.__module__.startswith("torch.nn."))


def _draws(kind: type[nn.Module]) -> bool:
    try:
        return _DRAWS.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):  # made in an interpreter, or not in Python
        return True


def _changed(plan: Plan, **fields: object) -> Plan | None:
    try:
        return replace(plan, **fields)  # type: ignore[arg-type]
    except PlanError:
        return None
