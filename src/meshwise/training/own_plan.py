"""Which plan a loop of the user's own gets: that of `mw.distribute(plan=...)`, else the run's, else replicas."""

from __future__ import annotations

import os
from pathlib import Path

from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import Plan, plan_from_toml, plan_values
from meshwise.spec.plan_devices import check_devices, on_one_device
from meshwise.spec.world import World
from meshwise.training.own_state import own, say

PLAN_FILE = "MESHWISE_PLAN"
"""The variable that names the run's plan file: `meshwise run --plan` sets it; for torchrun it is set by hand."""


def settle(given: Plan | str | Path | None, world: World) -> Plan:
    """The plan of this script; the first call decides it. Raises PlanError for one that an own loop cannot have."""
    asked = plan_in(given, world.size) if isinstance(given, str | Path) else given
    if own.plan is not None:
        if asked is not None and fitting(asked, world) != own.plan:
            raise UsageError(
                f"mw.distribute was called before with {own.plan}, and now with {asked}. A script has one plan: "
                "give it with the first call alone."
            )
        return own.plan
    named = os.environ.get(PLAN_FILE)
    of_run = plan_in(named, world.size) if named else None
    if asked is not None and of_run is not None and asked != of_run:
        raise UsageError(
            f"the script gives mw.distribute {asked}, and the run has {of_run}. Leave plan= out of the script, or the "
            "plan out of the command line."
        )
    plan = fitting(asked or of_run or Plan(data=world.size), world)
    if own.observer is not None:
        plan = own.observer.planned(plan, world)
    own.plan = plan
    return plan


def plan_text(file: str | Path) -> str:
    """The text of a plan file. Raises PlanError, with the file's name, when it cannot be read or has other fields."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # some editors put a mark before the text
        plan_values(text)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"{file}: no plan can be read ({why}). Name a plan file, such as a run's plan.toml.") from None
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return text


def plan_in(file: str | Path, devices: int) -> Plan:
    """The plan of a plan file on this many devices. Raises PlanError when it cannot be read."""
    return plan_from_toml(plan_text(file), devices)


def fitting(plan: Plan, world: World) -> Plan:
    """`plan` for this many devices. On one device alone its axes are left out, so that `python script.py` runs."""
    if world.size == 1 and plan.devices > 1:
        say(f"one device: of {plan}, the axes are removed, and what needs them.")
        plan = on_one_device(plan)
    check_devices(plan, world.size)
    check_for_own_loops(plan)
    return plan


def check_for_own_loops(plan: Plan) -> None:
    """Raises PlanError for what a plan cannot say of a loop that is not ours."""
    if plan.accumulate > 1:
        raise PlanError(
            f"accumulate={plan.accumulate}: a script that keeps its own loop cuts its batches itself. Leave it out of "
            "the plan, and put `with mw.accumulate():` around mw.backward for every batch but the last of a step. "
            "Or write a Job."
        )
    if plan.dtypes.scaled:
        raise PlanError(
            "fp16 needs a scaled loss and an optimizer that skips steps, which in a script belong to its own loop. "
            "Use bf16 in the plan; or leave it out, and write torch.autocast and torch.amp.GradScaler yourself: "
            "mw.backward(scaler.scale(loss)). Or write a Job."
        )
