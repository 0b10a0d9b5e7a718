"""`meshwise plan`: which plan a job should have on a machine, known before it runs.

Tested in tests/cli/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwise.api.machines import find_machine
from meshwise.api.plan_options import PlanOptions
from meshwise.compat.fake import FakeTensors
from meshwise.jobs.registry import find_job
from meshwise.parallel.batch_norm import normalises
from meshwise.rehearsal.candidates import Space, candidates, savers
from meshwise.rehearsal.estimate import Estimate
from meshwise.rehearsal.estimator import estimator
from meshwise.rehearsal.search import Search, search
from meshwise.rehearsal.views.plan_text import plans_text
from meshwise.spec.errors import MeshwiseError, PlanError, UsageError
from meshwise.spec.machine import Machine
from meshwise.spec.options import takes
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import read_plan
from meshwise.spec.plan_settings import plan_from_settings
from meshwise.terminal.notebook import shown_by
from meshwise.training.job import Job


@dataclass(frozen=True)
class Plans:
    """The plans of a job on a machine, the best first. one: of a single plan that was asked about."""

    job: str
    batch: int
    machine: Machine
    found: Search
    one: bool = False

    @property
    def best(self) -> Estimate | None:
        """The fastest plan that fits; None where none does."""
        first = next(iter(self.found.estimates), None)
        return first if first is not None and first.memory.verdict in ("fits", "unknown") else None


@takes(PlanOptions)
def plan(options: PlanOptions) -> Plans:
    """Rehearse a job under the plans that a machine could run, without running any: seconds of a step and memory of
    each, the best first. No device and no network are needed.

    Raises UsageError for a job or a machine that is not known, PlanError where no plan can run.
    """
    return plan_options(options)


def plan_options(options: PlanOptions) -> Plans:
    """The search with these options."""
    machine, job = _machine_of(options), _job_of(options)
    rehearse = estimator(job, machine, options.cap)
    if options.fits is not None:
        return _judged(job, machine, options, rehearse)
    counts = options.counts(len(machine.devices))
    space = Space(counts, _per_host(machine), job.batch_size, options.settings, options.allow, _has_batch_norms(job))
    plans = candidates(space)
    if not plans:
        raise PlanError(
            f"no plan divides a global batch of {job.batch_size} samples over {counts[-1]} devices"
            f"{' with ' + ' '.join(options.settings) if options.settings else ''}. "
            f"Use --batch-size {_multiple(job.batch_size, counts[-1])}, or fewer devices: --devices 1..{counts[-1]}."
        )
    show: Callable[[Plans], None] = options.show
    found = search(
        plans,
        rehearse,
        options.seconds,
        savers=lambda plan: savers(plan, space),
        show=lambda part: show(Plans(job.name, job.batch_size, machine, part)),
    )
    if not found.estimates:
        raise PlanError(
            f"none of {len(found.refused)} plans can run. The first, {found.refused[0].plan}: {found.refused[0].why}"
        )
    return Plans(job.name, job.batch_size, machine, found)


def _judged(job: Job, machine: Machine, options: PlanOptions, rehearse: Callable[[Plan], Estimate]) -> Plans:
    given = options.fits
    asked = read_plan(given, len(machine.devices)) if isinstance(given, str | Path) else given
    assert isinstance(asked, Plan)
    asked = plan_from_settings(options.settings, asked)
    if asked.devices > len(machine.devices):
        raise PlanError(f"{asked} needs {asked.devices} devices; machine '{machine.name}' has {len(machine.devices)}.")
    found = search([asked], rehearse, options.seconds)
    if found.refused:
        raise PlanError(found.refused[0].why)
    return Plans(job.name, job.batch_size, machine, found, one=True)


def _machine_of(options: PlanOptions) -> Machine:
    return options.machine if isinstance(options.machine, Machine) else find_machine(options.machine)


def _job_of(options: PlanOptions) -> Job:
    if isinstance(options.job, str) and options.job.endswith(".py"):
        raise UsageError(
            f"{options.job} is a script, and plans are found for jobs so far. Write a Job, and name it: "
            f"{options.job}:job."
        )
    job = find_job(options.job, data=options.data, seed=options.seed, args=options.args)
    return job if options.batch_size is None else replace(job, batch_size=options.batch_size)


def _per_host(machine: Machine) -> int:
    return max(1, len(machine.devices) // max(1, len(machine.hosts)))


def _has_batch_norms(job: Job) -> bool:
    with FakeTensors(lambda func, args, kwargs, run: run(), stands_for_real=True):
        try:
            model = job.model()
        except MeshwiseError:
            raise
        except Exception as error:
            raise UsageError(
                f"job '{job.name}': its model does not build on fake tensors, which have shapes and no values: "
                f"{str(error).splitlines()[0]}. Compute this value without torch (numpy, math)."
            ) from error
    return any(map(normalises, model.modules()))


def _multiple(batch: int, devices: int) -> int:
    return max(1, round(batch / devices)) * devices


shown_by(Plans, plans_text)
