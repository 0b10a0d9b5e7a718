"""Let a run save and end for good: `meshwise stop`."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from meshwise.launcher.commands.runs import FOLDER, NAME
from meshwise.launcher.engines import kubectl, slurm
from meshwise.records import folder as names
from meshwise.records.lock import holder_of
from meshwise.records.run_list import MANIFEST, find_run, jobs_of, tasks_of
from meshwise.spec.durations import seconds_of
from meshwise.spec.errors import UsageError
from meshwise.spec.units import seconds_text

ROUND = 1.0  # seconds between two polls
app = typer.Typer(add_completion=False)


@app.command()
def stop(
    run: Annotated[str, NAME],
    folder: Annotated[str, FOLDER] = "runs",
    wait: Annotated[str, typer.Option(metavar="TIME", help="how long to wait for the run to end")] = "5min",
) -> None:
    """Let a queued or running run save its state and end, and prevent further starts, wherever it runs.

    \b
    meshwise stop 20261121-140502-gpt        stop the run of this name
    meshwise stop gpt --wait 10min           wait longer, as saving takes long
    meshwise stop gpt --in /shared/me/runs   stop a run of another folder

    Later, meshwise submit RUN or meshwise run --resume RUN continues the run.
    """
    found, seconds = find_run(Path(folder), run), seconds_of(wait, "--wait")
    facts = names.read_run(found)
    jobs = jobs_of(facts)
    if load := kubectl.workload_of(jobs):
        _stop_pods(found, load, seconds)
    elif slurm.newest(jobs):
        _stop_job(found, jobs[-1], seconds)
    elif facts.get("status") == names.RUNNING:
        _stop_here(found, seconds)
    elif facts.get("status") == names.QUEUED:
        (found / names.STOP).touch()
        print(f"{found.name} is not in the queue, so it will not start.")
    else:
        raise UsageError(f"{found.name} has ended already ({facts.get('status')}), so there is nothing to stop.")
    if names.read_run(found).get("status") == names.QUEUED:  # not begun, or the folder with its state is elsewhere
        names.change_run(found, status="stopped")
    print(f"{found.name}: {names.read_run(found).get('status')}.")


def _stop_job(folder: Path, job: str, wait: float) -> None:
    until, told, tasks = time.monotonic() + wait, set[str](), tasks_of(folder)
    for each in (folder, *tasks):  # the batch script and the run's next start check for this file
        (each / names.STOP).touch()
    if tasks:
        slurm.cancel_waiting(job)
    while found := slurm.newest([job]):
        new = found.state not in told
        told.add(found.state)
        if found.state == slurm.PENDING and new:  # the job has not begun, or it waits for its next start
            slurm.cancel_waiting(job)
            print(f"Slurm job {job} was waiting in the queue. It is cancelled.")
        if found.state == slurm.RUNNING and new:
            slurm.tell(job, "TERM")
            print(f"Slurm job {job} is running. It was asked to save and to end.")
        if time.monotonic() > until:
            print(f"Slurm job {job} is still {found.state} after {seconds_text(wait)}. To end it: scancel {job}")
            return
        time.sleep(ROUND)


def _stop_pods(folder: Path, load: kubectl.Workload, wait: float) -> None:
    state = kubectl.states([load]).get(load)
    if state is not None and state.is_over:
        raise UsageError(f"{folder.name} has ended already ({state.status}), so there is nothing to stop.")
    print(f"{load} is deleted, so that its pods save and end, and no others start.", flush=True)
    if not kubectl.delete(load, folder / MANIFEST, wait):
        print(f"Its pods are still ending after {seconds_text(wait)}: kubectl get pods -n {load.namespace}")


def _stop_here(folder: Path, wait: float) -> None:
    held = holder_of(folder)
    if held is None:
        raise UsageError(f"{folder.name}: the process of this run is not known. Press Ctrl-C where it was started.")
    host, process = held
    if host != socket.gethostname():
        raise UsageError(f"{folder.name} runs on {host}, in process {process}. Run meshwise stop on that machine.")
    os.kill(process, signal.SIGINT)
    print(f"{folder.name}: asked to save and to end.")
    until = time.monotonic() + wait
    while names.read_run(folder).get("status") == names.RUNNING and time.monotonic() < until:
        time.sleep(ROUND / 10)
