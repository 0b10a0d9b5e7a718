"""Check whether a run can use a plan, before torch starts.

The check uses what the launcher knows, and imports torch only if needed.
"""

from __future__ import annotations

from meshwise import parallel
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.world import World


def check_fits(plan: Plan, world: World) -> None:
    """Raise PlanError if the run has another number of devices than the plan needs, or if its devices cannot run the
    plan."""
    check_devices(plan, world.size)
    if world.kind == "cpu" and plan.dtypes.computed not in ("fp64", "fp32"):  # on GPUs, the workers run this trial
        parallel.precision.check_computes(None, world.device, plan.dtypes)
    if plan.compile:
        parallel.compiled.check_can_compile(world.device)


def check_for_scripts(plan: Plan) -> None:
    """Raise PlanError for an option of the plan that a script with its own training loop cannot use."""
    if plan.pipeline > 1:
        raise PlanError(
            f"pipeline={plan.pipeline}: stages decide when the loss runs, but a script runs the loss itself. Write a "
            "Job, whose loss(model, batch) the stages call, or use shard or tensor for this script."
        )
    if plan.accumulate > 1:
        raise PlanError(
            f"accumulate={plan.accumulate}: a script with its own loop must split its batches itself. Leave accumulate "
            "out of the plan, and call loss.backward() for several batches before each step (with view='rank': `with "
            "mw.accumulate():` around mw.backward for every batch but the last of a step). Or write a Job."
        )
    if plan.dtypes.scaled:
        raise PlanError(
            "fp16 needs loss scaling, which a script with its own loop must do itself. Use bf16 in the plan. Or leave "
            "fp16 out of the plan, and use torch.autocast and torch.amp.GradScaler in the script. Or write a Job."
        )
