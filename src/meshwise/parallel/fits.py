"""What cannot be is refused: before there are workers as far as the plan tells it, and before the model is touched."""

from __future__ import annotations

from torch import nn

from meshwise.parallel.compiled import check_can_compile
from meshwise.parallel.precision import check_computes
from meshwise.parallel.suitable import check_can_be_divided
from meshwise.spec.plan import Plan, check_devices
from meshwise.spec.world import World


def check_fits(plan: Plan, world: World) -> None:
    """Raises PlanError when the run has another number of devices than the plan, or they lack what it asks for."""
    check_devices(plan, world.size)
    if plan.compile:
        check_can_compile(world.device)
    if world.kind == "cpu":  # the process that starts workers leaves GPUs alone
        check_computes(None, world.device, plan.dtypes)


def check_model(model: nn.Module, plan: Plan, world: World, *, compiles: bool) -> None:
    """Raises PlanError when `model` cannot be laid on this rank's device as `plan` says.

    compiles: its blocks will be compiled.
    """
    check_devices(plan, world.size)
    check_computes(model, world.device, plan.dtypes)
    if world.size > 1:
        check_can_be_divided(model)
    if compiles:
        check_can_compile(world.device)
