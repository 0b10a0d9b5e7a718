"""Run a function, a job or a script on every device."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.jobs.registry import find_job
from meshwise.jobs.script import run_script_file
from meshwise.machine.find import describe, find_devices
from meshwise.parallel.fits import check_fits
from meshwise.records import folder as names
from meshwise.records.atomic import write_text
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan, plan_to_toml
from meshwise.spec.world import World
from meshwise.timeline.analyse import report_of
from meshwise.timeline.read import read_timeline
from meshwise.timeline.run_summary import RunSummary, summary_dict
from meshwise.timeline.views.live_progress import LiveView
from meshwise.timeline.views.summary_text import summary_text
from meshwise.training.job import Job
from meshwise.training.loop import run_job
from meshwise.training.own_plan import PLAN_FILE, check_for_own_loops
from meshwise.training.own_state import own, say
from meshwise.training.recording import versions
from meshwise.training.request import RunRequest, completed, plan_of, settings_of, to_record
from meshwise.training.settings import Settings, overridden
from meshwise.training.supervise import Viewer, summarise, supervise
from meshwise.transfer.collectives import broadcast_object, gather_objects
from meshwise.workers.join import join, started_by_launcher
from meshwise.workers.launch import Listeners
from meshwise.workers.launch import launch as launch_workers
from meshwise.workers.nodes import NodeOptions, Nodes, node_rank_of

RUNS = Path("runs")
ALONE = NodeOptions()


def launch(function: Callable[..., Any], *arguments: Any, devices: str = "all") -> list[Any]:
    """Call `function(*arguments)` once on every device, each in a process of its own that is joined to the others.

    The function travels by value, so one that is defined in a notebook cell works. Returns the results in rank order.
    Rank 0's output is shown. Raises WorkerFailed with the culprit's traceback when a worker fails.
    """
    slots = find_devices(parse_devices(devices))
    return launch_workers(_joined, (function, arguments), slots, listeners=Listeners(output=_show))


def run(
    job: Job | str | None = None,
    *,
    devices: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    precision: str | None = None,
    seed: int | None = None,
    data: str | Path | None = None,
    log_every: int | None = None,
    save_every: int | None = None,
    plan: Plan | None = None,
    exact_random: bool = False,
    resume: str | Path | None = None,
    out: str | Path = RUNS,
) -> RunSummary:
    """Train a job on the devices, show its progress, and keep its records in a new folder under `out`.

    job: a Job, or a word as on the command line (`mnist-mlp`, `train.py:job`). plan: by default replicas on all
    devices. The other arguments are those of `meshwise run`. Raises UsageError for what cannot be run, WorkerFailed
    when a worker fails.
    """
    word = job if isinstance(job, str) or job is None else job.name
    where = None if data is None else str(data)
    asked = RunRequest(word, devices, epochs, batch_size, accumulate, precision, seed, where, log_every, save_every)
    asked = replace(asked, plan=None if plan is None else plan_to_toml(plan), exact_random=exact_random or None)
    summary, _ = run_request(asked, Console(), given=job if isinstance(job, Job) else None, resume=resume, out=out)
    return summary


def run_request(
    request: RunRequest,
    console: Console,
    *,
    given: Job | None = None,
    resume: str | Path | None = None,
    out: str | Path = RUNS,
    machines: NodeOptions = ALONE,
    began: float | None = None,
) -> tuple[RunSummary, int]:
    """Run what was asked: in workers of our own, or in this process where another launcher started it.

    began: when the user asked for it (seconds since 1970), if that was earlier than now.
    Returns the summary and the exit code: 0, or 128 and the number of the signal that stopped the run.
    """
    began = began or time.time()
    folder = None if resume is None else Path(resume)
    if folder is not None:
        request = completed(request, names.read_run(folder))
    if request.job is None:
        raise UsageError("say what to run: meshwise run mnist-mlp, or meshwise run file.py:name.")
    if started_by_launcher():
        return _run_joined(request, console, given, folder, Path(out)), 0
    slots = _slots(request, machines)
    nodes = machines.rendezvous(len(slots))
    plan = plan_of(request, nodes.size if nodes else len(slots))
    check_fits(plan, World(size=nodes.size if nodes else len(slots), device=slots[0].device))  # before a folder
    settings = settings_of(request, plan, resume=folder is not None)
    job = overridden(given or _find(request), settings)  # here too: what is wrong is told before any worker starts
    folder = _opened(folder, Path(out), job.name, slots, began, nodes, plan, request=to_record(request))
    console.print(f"{job.name}  {plan}  {describe(slots)}", soft_wrap=True, markup=False, highlight=False)
    arguments = (given, request, settings, folder)
    results, code = supervise(_run_in_worker, arguments, slots, folder=folder, console=console, nodes=nodes)
    return _closed(results, plan, slots, folder, console, machine=node_rank_of(nodes)), code


def _slots(request: RunRequest, machines: NodeOptions) -> list[WorkerSlot]:
    """The devices that were named; else the accelerators, or those that a plan file needs; else its CPU workers."""
    every = find_devices(parse_devices(request.devices or "all"))
    if request.devices is not None or machines.nnodes > 1 or (request.plan is None and request.settings is None):
        return every
    needs, kind = plan_of(request, len(every)).devices, every[0].device
    fewer = request.plan is not None and needs < len(every)
    return find_devices(parse_devices(f"{needs}x{kind}")) if kind == "cpu" or fewer else every


def _run_joined(request: RunRequest, console: Console, given: Job | None, folder: Path | None, out: Path) -> RunSummary:
    """Run in this process, one of those that torchrun, srun or mpirun started."""
    session = join()
    world, first = session.world, session.world.rank == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, session.gate.want)
    plan = plan_of(request, world.size)
    settings = settings_of(request, plan, resume=folder is not None)
    job = given or _find(request)
    slots = [WorkerSlot(world.kind, None, (), 1)] * world.size
    if first:
        folder = _opened(folder, out, job.name, slots, time.time(), None, plan, request=to_record(request))
    folder = broadcast_object(folder)
    assert folder is not None
    viewer = Viewer(LiveView(console), [f"rank {r}" for r in range(world.size)], live=False)
    result = run_job(job, settings, folder, viewer.tell if first else None)
    results = gather_objects(result)
    return _closed(results, plan, slots, folder, console if first else Console(quiet=True), keep=first)


def _run_in_worker(given: Job | None, request: RunRequest, settings: Settings, folder: Path) -> dict[str, Any]:
    return run_job(given or _find(request), settings, folder)


def _find(request: RunRequest) -> Job:
    assert request.job is not None
    return find_job(request.job, data=Path(request.data) if request.data else None, seed=request.seed)


def _opened(
    folder: Path | None,
    out: Path,
    name: str,
    slots: Sequence[WorkerSlot],
    began: float,
    nodes: Nodes | None,
    plan: Plan | None = None,
    **facts: Any,
) -> Path:
    """The run folder, new or gone on with, that says what runs in it: one of the same name on every machine.

    Machines that share a disk share the folder; the first of them keeps its run.json.
    """
    machine = node_rank_of(nodes)
    if folder is None and (nodes is None or machine == 0):
        folder = names.create_run_folder(out, name)
    elif folder is None and nodes is not None:
        folder = out / str(nodes.get("folder"))
        folder.mkdir(parents=True, exist_ok=True)
    assert folder is not None
    if names.is_kept_by(folder, machine):
        devices = [slot.name for slot in slots]
        names.begin_session(
            folder,
            began,
            job=name,
            devices=devices,
            world=nodes.size if nodes else len(slots),
            machine=machine,
            versions=versions(),
            **facts,
        )
        if plan is not None:
            write_text(folder / names.PLAN, plan_to_toml(plan))
    if nodes is not None and machine == 0:
        nodes.set("folder", folder.name)
    return folder


def _closed(
    results: Sequence[dict[str, Any]],
    plan: Plan,
    slots: Sequence[WorkerSlot],
    folder: Path,
    console: Console,
    *,
    machine: int = 0,
    keep: bool = True,
) -> RunSummary:
    summary = summarise(results, plan, slots, folder)
    if keep and names.is_kept_by(folder, machine):
        write_text(folder / names.SUMMARY, json.dumps(summary_dict(summary), indent=2) + "\n")
        if names.read_run(folder)["status"] == "running":  # nobody supervised it: another launcher started it
            names.end_session(folder, summary.status)
    console.print(summary_text(summary, None), soft_wrap=True)
    return summary


def run_script(
    script: Path,
    arguments: Sequence[str],
    console: Console,
    *,
    request: RunRequest,
    out: Path = RUNS,
    machines: NodeOptions = ALONE,
    began: float | None = None,
) -> int:
    """Run an own-loop script on every device, as `python script.py` runs it on one. Returns the exit code.

    request: its devices, and the plan that `mw.distribute` carries out. Raises WorkerFailed when a worker fails.
    """
    if not script.is_file():
        raise UsageError(f"{script}: no such file. Name a Python file.")
    if started_by_launcher():
        _refuse_plan_of_a_joined_script(request)
        run_script_file(script, arguments)
        return 0
    slots = _slots(request, machines)
    nodes = machines.rendezvous(len(slots))
    plan = _plan_of_script(request, World(size=nodes.size if nodes else len(slots), device=slots[0].device))
    folder = _opened(None, out, str(script), slots, began or time.time(), nodes, arguments=list(arguments))
    words = "" if plan is None else f"{plan}  "
    console.print(f"{script.name}  {words}{describe(slots)}", soft_wrap=True, markup=False, highlight=False)
    if plan is not None:  # on every machine: workers read it in their own folder
        write_text(folder / names.PLAN, plan_to_toml(plan))
    file = None if plan is None else (folder / names.PLAN).resolve()
    task = (script.resolve(), list(arguments), file)
    _, code = supervise(_run_script_in_worker, task, slots, folder=folder, console=console, nodes=nodes)
    told = report_of(read_timeline(folder), str(folder))
    lines = [told.verdict] if told.steps else []
    lines += [f"records     {folder}", f"more with   meshwise report {shlex.quote(str(folder))}"]
    print("\n".join(lines), file=sys.stderr)
    return code


def _run_script_in_worker(script: Path, arguments: Sequence[str], plan: Path | None) -> None:
    if plan is not None:
        os.environ[PLAN_FILE] = str(plan)
    run_script_file(script, arguments)
    if plan is not None and own.plan is None:
        say(f"{script.name} gave mw.distribute no model, so the plan changed nothing: every worker ran it by itself.")


def _plan_of_script(request: RunRequest, world: World) -> Plan | None:
    """The plan that was asked for; None leaves it to the script. Raises PlanError before there is a folder."""
    if request.plan is None and request.settings is None:
        return None
    plan = plan_of(request, world.size)
    check_fits(plan, world)
    check_for_own_loops(plan)
    return plan


def _refuse_plan_of_a_joined_script(request: RunRequest) -> None:
    if request.plan is not None or request.settings is not None:
        raise UsageError(
            f"--plan and --set under torchrun, srun or mpirun: set {PLAN_FILE}=plan.toml in the environment of the "
            "script instead."
        )


def _joined(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    join()
    return function(*arguments)


def _show(stream: str, text: str) -> None:
    print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
