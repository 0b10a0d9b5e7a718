"""Choose a job's plan on a machine before it runs: `meshwise plan`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwise.hardware.machines import find_machine
from meshwise.planner.candidates import Space, candidates, savers
from meshwise.planner.closed_form import ClosedForm, small_traces
from meshwise.planner.estimate import FITS, UNKNOWN, Estimate
from meshwise.planner.estimator import Rehearsed, kind_of, rehearser, works_of
from meshwise.planner.explain import Explanation, explain
from meshwise.planner.memory import MemoryParts, memory_parts
from meshwise.planner.options import PlanOptions
from meshwise.planner.prediction import prediction
from meshwise.planner.scripts import Script, known_script
from meshwise.planner.search import Bounds, Known, Search, search
from meshwise.planner.tracer import Tracer
from meshwise.planner.views.plan_page import plan_page
from meshwise.planner.views.plan_text import plans_text
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.machine import Machine
from meshwise.spec.options import check_script, takes
from meshwise.spec.plan import OWN_DTYPES, Plan
from meshwise.spec.plan_file import read_plan
from meshwise.spec.plan_settings import settings_text, settings_values
from meshwise.spec.prediction import Prediction
from meshwise.terminal.notebook import Page, shown_by
from meshwise.training.job.job import Job
from meshwise.training.job.run import open_data
from meshwise.training.jobs.registry import find_job
from meshwise.training.jobs.script import run_script_file
from meshwise.workers.scratch import scratch_folder
from meshwise.workers.scratch_files import scratch_files

ROOMY = 0.5
"""Variants that save memory are skipped if the best plan needs less than this fraction of a device's memory."""
LARGE = 10**9
"""Models with this many parameters are planned in bfloat16: training in float32 takes 16 bytes a parameter."""
SLACK = 1.1
"""The search first tries plans whose memory, as roughly guessed, is at most this many times a device's memory."""
EDITS = 10.0
"""If the user asks about one plan: the most seconds to spend on variants that take less memory."""
_NOTHING = Search((), (), (), 0.0)


@dataclass(frozen=True)
class Plans:
    """The plans that a job could have on a machine, the best plan first.

    found: the result of the search, with an estimate for each plan.
    one: whether the user asked about one plan. This plan is then first in the list, and the next plans are variants of
        it that differ in one setting.
    explained: what takes the time of a step under one plan. None unless it was requested.
    memory: what takes the memory under one plan. None unless it was requested.
    steps: the number of optimizer steps of the whole training. None if it is unknown.
    said: notes for the user about assumptions, e.g. that the model is planned in bfloat16.
    first: the rehearsal (simulation) of the first plan of the list. None if it was not kept.
    """

    job: str
    batch: int
    machine: Machine
    found: Search
    one: bool = False
    explained: Explanation | None = None
    memory: MemoryParts | None = None
    steps: int | None = None
    said: tuple[str, ...] = ()
    first: Rehearsed | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return str(plans_text(self))

    @property
    def best(self) -> Estimate | None:
        """The fastest plan that fits, or may fit. None if there is none."""
        first = next(iter(self.found.estimates), None)
        return first if first is not None and first.memory.verdict in (FITS, UNKNOWN) else None

    @property
    def predicted(self) -> Prediction | None:
        """The prediction for the first plan of the list. A run under this plan can be compared with it later, and
        `prediction_to_toml` writes it into a plan file. None if `first` is None."""
        return None if self.first is None else prediction(self.first.whole, self.job)

    def device_hours(self, estimate: Estimate) -> float | None:
        """Return the device hours of the training under a plan, without evaluation and saving. Return None if they are
        unknown."""
        if self.steps is None or estimate.seconds is None:
            return None
        return self.steps * estimate.seconds.value * estimate.plan.devices / 3600


@takes(PlanOptions)
def plan(options: PlanOptions) -> Plans:
    """Estimate a job's time and memory under every plan that a machine could run. The best plan comes first.

    No plan is run, and neither a device nor a network is needed. The result has the seconds of a step and the memory of
    each plan. Raises UsageError for an unknown job or machine, PlanError if no plan can run.
    """
    return plan_options(options)


def page(plans: Plans) -> Page:
    """Return an offline page with the plans, and with the predicted step and memory of the first plan."""
    if plans.first is None:
        raise UsageError("--page shows the best plan, but no plan fits. Use more devices, or a smaller --batch-size.")
    return Page(plan_page(plans, plans.first.whole))


setattr(Plans, "figure", page)  # noqa: B010  # set here, after `page` is defined


def plan_options(options: PlanOptions) -> Plans:
    """Run the search for plans with these options."""
    with ExitStack() as stack:
        machine = options.machine if isinstance(options.machine, Machine) else find_machine(options.machine)
        return _planned(options, machine, _job_of(options, machine, stack))


def _planned(options: PlanOptions, machine: Machine, job: Job | Script) -> Plans:
    program = job if isinstance(job, Script) else Tracer(job)
    rehearse = _Kept(rehearser(program, machine, options.cap, brief=True))
    options, said = _in_bf16(program, options)
    space = functools.cache(lambda: _space(program, machine, options))
    plans = Plans(job.name, job.batch_size, machine, _NOTHING, said=said)
    if options.fits is not None or options.memory:
        estimate = functools.cache(lambda plan: rehearse(plan).estimate)
        plans = replace(plans, found=_judged(machine, options, estimate, space), one=True)
    else:
        plans = replace(plans, found=_searched(plans, space(), options, rehearse, program))
    plans = replace(plans, steps=options.steps or _steps(job), first=rehearse.kept(plans.found.estimates[0].plan))
    return _in_detail(plans, options, rehearse)


class _Kept:
    """Estimates plans by rehearsing (simulating) them, and keeps the rehearsal of the best plan, so that it need not be
    rehearsed again."""

    def __init__(self, rehearse: Callable[[Plan], Rehearsed]) -> None:
        self._rehearse = rehearse
        self._best: Rehearsed | None = None

    def __call__(self, plan: Plan) -> Rehearsed:
        if (known := self.kept(plan)) is not None:
            return known
        found = self._rehearse(plan)
        if self._best is None or found.estimate.rank_key < self._best.estimate.rank_key:
            self._best = found
        return found

    def kept(self, plan: Plan) -> Rehearsed | None:
        """Return the kept rehearsal (simulation) if it belongs to `plan`, otherwise None."""
        return self._best if self._best is not None and self._best.estimate.plan == plan else None


def _in_bf16(program: Tracer | Script, options: PlanOptions) -> tuple[PlanOptions, tuple[str, ...]]:
    """Choose bfloat16 for a model that is too large for float32, unless a dtype is given.
    Return options and notes."""
    given = {setting.partition("=")[0].strip() for setting in options.settings}
    if options.fits is not None or given & {"precision", *OWN_DTYPES} or program.model.wide < LARGE:
        return options, ()
    billions = f"{program.model.wide / 1e9:.1f} billion parameters"
    said = f"{billions} are planned in bf16. Run with --set precision=bf16, or plan with --set precision=fp32."
    return replace(options, settings=(*options.settings, "precision=bf16")), (said,)


def _space(program: Tracer | Script, machine: Machine, options: PlanOptions) -> Space:
    counts, cut = options.counts(len(machine.devices)), not isinstance(program, Script)
    norms = program.model.batch_norms
    per_host = max(1, len(machine.devices) // max(1, len(machine.hosts)))
    return Space(counts, per_host, program.batch_size, options.settings, options.allow, norms, cut)


def _searched(
    plans: Plans,
    space: Space,
    options: PlanOptions,
    rehearse: Callable[[Plan], Rehearsed],
    program: Tracer | Script,
) -> Search:
    asked, machine = candidates(space), plans.machine
    if not asked:
        most = max(space.devices)
        multiple = max(1, round(plans.batch / most)) * most
        option = "a loader with batch_size" if isinstance(program, Script) else "--batch-size"
        raise PlanError(
            f"no plan can divide a global batch of {plans.batch} samples over {most} "
            f"devices{' with ' + ' '.join(options.settings) if options.settings else ''}. Use {option} {multiple}, or "
            f"allow fewer devices with --devices 1..{most}."
        )
    small = (small_traces(program, machine),) if isinstance(program, Tracer) and kind_of(machine) == "gpu" else ()
    bounds = Bounds(program.model, machine, options.cap)
    likely = ClosedForm(program.model, machine, program.batch_size, *small)

    @functools.cache
    def estimate(plan: Plan) -> Estimate:
        found = rehearse(plan)
        bounds.learn(found)
        likely.learn(found.estimate)
        return found.estimate

    found = search(
        asked,
        estimate,
        options.seconds,
        savers=functools.partial(savers, space=space),
        show=lambda part: options.show(replace(plans, found=part)),
        known=Known(bounds, likely, float("inf") if bounds.room is None else SLACK * bounds.room),
        roomy=ROOMY,
        clock=time.monotonic if kind_of(machine) == "cpu" else time.process_time,
    )
    if not found.estimates:
        raise PlanError(
            f"none of {len(found.refused)} plans can run. The first, {found.refused[0].plan}: {found.refused[0].why}"
        )
    return found


def _in_detail(plans: Plans, options: PlanOptions, rehearse: Callable[[Plan], Rehearsed]) -> Plans:
    """Return `plans` with details about the first plan: what takes the time of a step (`--explain`), and what takes the
    memory (`--memory`)."""
    if not (options.explain or options.memory):
        return plans
    chosen, *others = plans.found.estimates
    whole = rehearse(chosen.plan).whole
    if options.memory:
        traced = next(one for one in whole.traces if one.step.rank == chosen.memory.rank)
        first, step = works_of(traced, whole.prices)
        plans = replace(plans, memory=memory_parts(first, step, plans.machine.devices[chosen.memory.rank]))
    if options.explain:
        if whole.step is None:
            raise UsageError(f"--explain: the step time of {settings_text(chosen.plan)} is unknown: {chosen.unknown}.")
        runner_up = None if plans.one else next(iter(others), None)
        plans = replace(plans, explained=explain(chosen, whole.step, whole.prices, runner_up))
    return plans


def _steps(job: Job | Script) -> int | None:
    """Return how many optimizer steps the whole training has, or None for a script."""
    if isinstance(job, Script):
        return None
    return -(-open_data(job, job.data(), "training set").samples // job.batch_size) * job.epochs


def _judged(
    machine: Machine, options: PlanOptions, estimate: Callable[[Plan], Estimate], space: Callable[[], Space]
) -> Search:
    """Estimate the plan that the user asked about, which comes first in the result."""
    given = Plan() if options.fits is None else options.fits
    over = settings_values(options.settings)
    asked = read_plan(given, len(machine.devices), over) if isinstance(given, str | Path) else replace(given, **over)
    if asked.devices > len(machine.devices):
        raise PlanError(f"{asked} needs {asked.devices} devices, but '{machine.name}' has {len(machine.devices)}.")
    found = search([asked], estimate, options.seconds)
    if found.refused:
        raise PlanError(found.refused[0].why)
    first = found.estimates[0]
    if first.memory.verdict != FITS or options.memory:
        found = search([asked], estimate, min(options.seconds, EDITS), savers=lambda plan: savers(plan, space()))
    others = tuple(each for each in found.estimates if each.plan != asked)
    return replace(found, estimates=(first, *others))


def _job_of(options: PlanOptions, machine: Machine, stack: ExitStack) -> Job | Script:
    """Return the program to plan: a `Script` if the user named a `.py` file, and otherwise a `Job`."""
    if isinstance(options.job, str) and options.job.endswith(".py"):
        check_script(options.job, options)
        script, folder = Path(options.job), stack.enter_context(scratch_folder("plan"))
        run = scratch_files(folder)(functools.partial(run_script_file, script.resolve(), list(options.arguments)))
        return known_script(script.name, run, kind_of(machine))
    job = find_job(options.job, seed=options.seed, args=options.args)
    job = replace(job, data=functools.cache(job.data))  # opened once, for the number of steps and for all estimates
    return job if options.batch_size is None else replace(job, batch_size=options.batch_size)


shown_by(Plans, plans_text)
