"""Open a program's run folder, and start it on every device.

This module does not import torch.

A job and a script are both a `LaunchedProgram`; they differ in the function that each worker calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.hardware.find import describe, find_devices
from meshwise.launcher.code_files import code_files
from meshwise.launcher.placing import ASKED
from meshwise.launcher.restarts import Restarts
from meshwise.launcher.supervise import LaunchedProgram, Started, supervise
from meshwise.records import folder as names
from meshwise.records.checkpoints import run_and_checkpoint
from meshwise.records.claims import newest, write_of
from meshwise.records.files import stay_in, write_text
from meshwise.records.lock import FolderLock
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.faults import faults_of
from meshwise.spec.plan_file import PREDICTED, plan_to_toml
from meshwise.spec.prediction import prediction_of, prediction_to_toml
from meshwise.spec.world import World
from meshwise.training.job.options import RESTARTS, RunOptions
from meshwise.workers.fork_server import Forks
from meshwise.workers.meeting import SAVED, Meeting
from meshwise.workers.place import place_in

OWN_OPTIONS = ("job", "devices", "log")
"""Options that may differ between machines, since they depend on the devices of each machine."""


def start(make: Callable[[World], LaunchedProgram], options: RunOptions, began: float) -> Started:
    """Meet the launchers of the other machines, make the program for the devices of all machines, and open its run
    folder."""
    slots = worker_slots(options)
    meeting = met(options, len(slots))
    with nullcontext() if meeting is None else meeting.shared_errors():
        program = make(World(size=meeting.size if meeting else len(slots), device=slots[0].device))
        if meeting is not None:
            meeting.compare(_compared(program, options))
        if program.sees_all:
            every = tuple(slot.index for slot in slots if slot.index is not None)
            slots = [replace(slot, sees=every) for slot in slots]
        return opened(program, options, slots, meeting, began)


def _compared(program: LaunchedProgram, options: RunOptions) -> dict[str, Any]:
    """Return what must be alike on all machines."""
    facts = {**options.record(), **program.record.get("request", {})}
    if options.folder is not None:
        facts[SAVED] = names.saved_step(Path(options.folder))
    facts |= {"plan": str(program.plan or ""), "arguments": program.record.get("arguments", [])}
    facts |= {f"file {path}": digest for path, digest in code_files(str(options.job)).items()}
    alike = {name: value for name, value in facts.items() if name not in OWN_OPTIONS}
    return alike | {"job": Path(program.name).name, "versions": names.versions()}


def met(options: RunOptions, local_size: int) -> Meeting | None:
    """Meet the launchers of the other machines, and wait until all are there. None on one machine."""
    found = place_in(os.environ)
    place = found if found.one_a_node else options.place()
    if place is None or options.nnodes == 1:
        return None
    options.refuse_restarts("on several machines")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch prints C++ frames as connections close
    meeting = Meeting(replace(place, address=options.address), local_size)
    meeting.meet()
    return meeting


def worker_slots(options: RunOptions) -> list[WorkerSlot]:
    """Return the worker slots for the devices that `--devices` names, or for as many as the plan needs."""
    every = find_devices(parse_devices(options.devices or "all"))
    if options.devices is not None or options.nnodes > 1 or not options.gives_plan:
        return every
    needs, kind = options.plan_on(len(every)).devices, every[0].device
    fewer = options.plan is not None and needs < len(every)
    return find_devices(parse_devices(f"{needs}x{kind}")) if kind == "cpu" or fewer else every


def _folder_of(program: LaunchedProgram, options: RunOptions, name: str | None) -> Path:
    """Return the folder of a run, new or resumed. name: the folder's name if another machine has chosen it, or
    None."""
    if options.resume is not None:
        return run_and_checkpoint(Path(options.resume))[0]
    if options.folder is not None:
        return names.own_run_folder(Path(options.folder))
    if name is None:
        return names.create_run_folder(Path(options.out), program.name)
    return names.own_run_folder(Path(options.out) / name)


def opened(
    program: LaunchedProgram,
    options: RunOptions,
    slots: Sequence[WorkerSlot],
    meeting: Meeting | None,
    began: float,
) -> Started:
    """Open the run folder of a program, new or resumed, and record in it what is run."""
    world = meeting.size if meeting else len(slots)
    told = meeting.get(0, "folder") if meeting and meeting.node else {}
    folder = _folder_of(program, options, told.get("name"))
    stay_in(folder)
    restarts = Restarts(
        folder,
        most=RESTARTS if options.restarts is None else options.restarts,
        resumable=program.again is not None,
        alone=meeting is None,
        command=options.on_failure,
        faults=faults_of(options.fault, world),
        number=told.get("attempt", 1),
        asked=program.plan,
    )
    kept = [path for path in (folder / names.RUN, folder / names.PLAN) if path.is_file()]
    before = {path: path.read_text(encoding="utf-8") for path in kept}
    shares = not told or newest(folder) == told["attempt"]
    started = Started(program, folder, slots, restarts, meeting, shares, before, options.hang_seconds())
    if meeting is None or meeting.node == 0 or not shares:
        number = _recorded(started, options, began, world, begins=not told)
        restarts.number = told.get("attempt", number)
    if program.plan is not None:  # on every machine: a script's workers read the plan in their machine's folder
        predicted = program.record.get(PREDICTED)
        table = prediction_to_toml(prediction_of(predicted)) if isinstance(predicted, Mapping) else ""
        content = (plan_to_toml(program.plan) + table).encode()
        write_of(folder, restarts.number, folder / names.PLAN, lambda file: file.write(content))
    if meeting is not None and meeting.node == 0:
        meeting.set("folder", {"name": folder.name, "attempt": restarts.number})
    return started


def _recorded(started: Started, options: RunOptions, began: float, world: int, *, begins: bool) -> int:
    """Lock the folder, record that an attempt begins there, and return the attempt's number."""
    program, folder, meeting = started.program, started.folder, started.meeting
    earlier = names.read_run(folder) if (folder / names.RUN).exists() else {}
    yields = _earlier_start_holds(earlier)
    started.lock = FolderLock(folder, claimed=yields)
    node = meeting.node if meeting else 0
    facts = {"job": program.name, "devices": [slot.name for slot in started.slots], "machine": node}
    facts |= {"world": world, "versions": names.versions(), **names.what_was_typed(), **program.record}
    if isinstance(options.job, str | Path):  # the source of a Job object is unknown
        facts["source"] = names.source_of(str(options.job))
    if options.folder is not None and ASKED not in earlier:
        facts[ASKED] = options.record()
    if yields or newest(folder) or (begins and (meeting is not None or options.folder is not None)):
        names.claim_session(folder, len(earlier.get("sessions", [])) + 1)
    return names.begin_session(folder, began, started.restarts.record(), **facts)


def _earlier_start_holds(run: Mapping[str, Any]) -> bool:
    """Return whether an earlier start of this scheduler job made the run's last attempt."""
    here = place_in(os.environ).record()
    sessions = run.get("sessions") if here else None
    last = sessions[-1] if sessions else {}
    return last.get("scheduler_job") == here.get("scheduler_job", "") and last.get("start", 0) < here.get("start", 0)


def supervised(
    started: Started, console: Console, limit: float | None = None, forks: Forks | None = None
) -> tuple[list[Any], int]:
    """Announce and run a program. Return the workers' results and the exit code."""
    program, slots = started.program, started.slots
    plan = "" if program.plan is None else f"{program.plan}  "
    meeting = started.meeting
    told = place_in(os.environ).told(started.world, meeting.nodes if meeting else 1)
    if started.first_rank == 0 or not told:  # under a launcher, all nodes share one output
        line = f"{Path(program.name).name}  {plan}{describe(slots, started.first_rank)}"
        console.print(f"{told}\n{line}".lstrip(), soft_wrap=not console.is_terminal, markup=False, highlight=False)
    try:
        return supervise(started, console, limit, forks)
    except WorkerFailed as error:
        refused = error.exit_code == UsageError.exit_code and started.restarts.attempt == 1
        if refused and started.keeps_record:
            for path, text in started.before.items():  # the program refused to start: restore the run's files
                write_text(path, text)
        raise
    finally:
        started.close()
