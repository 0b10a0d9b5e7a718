"""Choose a script's plan: its own `plan=`, the run's plan, or replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshwise.parallel.fits import check_for_scripts
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_devices import check_devices, on_one_device
from meshwise.spec.plan_file import read_plan
from meshwise.spec.plan_settings import setting_texts
from meshwise.spec.world import World
from meshwise.training.engine.engine import Engine
from meshwise.workers.environment import PLAN_FILE
from meshwise.workers.join import rank_context


def choose_plan(given: Plan | str | Path | None, engine: Engine) -> Plan:
    """Return the plan that a script's call of mw.distribute uses."""
    world, program = rank_context().world, engine.program
    asked = read_plan(given, world.size) if isinstance(given, str | Path) else given
    program.forget_unused()
    if program.plan is not None:
        if asked is not None and fit_to_world(asked, world, engine.notify) != program.plan:
            raise UsageError(
                f"mw.distribute was called before with {program.plan}, and now with {asked}. A script has one plan: "
                "pass plan= in the first call only, or wrap each training in mw.session()."
            )
        return program.plan
    of_run = plan_of_run(world)
    if asked is not None and of_run is not None and asked != of_run:
        raise UsageError(
            f"the script passes {asked} to mw.distribute, but the run was started with {of_run}. Remove plan= "
            "from the script, or the plan from the command line."
        )
    plan = fit_to_world(asked or of_run or Plan(data=world.size), world, engine.notify)
    if engine.watcher is not None:
        plan = engine.watcher.choose_plan(plan, world)
    if plan.within_samples * engine.world.size != world.size or plan.shares != engine.world.shares:
        sizes = " ".join(f"--set {setting}" for setting in setting_texts(plan))
        raise PlanError(
            f"mw.distribute was passed {plan}. It decides the samples of each rank, so the plan must be known when "
            f"the program begins. Start the run with {sizes}, or with {PLAN_FILE}=plan.toml in the environment."
        )
    program.plan = plan
    return plan


def plan_of_run(world: World) -> Plan | None:
    """Return the run's plan from the file that MESHWISE_PLAN names. None if it is not set."""
    named = os.environ.get(PLAN_FILE)
    return read_plan(named, world.size) if named else None


def fit_to_world(plan: Plan, world: World, notify: Callable[[str], None]) -> Plan:
    """Return `plan`, after a check that it suits this number of ranks and a script's own loop. On one device, return it
    without settings that need several devices."""
    if world.size == 1 and plan.devices > 1:
        notify(f"one device: the axes of {plan}, and techniques that need several devices, are ignored.")
        plan = on_one_device(plan)
    check_devices(plan, world.size)
    check_for_scripts(plan)
    return plan
