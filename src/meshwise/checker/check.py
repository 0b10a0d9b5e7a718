"""Check a plan against one device, in float64.

A job and a script are both a `CheckedProgram`. They differ in what each worker calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import nn

from meshwise.checker.one_device import one_device
from meshwise.checker.options import DEFAULT_DEVICES, PRELOAD_OF_CHECK, CheckOptions
from meshwise.checker.passes import Passes, say_next_pass
from meshwise.checker.plain.judge import judge
from meshwise.checker.plain.record import Follow, Record
from meshwise.checker.plain.script import libraries_of, refuse_unjudged, watch
from meshwise.checker.programs import watch_job, watch_script
from meshwise.checker.proof import PlainProof, Proof, prove
from meshwise.checker.short_loops import LATER
from meshwise.checker.trace import LEFT, CheckSpec, Draws, ProgramTrace, Trace, trace_to_compare
from meshwise.checker.views.check_text import check_text
from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.find import find_devices
from meshwise.parallel.fits import check_fits, check_for_scripts
from meshwise.records.checked import RUNS, code_key, remember
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed
from meshwise.spec.options import check_script, takes
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.plan_file import plan_to_toml, read_plan
from meshwise.spec.plan_settings import devices_of, plan_from_settings, plan_on, settings_values
from meshwise.spec.units import plural
from meshwise.spec.words import error_text
from meshwise.spec.world import World
from meshwise.terminal.notebook import shown_by
from meshwise.torch_compat.compiling import uncompile, unwrapped
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job
from meshwise.training.jobs.script import is_plain, run_script_file
from meshwise.training.tracking.tracking import nowhere
from meshwise.workers.environment import PLAN_FILE, started_by_launcher
from meshwise.workers.failure import user_traceback
from meshwise.workers.file_view import can_lock, free_folders, lock_files
from meshwise.workers.fork_server import Forks
from meshwise.workers.gate import Halt
from meshwise.workers.hang import HANG_LIMIT
from meshwise.workers.join import join
from meshwise.workers.launch import launch
from meshwise.workers.scratch import scratch_folder
from meshwise.workers.scratch_files import scratch_files
from meshwise.workers.watched import Listeners

shown_by(Proof, check_text)
shown_by(PlainProof, check_text)

REFUSED = (
    "meshwise check redirects what Python writes into a temporary folder, but not what a library (HDF5, OpenCV) or a "
    "program of the script writes, so it refuses that. Skip these writes, for instance with an option of the script."
)
NOT_KEPT = (
    "the check redirects what Python writes into a temporary folder. A library (HDF5, Parquet, OpenCV) or a program "
    "that the script starts can still change your files, because this system cannot prevent such writes"
)
NOISY = "one device again, with the plan's values of parameters whose gradients are only rounding"
_kept = ExitStack()
"""Keeps the redirection of a script's output files to a temporary folder active until this process ends."""


@dataclass(frozen=True)
class CheckedProgram:
    """A program to check. `trace` runs the program once in a worker, and returns what it computed. Without `Draws`, the
    program runs on one device. With `Draws`, it runs under the plan with these random numbers, which the run on one
    device recorded. `alone` is True if each run needs a new process, since a script may change anything in its
    process."""

    name: str
    trace: Callable[[CheckSpec, Draws | None], ProgramTrace | None]
    alone: bool


@takes(CheckOptions)
def check(options: CheckOptions) -> Proof | PlainProof:
    """Prove that a plan computes the same as one device. If it does not, name the first module that differs, and why.

    The program trains twice, on one device and under the plan, from the same initial values and on the same samples.
    Both trainings run in float64, and a relative difference above 1e-9 is a fault. The batch of step number `steps`
    is one that the ranks cannot divide evenly. With `rounding`, both trainings also run in the plan's precision, and
    the result says how far each of them is from float64.

    The job is a Job, a name as on the command line (`train.py:job`), or the path of a script, which runs with
    `arguments`. The plan is a Plan or a plan file. Files that a script writes go to a temporary folder, so your files
    stay as they are. For a script that uses DDP or accelerate, but not meshwise, the result is a PlainProof. Raises
    UsageError for an invalid job, plan or option, and WorkerFailed if a worker fails.
    """
    return check_options(options)


def check_options(options: CheckOptions, forks: Forks | None = None) -> Proof | PlainProof:
    """Run a check with these options."""
    if started_by_launcher():
        raise UsageError("meshwise check starts its own workers. Call it alone, without torchrun, srun or mpirun.")
    script = options.job if isinstance(options.job, str) and options.job.endswith(".py") else ""
    given = options.plan is not None or bool(options.settings)
    plan = None if script and not given else uncompiled_plan(_plan(options), options.notify)
    devices = options.devices or (DEFAULT_DEVICES if plan is None else f"{plan.devices}xcpu")
    slots = find_devices(parse_devices(devices))
    if plan is not None:
        check_devices(plan, len(slots))
    if options.perturb and slots[0].device == "cpu":
        options.notify("CPUs have no CUDA streams: use --devices 2xcuda to look for races between streams too")
    if script and not given and is_plain(Path(script)):
        proof = _plain(Path(script), options, slots, devices, forks)
        if proof is not None:
            return proof
    specs = [CheckSpec(plan or Plan(data=len(slots)), options.steps, perturb=options.perturb)]
    if options.rounding and (plan is None or plan.precision != "fp64"):
        specs.append(replace(specs[0], in_float64=False))
    with scratch_folder("check") as folder, closing(forks or Forks(PRELOAD_OF_CHECK)) as forks:
        key = code_key(Path(script)) if script else ""  # of the code that is checked, whatever is edited meanwhile
        program = _script(Path(script), options, plan, slots, folder) if script else _job(options, slots, folder)
        says = partial(Passes, notify=options.notify, progress=options.progress)
        passes, left = says(_passes(specs, plan, devices)), list[str]()
        traces = partial(_traces, program, forks)
        apart = [[slot] for slot in (slots if slots[0].device == "cpu" else slots[:1])]  # on CPUs, one for each pass
        try:
            ones = traces([(spec, None) for spec in specs], apart, passes)
        except WorkerFailed as failed:
            left = [LEFT.format(count=specs[0].ragged, why=str(failed).splitlines()[-1])]
            passes, specs = says(_passes(specs, plan, devices)), [replace(spec, cut=False) for spec in specs]
            ones = traces([(spec, None) for spec in specs], apart, passes)
        one = trace_to_compare(ones[0], program.name)
        drawn = [found.trace.draws if found.trace is not None else {} for found in ones]
        beside = 2 if slots[0].device == "cpu" and len(allowed_cores()) >= 2 * len(slots) else 1
        many = traces(list(zip(specs, drawn, strict=True)), [slots] * beside, passes)
        actual = trace_to_compare(many[0], program.name)
        spec = replace(specs[0], plan=many[0].plan or specs[0].plan)
        rounded = [last for found in (ones, many) if (last := found[-1].trace) is not None and len(specs) > 1]
        actual.races = sorted({race for each in (*ones, *many) if each.trace is not None for race in each.trace.races})
        actual.notes += tuple(left)
        again = says([NOISY])

        def once_more(spec: CheckSpec) -> Trace:
            return trace_to_compare(_traces(program, forks, [(spec, None)], [slots[:1]], again)[0], program.name)

        found = prove(program.name, spec, devices, one, actual, rounded, once_more)
        remember(RUNS, key, found.verdict.value)
        return found


def _plain(
    script: Path, options: CheckOptions, slots: Sequence[WorkerSlot], devices: str, forks: Forks | None
) -> PlainProof | None:
    """Check a script that does not use meshwise. Return None if it turns out to call functions of meshwise."""
    check_script(str(script), options)
    each = f"{plural(options.steps, 'step')} of its first epoch, {min(options.steps, LATER)} of its second"
    says = partial(Passes, notify=options.notify, progress=options.progress)
    passes = says([f"the script on {devices}: {each}", "one process, on the samples that the ranks read"])
    run, libraries = partial(run_script_file, script.resolve(), list(options.arguments)), libraries_of(script)
    with scratch_folder("check") as folder, closing(forks or Forks(PRELOAD_OF_CHECK)) as forks:
        forks.server(os.environ)

        def launched(follow: Follow | None, side: str, passes: Passes) -> list[Record | None]:
            watched = partial(watch, run, options.steps, options.seed or 0, follow, libraries)
            call = partial(_in_scratch, folder / side, watched)
            listeners = Listeners(passes.begin(), hang_limit=HANG_LIMIT, idle=True)
            used = slots if follow is None else slots[:1]
            return launch(call, (), used, listeners=listeners, preload=forks)

        ranks = launched(None, "many", passes)
        if any(record is None for record in ranks):
            return None
        records = [record for record in ranks if record is not None]
        refuse_unjudged(script.name, records)
        try:
            (one,) = launched(Follow(records), "one", passes)
        except WorkerFailed as failed:  # the ranks are judged even if the script fails on one device
            one = Record(0, refused=f"it fails with {str(failed).splitlines()[-1]}")
        assert one is not None
        once_more = partial(launched, Follow(records), "again", says(["one process again, to measure differences"]))
        return judge(script.name, devices, records, one, once_more)


def _in_scratch(folder: Path, call: Callable[[], Any]) -> Any:
    """Call `call`. From then until this process ends, all files that Python code writes go to `folder` instead."""
    os.environ["WANDB_MODE"] = "disabled"
    torch.set_num_threads(1)  # so that one process adds numbers in the same order as several
    if can_lock():
        lock_files(free_folders())
    _kept.enter_context(scratch_files(folder))
    try:
        with nowhere():
            return call()
    except Exception as error:
        if isinstance(error, CalledProcessError) or "permission denied" in str(error).lower():
            error.add_note(REFUSED)
        raise


def _passes(specs: Sequence[CheckSpec], plan: Plan | None, devices: str) -> list[str]:
    words = ["in float64" if spec.in_float64 else "in the plan's own precision" for spec in specs]
    words = [f"{each}{'' if specs[0].cut else ', without a smaller batch'}" for each in words]
    sides = ["one device", f"{plan or 'the plan of the script'} on {devices}"]
    return [f"{side}, {precision}" for side in sides for precision in words]


def _plan(options: CheckOptions) -> Plan:
    if isinstance(options.plan, Plan):
        return plan_from_settings(options.settings, options.plan)
    count = len(find_devices(parse_devices(options.devices or DEFAULT_DEVICES)))
    if options.plan is not None:
        return read_plan(options.plan, count, settings_values(options.settings))
    axes = [setting for setting in options.settings if setting.partition("=")[0].strip() in AXES]
    named = devices_of(axes)
    return plan_on(named if options.devices is None and named > 1 else count, options.settings)


def uncompiled_plan(plan: Plan, notify: Callable[[str], None]) -> Plan:
    """Return the plan with compile=False, and tell the user if that is a change."""
    if plan.compile:
        notify("compile is left out: the modules are compared as they are written")
    return replace(plan, compile=False)


def _traces(
    program: CheckedProgram,
    forks: Forks,
    wanted: Sequence[tuple[CheckSpec, Draws | None]],
    places: Sequence[Sequence[WorkerSlot]],
    passes: Passes,
) -> list[ProgramTrace]:
    """Run the program once for each item of `wanted`, and return the traces in this order."""
    if not program.alone and places[0][0].device == "cpu" and wanted[0][1] is None:
        return [_in_this_process(program, spec, passes) for spec, _ in wanted]
    halt = Halt()
    forks.server(os.environ)  # started here, since the server ends with the thread that starts it

    def run(group: Sequence[tuple[CheckSpec, Draws | None]], slots: Sequence[WorkerSlot]) -> list[ProgramTrace]:
        listeners = Listeners(passes.begin(), hang_limit=HANG_LIMIT, idle=True)
        traces: list[ProgramTrace] = launch(
            _in_worker, (program.trace, group), slots, listeners=listeners, halt=halt, preload=forks
        )[0]
        return traces

    groups = [[each] for each in wanted] if program.alone else [wanted]
    with ThreadPoolExecutor(len(places)) as pool:
        begun = [pool.submit(run, group, slots) for group, slots in zip(groups, cycle(places), strict=False)]
        try:
            return [trace for each in begun for trace in each.result()]
        except BaseException:
            halt.at_once = True  # end the other runs, too, before the pool waits for them
            raise


def _in_worker(
    trace: Callable[[CheckSpec, Draws | None], ProgramTrace | None], passes: Sequence[tuple[CheckSpec, Draws | None]]
) -> list[ProgramTrace | None]:
    join()
    found = list[ProgramTrace | None]()
    for spec, draws in passes:
        if found:
            say_next_pass()
        found.append(trace(spec, draws))
    return found


def _in_this_process(program: CheckedProgram, spec: CheckSpec, passes: Passes) -> ProgramTrace:
    passes.begin()
    try:
        found = program.trace(spec, None)
        assert found is not None
        return found
    except MeshwiseError:
        raise
    except Exception as error:
        precision = "fp64" if spec.in_float64 else spec.plan.precision
        cause = f"one device, in {precision}, failed: {error_text(error)}"
        lines = [user_traceback(error).rstrip(), cause, *getattr(error, "__notes__", [])]
        raise WorkerFailed("\n".join(lines), rank=0) from error


def _job(options: CheckOptions, slots: Sequence[WorkerSlot], folder: Path) -> CheckedProgram:
    name = _find_job(options).name  # called here, too, to report errors before any worker starts
    plain = replace(options, notify=CheckOptions.notify, progress=CheckOptions.progress)
    return CheckedProgram(name, partial(_trace_job, plain, slots[0].device == "cpu", folder), alone=False)


def _trace_job(
    options: CheckOptions, on_cpu: bool, folder: Path, spec: CheckSpec, draws: Draws | None
) -> ProgramTrace | None:
    with nowhere(), scratch_files(_own_folder(folder, spec, draws)):
        job = _find_job(options)
        if draws is not None:
            return watch_job(job, spec, draws)
        trace = one_device(job, spec, "cpu" if on_cpu else join().world.device)
        return ProgramTrace(spec.plan, trace, len(trace.steps))


def _find_job(options: CheckOptions) -> Job:
    job = find_job(options.job, seed=options.seed, args=options.args)
    given = {name: value for name in ("batch_size", "seed") if (value := getattr(options, name)) is not None}
    return replace(job, model=partial(_uncompiled, job.model), **given)


def _uncompiled(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    uncompile(model)
    return unwrapped(model)


def _script(
    script: Path, options: CheckOptions, plan: Plan | None, slots: Sequence[WorkerSlot], folder: Path
) -> CheckedProgram:
    check_script(str(script), options)
    if plan is not None:
        check_fits(plan, World(size=len(slots), device=slots[0].device))
        check_for_scripts(plan)
        (folder / "plan.toml").write_text(plan_to_toml(plan), encoding="utf-8")
    if not can_lock():
        options.notify(NOT_KEPT)
    run = partial(run_script_file, script.resolve(), list(options.arguments))
    return CheckedProgram(script.name, partial(_trace_script, run, options.seed or 0, folder), alone=True)


def _trace_script(
    run: Callable[[], object], seed: int, folder: Path, spec: CheckSpec, draws: Draws | None
) -> ProgramTrace | None:
    """Run a script and return its trace."""
    if (folder / "plan.toml").exists():
        os.environ[PLAN_FILE] = str(folder / "plan.toml")
    own = _own_folder(folder, spec, draws)
    found: ProgramTrace | None = _in_scratch(own, partial(watch_script, run, spec, draws, seed))
    return found


def _own_folder(folder: Path, spec: CheckSpec, draws: Draws | None) -> Path:
    """Return a folder for the files that one run of the checked program writes."""
    side = "again" if spec.noise else "one" if draws is None else "many"
    return folder / f"{side}{64 if spec.in_float64 else ''}{'' if spec.cut else ' uncut'}"
