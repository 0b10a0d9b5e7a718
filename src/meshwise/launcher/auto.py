"""Find the plan for a run on its devices: `--plan auto`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from meshwise.hardware.bench import bench
from meshwise.hardware.find import find_devices
from meshwise.hardware.machines import find_machine
from meshwise.hardware.measure.processes import device_names
from meshwise.hardware.measure.result import only_devices
from meshwise.planner.estimate import Estimate
from meshwise.planner.options import PlanOptions
from meshwise.planner.plan import Plans, plan_options
from meshwise.planner.views.explain_text import runner_up_sentences
from meshwise.planner.views.plan_text import plans_text
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import OWN_DTYPES
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.plan_settings import settings_text
from meshwise.spec.prediction import prediction_to_toml
from meshwise.spec.units import bytes_text, plural
from meshwise.training.job.options import AUTO_OF_A_SCRIPT, PlanText, RunOptions
from meshwise.workers.environment import started_by_launcher

SECONDS = 20.0
"""How many seconds to search for a plan."""
MEASURE = 4.0
"""How many seconds to measure the links between CPU workers, for which the catalog has no figures."""


def with_plan(options: RunOptions, console: Console) -> RunOptions:
    """Search for the plan of `--plan auto`, and return the options with this plan."""
    if str(options.job).endswith(".py"):
        raise UsageError(AUTO_OF_A_SCRIPT)
    if options.nnodes > 1 or started_by_launcher():
        raise UsageError(
            "--plan auto works only on one machine, where meshwise run starts the workers itself. Find the plan with "
            "meshwise plan --machine 2x8xH100 --save plan.toml, and pass it with --plan plan.toml."
        )
    slots = find_devices(parse_devices(options.devices or "all"))
    machine = only_devices(find_machine(), device_names(slots))
    if slots[0].device == "cpu" and len(slots) > 1:
        with console.status(f"measuring what {len(slots)} workers send each other"):
            found = bench(f"{len(slots)}xcpu", what=("collectives",), sizes="1K:4M", seconds=MEASURE).machine
        machine = replace(machine, collectives=found.collectives, links=found.links, measured=found.measured)
    dtypes = {"precision", *OWN_DTYPES} & {setting.partition("=")[0].strip() for setting in options.settings}
    asked = () if dtypes else ("precision=fp32",)  # never change a run's numbers without being asked to
    words = PlanOptions(
        job=options.job or "",
        machine=machine,
        settings=(*options.settings, *asked),
        batch_size=options.batch_size,
        seconds=SECONDS,
        args=options.args,
        seed=options.seed,
    )
    with console.status("rehearsing plans"):
        plans = plan_options(words)
    chosen, why = _choice(plans, len(slots))
    on = f" on {chosen.plan.devices} of {len(slots)} devices" if chosen.plan.devices < len(slots) else ""
    console.print(plans_text(plans, console.width if console.is_terminal else None), soft_wrap=True)
    text = f"plan auto: {settings_text(chosen.plan)}{on}. {why}".rstrip()
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)
    predicted = plans.predicted if plans.first is not None and plans.first.estimate.plan == chosen.plan else None
    text = plan_to_toml(chosen.plan) + ("" if predicted is None else prediction_to_toml(predicted))
    return replace(options, plan=PlanText(text), devices=_first_of(slots, chosen.plan.devices))


def _choice(plans: Plans, devices: int) -> tuple[Estimate, str]:
    """Return the fastest plan that fits in memory, or the simplest if no times are known, and the reason."""
    best = plans.best
    if best is None:
        nearest = min(plans.found.estimates, key=lambda each: each.memory.total.value).memory
        need, room = bytes_text(nearest.total.high), bytes_text(nearest.capacity or 0)
        raise PlanError(
            f"--plan auto: none of {plural(len(plans.found.estimates), 'plan')} is certain to fit in memory. One may "
            f"need {need}, but a device has {room}. Use a smaller --batch-size, more devices, or --set precision=bf16."
        )
    unknown = next((each for each in plans.found.estimates if each.seconds is None), None)
    every = [
        each
        for each in plans.found.estimates
        if devices in (each.plan.data, each.plan.shard) and each.memory.verdict == best.memory.verdict
    ]
    if unknown is not None and every and all(each.seconds is None for each in every):
        simplest = min(every, key=lambda each: each.plan.data != devices)
        return (
            simplest,
            f"This is the simplest plan that fits on all devices. Times are not known: {unknown.unknown}.",
        )
    others = [each for each in plans.found.estimates if each is not best]
    elsewhere = (each for each in others if each.plan.devices != best.plan.devices)
    runner_up = next(itertools.chain(elsewhere if best.plan.devices < devices else (), others), None)
    return best, "".join(runner_up_sentences(best, runner_up))


def _first_of(slots: Sequence[WorkerSlot], count: int) -> str:
    """Return the first `count` devices in the format of `--devices`: `cuda:0,1` or `2xcpu`."""
    indices = [str(slot.index) for slot in slots[:count] if slot.index is not None]
    return f"{slots[0].device}:{','.join(indices)}" if indices else f"{count}x{slots[0].device}"
