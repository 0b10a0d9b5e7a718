"""Check a plan: the job on one device and under the plan, in float64, compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from meshwise.api.check_script import DEFAULT_DEVICES, check_script
from meshwise.compat.compiling import uncompile, unwrapped
from meshwise.equivalence.one_device import one_device
from meshwise.equivalence.proof import Proof, prove
from meshwise.equivalence.trace import CheckSpec, Trace
from meshwise.equivalence.under_plan import Draws, under_plan
from meshwise.jobs.registry import find_job
from meshwise.machine.find import find_devices
from meshwise.spec.devices import parse_devices
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed
from meshwise.spec.plan import AXES, Plan, plan_from_settings, plan_on
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.plan_file import read_plan
from meshwise.training.job import Job
from meshwise.workers.failure import user_traceback
from meshwise.workers.join import join, started_by_launcher
from meshwise.workers.launch import launch


def check(
    job: Job | str,
    *,
    plan: Plan | str | Path | None = None,
    devices: str | None = None,
    steps: int = 3,
    batch_size: int | None = None,
    seed: int | None = None,
    data: str | Path | None = None,
    rounding: bool = True,
    arguments: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Prove that a plan computes what one device computes, or name the first module that does not, and why.

    Both sides train in float64, casts inside the model too, from the same start on the same samples; the last step has
    a ragged batch. A difference above 1e-9 of a tensor's size is a fault.

    job: a Job, or a word as on the command line; a script.py that keeps its own loop is run with `arguments` (of the
    other options it knows plan, devices, steps and seed). plan: a Plan or a plan file; without one, replicas on all
    `devices`.
    devices: `4xcpu` by default has a CPU worker stand for each device of the plan. batch_size, seed, data: as in `run`.
    rounding: run both sides in the plan's own precision as well, and tell how far each is from float64.
    Raises UsageError for what cannot be checked, WorkerFailed when a worker fails.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps}: must be at least 1.")
    if started_by_launcher():
        raise UsageError("meshwise check starts its own workers. Call it alone, without torchrun, srun or mpirun.")
    if isinstance(job, str) and job.endswith(".py"):
        given = None if plan is None else as_written(_plan(plan, devices), tell)
        return check_script(Path(job), arguments, plan=given, devices=devices, steps=steps, seed=seed, tell=tell)
    chosen = as_written(_plan(plan, devices), tell)
    words = devices or f"{chosen.devices}xcpu"
    slots = find_devices(parse_devices(words))
    check_devices(chosen, len(slots))
    of_code = job if isinstance(job, Job) else None
    word, where = job if isinstance(job, str) else "", None if data is None else str(data)
    changes = {"batch_size": batch_size, "seed": seed}
    found = _found(of_code, word, where, changes)
    specs = [CheckSpec(chosen, steps)]
    if rounding and chosen.precision != "fp64":
        specs.append(CheckSpec(chosen, steps, chosen.precision))
    tell(f"one device, {steps} steps")
    if slots[0].device == "cpu":
        references = [_alone(found, spec) for spec in specs]
    else:
        (references,) = launch(_one_device, (of_code, word, where, changes, specs), slots[:1])
    tell(f"{chosen}, {words}")
    draws = [[step.draws for step in side.steps] for side in references]
    results = launch(_under_plan, (of_code, word, where, changes, specs, draws), slots)
    sides: list[Trace] = results[0]
    rounded = (references[1], sides[1]) if len(specs) > 1 else None
    return prove(found.name, specs[0], words, references[0], sides[0], rounded)


def plan_of_words(file: str | None, settings: list[str], devices: str | None) -> Plan:
    """The plan of a plan file (None: replicas on all devices) with `field=value` settings over it."""
    if file is None and settings and devices is not None:
        return plan_on(_count(devices), settings)
    if file is None and settings:
        fixed = plan_from_settings([s for s in settings if s.partition("=")[0].strip() in AXES]).devices
        return plan_on(fixed if fixed > 1 else _count(None), settings)
    start = _plan(file, devices)
    return plan_from_settings(settings, start)


def _plan(plan: Plan | str | Path | None, devices: str | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    return Plan(data=_count(devices)) if plan is None else read_plan(plan, _count(devices))


def _count(devices: str | None) -> int:
    return len(find_devices(parse_devices(devices or DEFAULT_DEVICES)))


def _found(given: Job | None, word: str, data: str | None, changes: dict[str, int | None]) -> Job:
    job = given or find_job(word, data=Path(data) if data else None, seed=changes["seed"])
    said = {name: value for name, value in changes.items() if value is not None}
    return replace(job, model=functools.partial(_uncompiled, job.model), **said)  # type: ignore[arg-type]


def _uncompiled(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    uncompile(model)
    return unwrapped(model)


def as_written(plan: Plan, tell: Callable[[str], None]) -> Plan:
    """The plan without its compiler, which fuses what is to be looked at between modules; and that is told."""
    if plan.compile:
        tell("compile is left out: the modules are compared as they are written")
    return replace(plan, compile=False)


def _alone(job: Job, spec: CheckSpec) -> Trace:
    """`one_device` in this process. Raises WorkerFailed, as a worker would, where the user's program raises."""
    try:
        return one_device(job, spec)
    except MeshwiseError:
        raise
    except Exception as error:
        words = [f"one device, in {spec.precision}, failed: {type(error).__name__}: {error}"]
        words += [*getattr(error, "__notes__", []), *user_traceback(error).rstrip().splitlines()]
        raise WorkerFailed("\n".join(words), rank=0) from error


def _one_device(
    given: Job | None, word: str, data: str | None, changes: dict[str, int | None], specs: list[CheckSpec]
) -> list[Trace]:
    job = _found(given, word, data, changes)
    return [one_device(job, spec, join().world.device) for spec in specs]


def _under_plan(
    given: Job | None,
    word: str,
    data: str | None,
    changes: dict[str, int | None],
    specs: list[CheckSpec],
    draws: list[Draws],
) -> list[Trace | None]:
    join()
    job = _found(given, word, data, changes)
    return [under_plan(job, spec, drawn) for spec, drawn in zip(specs, draws, strict=True)]
