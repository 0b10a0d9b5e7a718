"""Run a function or a job on every device."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise import launcher
from meshwise.hardware.find import find_devices
from meshwise.launcher.placing import continued, placed
from meshwise.launcher.start import start, supervised, worker_slots
from meshwise.launcher.supervise import LaunchedProgram, Started, Viewer, summarise
from meshwise.parallel.fits import check_fits
from meshwise.records import folder as names
from meshwise.records.checkpoints import run_and_checkpoint
from meshwise.records.claims import write_of
from meshwise.reports.views.live_progress import LiveView
from meshwise.reports.views.run_text import RunSummary, summary_text
from meshwise.spec.devices import parse_devices
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import DONE, code_of_stop
from meshwise.spec.json_values import json_value
from meshwise.spec.options import takes
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import PREDICTED, plan_from_toml
from meshwise.spec.prediction import prediction_in
from meshwise.spec.world import World
from meshwise.terminal.notebook import shown_by
from meshwise.training import process
from meshwise.training.job.job import Job
from meshwise.training.job.options import AUTO, PRELOAD, PlanText, RunOptions
from meshwise.workers.channel import Message
from meshwise.workers.environment import loaded_with
from meshwise.workers.fork_server import Forks
from meshwise.workers.launch import launch as launch_workers
from meshwise.workers.place import place_in
from meshwise.workers.watched import Listeners

shown_by(RunSummary, summary_text)


def launch(
    function: Callable[..., Any], *arguments: Any, devices: str = "all", out: str | Path | None = None
) -> list[Any]:
    """Call `function(*arguments)` in one process per device, all in one process group, and return the results by rank.

    The function is sent by value, so it may be defined in a notebook cell. The output of rank 0 is shown.

    out: where to make a run folder, which `mw.report(FOLDER)` reads. None keeps no records.

    Raises WorkerFailed if a worker fails, with the traceback of the worker that failed first.
    """
    slots, listeners = find_devices(parse_devices(devices)), Listeners(_note, _show)
    if out is None:
        return launch_workers(_joined, (function, arguments), slots, listeners=listeners)
    name = getattr(function, "__name__", "launch")
    folder, call = names.create_run_folder(Path(out), name), partial(_joined, function, arguments)
    facts = {"devices": [slot.name for slot in slots], "world": len(slots), "versions": names.versions()}
    names.begin_session(folder, time.time(), job=name, **facts)
    try:
        results = launch_workers(call, (), slots, folder=folder, listeners=listeners)
    except BaseException as error:
        names.end_session(folder, "failed" if isinstance(error, WorkerFailed) else "stopped", str(error))
        raise
    names.end_session(folder, "finished")
    return results


@takes(RunOptions)
def run(options: RunOptions) -> RunSummary:
    """Train a job on the devices, show its progress, and keep its records in a new run folder.

    The job is a Job, or a word as on the command line (`mnist-mlp`, `train.py:job`). The plan is a Plan or a plan file.
    Raises UsageError if the job cannot be run, WorkerFailed if a worker fails.
    """
    return start_job(options, Console())[0]


def start_job(
    options: RunOptions,
    console: Console,
    began: float | None = None,
    starts: Callable[[RunOptions], object] = lambda options: None,
) -> tuple[RunSummary, int]:
    """Run a job in workers, or in this process under torchrun or the like.
    Return the summary and the exit code."""
    if options.resume is not None:
        options = options.resumed(names.read_run(run_and_checkpoint(Path(options.resume))[0]))
    if options.folder is not None:
        options = continued(options)
    if options.job is None:
        raise UsageError("meshwise run needs a job. Use meshwise run mnist-mlp, or meshwise run file.py:name.")
    if options.plan == AUTO:
        options = launcher.auto.with_plan(options, console)
    began = began or time.time()
    options, joined = placed(options)
    if joined:
        return _run_joined(options, console, began)
    starts(options)
    with contextlib.closing(Forks(PRELOAD)) as forks:
        job = _read(options, forks)  # errors are reported before any worker starts
        started = start(partial(_job_program, job, options), options, began)
        results, code = supervised(started, console, options.seconds_left(began), forks)
    if None in results:
        text = f"{job.name} called sys.exit(0) on every rank before its end: no weights were saved."
        if started.keeps_record:
            names.end_session(started.folder, "failed", text)
        raise WorkerFailed(text)
    once = place_in(os.environ).one_a_node and not started.keeps_record  # nodes share one output, so only one prints
    return _finish(started, results, Console(quiet=True) if once else console, keep=started.keeps_record), code


@dataclass(frozen=True)
class Named:
    """What the launcher needs to know about a job: its name and its global batch size."""

    name: str
    batch_size: int


def _read(options: RunOptions, forks: Forks) -> Named:
    """Return the job's name and batch size. If this process has not imported torch, a forked process reads the job."""
    slot = worker_slots(options)[0]  # imports torch if it has to look for accelerators
    alone = isinstance(options.job, Job) or "torch" in sys.modules
    server = None if alone else forks.server(os.environ | loaded_with(slot))
    return Named(*(_named(options) if server is None else server.call(_named, options)))


def _named(options: RunOptions) -> tuple[str, int]:
    job = _job_of(options)
    return job.name, job.batch_size


def _job_program(job: Named, options: RunOptions, world: World) -> LaunchedProgram:
    plan = options.plan_on(world.size)
    check_fits(plan, world)  # checked before a folder is created
    record = {"request": options.record(), **predicted_of_run(options, job, plan)}
    call = partial(_job_in_worker, options)
    resumes = options.folder is not None and names.saved_step(Path(options.folder)) is not None
    return LaunchedProgram(job.name, plan, partial(call, resumes=resumes), record, again=call)


def predicted_of_run(options: RunOptions, job: Named, plan: Plan) -> dict[str, Any]:
    """Return run.json's entry about the prediction in the plan file, or {} if the file has none."""
    if not isinstance(options.plan, PlanText) or (predicted := prediction_in(options.plan.text)) is None:
        return {}
    of = predicted.job, predicted.batch_size, plan_from_toml(options.plan.text, plan.devices)
    if of == (job.name, job.batch_size, plan):
        return {PREDICTED: json_value(predicted)}
    told = f"{of[0]} with a global batch of {of[1]} and {of[2]}"
    return {PREDICTED: f"The prediction of the plan file is not shown: it belongs to {told}."}


def _job_in_worker(options: RunOptions, folder: Path, plan: str = "", resumes: bool = False) -> dict[str, Any]:
    """Run the job. plan: another plan, as TOML. resumes: whether to begin from the newest saved state of the folder."""
    if plan:
        options = replace(options, plan=PlanText(plan), settings=())
    if resumes:
        options = replace(options, resume=folder)
    return launcher.training.run_job(_job_of(options), options, folder)


def _job_of(options: RunOptions) -> Job:
    assert options.job is not None
    return options.override(launcher.training.find_job(options.job, seed=options.seed, args=options.args))


def _finish(started: Started, results: Sequence[dict[str, Any]], console: Console, *, keep: bool) -> RunSummary:
    """Summarize a job's run, and show the summary."""
    folder = started.folder
    plan, slots = started.restarts.plan_now or started.program.plan, started.slots[: len(results)]
    summary = summarise(results, repr(plan), slots, folder)
    if keep:
        content = json.dumps(json_value(summary), indent=2) + "\n"
        write_of(folder, started.restarts.number, folder / names.SUMMARY, lambda file: file.write(content.encode()))
    console.print(summary_text(summary, None), soft_wrap=True)
    return summary


def _run_joined(options: RunOptions, console: Console, began: float) -> tuple[RunSummary, int]:
    """Run the job in this process, which torchrun, srun or mpirun has started as one of several."""
    job = _job_of(options)
    program = partial(_job_program, Named(job.name, job.batch_size), options)
    with launcher.joined.joined_run(program, options, began) as started:
        session = launcher.training.join()
        leads = session.world.rank == 0
        launcher.training.agree_to_stop(session.world, session.gate, interrupts=True)
        if options.folder is not None and names.saved_step(started.folder) is not None:
            options = replace(options, resume=started.folder)
        viewer = Viewer(LiveView(console), started, session.gate, live=False)
        call = partial(launcher.training.run_job, job, options, send=viewer.send if leads else None)
        results = launcher.training.gather_objects(started.restarts.attempted(call)())
    summary = _finish(started, results, console if leads else Console(quiet=True), keep=leads)
    return summary, code_of_stop(session.gate.signal) if results[0]["status"] == "stopped" else DONE


def _joined(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    launcher.training.join()
    try:
        return function(*arguments)
    finally:
        process.session.program_ends()


def _note(rank: int, message: Message) -> None:
    if message["kind"] == "note":
        _show("stderr", f"{message['text']}\n")


def _show(stream: str, text: str) -> None:
    print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
