"""Run a function, a job or a script on every device.

A job and a script are both a `Program`: they differ in what each worker calls.
Tested in tests/cli, tests/workers/test_launchers.py and tests/faults.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.api.supervise import Viewer, summarise, supervise
from meshwise.jobs.registry import find_job
from meshwise.jobs.script import run_script_file
from meshwise.machine.find import describe, find_devices
from meshwise.parallel.apply import check_fits
from meshwise.records import folder as names
from meshwise.records.files import write_text
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError
from meshwise.spec.options import refuse_options_of_jobs, takes
from meshwise.spec.plan import Plan, plan_to_toml
from meshwise.spec.world import World
from meshwise.timeline.analyse import report_of
from meshwise.timeline.read import read_timeline
from meshwise.timeline.run_summary import RunSummary, summary_dict
from meshwise.timeline.views.live_progress import LiveView
from meshwise.timeline.views.summary_text import summary_text
from meshwise.training.block_spans import BLOCKS
from meshwise.training.job import Job
from meshwise.training.loop import run_job
from meshwise.training.plan_choice import PLAN_FILE, check_for_scripts
from meshwise.training.recording import versions
from meshwise.training.run_options import RunOptions
from meshwise.training.session import process_engine
from meshwise.transfer.collectives import broadcast_object, gather_objects
from meshwise.workers.join import join, started_by_launcher
from meshwise.workers.launch import Listeners
from meshwise.workers.launch import launch as launch_workers
from meshwise.workers.nodes import Nodes


def launch(function: Callable[..., Any], *arguments: Any, devices: str = "all") -> list[Any]:
    """Call `function(*arguments)` once on every device, each in a process of its own that is joined to the others.

    The function travels by value, so one that is defined in a notebook cell works. Returns the results in rank order.
    Rank 0's output is shown. Raises WorkerFailed with the culprit's traceback when a worker fails.
    """
    slots = find_devices(parse_devices(devices))
    return launch_workers(_joined, (function, arguments), slots, listeners=Listeners(output=_show))


@takes(RunOptions)
def run(options: RunOptions) -> RunSummary:
    """Train a job on the devices, show its progress, and keep its records in a new run folder.

    The job is a Job or a word as on the command line (`mnist-mlp`, `train.py:job`), the plan a Plan or a plan file.
    Raises UsageError for what cannot be run, WorkerFailed when a worker fails.
    """
    return start_job(options, Console())[0]


@dataclass(frozen=True)
class Program:
    """What a run runs.

    plan: None leaves it to a script. call: what each worker calls with the run folder. record: what run.json keeps.
    """

    name: str
    plan: Plan | None
    call: Callable[[Path], Any]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Started:
    """A program with its folder, and the workers and machines that it runs on."""

    program: Program
    folder: Path
    slots: Sequence[WorkerSlot]
    nodes: Nodes | None = None

    @property
    def keeps_record(self) -> bool:
        """Whether this machine writes what there is one of in the folder."""
        return names.is_kept_by(self.folder, self.nodes.node_rank if self.nodes else 0)


def start_job(options: RunOptions, console: Console, began: float | None = None) -> tuple[RunSummary, int]:
    """Run the job of the options: in workers of our own, or in this process where another launcher started it.

    began: when the user asked for it (seconds since 1970), if that was earlier than now.
    Returns the summary and the exit code: 0, or 128 and the number of the signal that stopped the run.
    """
    if options.resume is not None:
        options = options.resumed(names.read_run(Path(options.resume)))
    if options.job is None:
        raise UsageError("no job is given. Use meshwise run mnist-mlp, or meshwise run file.py:name.")
    if started_by_launcher():
        return _run_joined(options, console), 0
    job = _job_of(options)  # here too: what is wrong is reported before any worker starts
    started = _start(partial(_job_program, job, options), options, began or time.time())
    results, code = _supervise(started, console)
    return _finish(started, results, console, keep=started.keeps_record), code


def start_script(arguments: Sequence[str], options: RunOptions, console: Console, began: float | None = None) -> int:
    """Run a script on every device, as `python script.py` runs it on one. Returns the exit code.

    arguments: the script's own. Raises WorkerFailed when a worker fails.
    """
    script = Path(str(options.job))
    refuse_options_of_jobs(script.name, options)
    if not script.is_file():
        raise UsageError(f"{script}: no such file. Name a Python file.")
    if started_by_launcher():
        if options.gives_plan:
            raise UsageError(
                f"--plan and --set have no effect under torchrun, srun or mpirun. Set {PLAN_FILE}=plan.toml in the "
                "environment of the script instead."
            )
        _script_in_worker(script, arguments, options, None)
        return 0
    started = _start(partial(_script_program, script, arguments, options), options, began or time.time())
    _, code = _supervise(started, console)
    report = report_of(read_timeline(started.folder), str(started.folder))
    lines = [report.verdict] if report.steps else []
    lines += [f"records     {started.folder}", f"more with   meshwise report {shlex.quote(str(started.folder))}"]
    print("\n".join(lines), file=sys.stderr)
    return code


def _job_program(job: Job, options: RunOptions, world: World) -> Program:
    plan = options.plan_on(world.size)
    check_fits(plan, world)  # before there is a folder
    return Program(job.name, plan, partial(_job_in_worker, options), {"request": options.record()})


def _job_in_worker(options: RunOptions, folder: Path) -> dict[str, Any]:
    _record_blocks(options)
    return run_job(_job_of(options), options, folder)


def _job_of(options: RunOptions) -> Job:
    if isinstance(options.job, Job):
        return options.override(options.job)
    assert options.job is not None
    data = None if options.data is None else Path(options.data)
    return options.override(find_job(options.job, data=data, seed=options.seed))


def _script_program(script: Path, arguments: Sequence[str], options: RunOptions, world: World) -> Program:
    plan = options.plan_on(world.size) if options.gives_plan else None
    if plan is not None:
        check_fits(plan, world)
        check_for_scripts(plan)
    call = partial(_script_in_worker, script.resolve(), list(arguments), options)
    return Program(str(script), plan, call, {"arguments": list(arguments)})


def _script_in_worker(script: Path, arguments: Sequence[str], options: RunOptions, folder: Path | None) -> None:
    _record_blocks(options)
    if folder is not None and options.gives_plan:
        os.environ[PLAN_FILE] = str((folder / names.PLAN).resolve())
    run_script_file(script, arguments)
    if options.gives_plan and not process_engine().has_applied:
        process_engine().notify(
            f"{script.name} gave mw.distribute no model, so the plan changed nothing: every worker ran it by itself."
        )


def _record_blocks(options: RunOptions) -> None:
    if options.blocks:
        os.environ[BLOCKS] = "1"


def _start(make: Callable[[World], Program], options: RunOptions, began: float) -> Started:
    """Meet the other machines, make the program for all devices together, and open its run folder."""
    slots = worker_slots(options)
    several = options.nnodes != 1 or options.node_rank or options.rdzv
    nodes = options.rendezvous(len(slots)) if several else None
    size = nodes.size if nodes else len(slots)
    program = make(World(size=size, device=slots[0].device))
    return _opened(program, options, slots, nodes, began)


def worker_slots(options: RunOptions) -> list[WorkerSlot]:
    """The devices that were named; else the accelerators, or those that a plan file needs; else its CPU workers."""
    every = find_devices(parse_devices(options.devices or "all"))
    if options.devices is not None or options.nnodes > 1 or not options.gives_plan:
        return every
    needs, kind = options.plan_on(len(every)).devices, every[0].device
    fewer = options.plan is not None and needs < len(every)
    return find_devices(parse_devices(f"{needs}x{kind}")) if kind == "cpu" or fewer else every


def _opened(
    program: Program, options: RunOptions, slots: Sequence[WorkerSlot], nodes: Nodes | None, began: float
) -> Started:
    """The run folder, new or resumed, with the record of what runs in it: one of the same name on every machine.

    Machines that share a disk share the folder; the first of them keeps its run.json.
    """
    machine, out = nodes.node_rank if nodes else 0, Path(options.out)
    if options.resume is not None:
        folder = Path(options.resume)
    elif nodes is None or machine == 0:
        folder = names.create_run_folder(out, program.name)
    else:
        folder = out / str(nodes.get("folder"))
        folder.mkdir(parents=True, exist_ok=True)
    started = Started(program, folder, slots, nodes)
    if started.keeps_record:
        facts = {"job": program.name, "devices": [slot.name for slot in slots], "machine": machine}
        facts |= {"world": nodes.size if nodes else len(slots), "versions": versions(), **program.record}
        names.begin_session(folder, began, **facts)
    if program.plan is not None:  # on every machine: a script's workers read it in their own folder
        write_text(folder / names.PLAN, plan_to_toml(program.plan))
    if nodes is not None and machine == 0:
        nodes.set("folder", folder.name)
    return started


def _supervise(started: Started, console: Console) -> tuple[list[Any], int]:
    program, slots = started.program, started.slots
    plan = "" if program.plan is None else f"{program.plan}  "
    line = f"{Path(program.name).name}  {plan}{describe(slots)}"
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    folder, nodes = started.folder, started.nodes
    return supervise(program.call, (folder,), slots, folder=folder, console=console, nodes=nodes)


def _finish(started: Started, results: Sequence[dict[str, Any]], console: Console, *, keep: bool) -> RunSummary:
    """The summary of a job's run, shown, and kept in the folder."""
    folder = started.folder
    summary = summarise(results, repr(started.program.plan), started.slots, folder)
    if keep:
        write_text(folder / names.SUMMARY, json.dumps(summary_dict(summary), indent=2) + "\n")
        if names.read_run(folder)["status"] == "running":  # another launcher started the workers
            names.end_session(folder, summary.status)
    console.print(summary_text(summary, None), soft_wrap=True)
    return summary


def _run_joined(options: RunOptions, console: Console) -> RunSummary:
    """Run in this process, one of those that torchrun, srun or mpirun started."""
    session = join()
    world, first = session.world, session.world.rank == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, session.gate.want)
    job = _job_of(options)
    program = _job_program(job, options, world)
    slots = [WorkerSlot(world.kind, None, (), 1)] * world.size
    opened = _opened(program, options, slots, None, time.time()).folder if first else None
    folder = broadcast_object(opened)
    assert folder is not None
    _record_blocks(options)
    viewer = Viewer(LiveView(console), [f"rank {r}" for r in range(world.size)], live=False)
    results = gather_objects(run_job(job, options, folder, viewer.send if first else None))
    started = Started(program, folder, slots)
    return _finish(started, results, console if first else Console(quiet=True), keep=first)


def _joined(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    join()
    return function(*arguments)


def _show(stream: str, text: str) -> None:
    print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
