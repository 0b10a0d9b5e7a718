"""Stop a run for good: in a queue, cluster, or locally.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from meshwise.records import folder as names
from meshwise.records.lock import holder_of
from meshwise.records.run_list import find_run, jobs_of, tasks_of
from meshwise.schedulers import slurm
from meshwise.spec.errors import UsageError
from meshwise.spec.units import seconds_text

ROUND = 1.0  # seconds between two looks


def stop(parent: Path, word: str, say: Callable[[str], object], *, wait: float) -> None:
    """Ask a run to save and to end, and prevent further starts of it.

    word: the name of the run in `parent`, a part of the name, or its folder.
    say: called with lines for the user.
    wait: how many seconds to wait for its end.

    Raises UsageError for a run that has ended, or that cannot be reached from this host.
    """
    folder = find_run(parent, word)
    facts = names.read_run(folder)
    jobs = jobs_of(facts)
    if slurm.newest(jobs):
        _stop_job(folder, jobs[-1], say, wait)
    elif facts.get("status") == names.RUNNING:
        _stop_here(folder, say, wait)
    elif facts.get("status") == names.QUEUED:
        _never_started(folder)
        say(f"{folder.name} is not in the queue, so it will not start.")
    else:
        raise UsageError(f"{folder.name} has ended already ({facts.get('status')}), so there is nothing to stop.")


def _stop_job(folder: Path, job: str, say: Callable[[str], object], wait: float) -> None:
    until, told, tasks = time.monotonic() + wait, set[str](), tasks_of(folder)
    for each in (folder, *tasks):  # whatever ends the job now: its script and its next start look for this
        (each / names.STOP).touch()
    if tasks:
        slurm.cancel_waiting(job)
    while found := slurm.queued(job):
        new = found.state not in told
        told.add(found.state)
        if found.state == slurm.PENDING and new:  # never begun, or it waits for its next start
            slurm.cancel_waiting(job)
            say(f"Slurm job {job} was waiting in the queue. It is cancelled.")
        if found.state == slurm.RUNNING and new:
            slurm.tell(job, "TERM")
            say(f"Slurm job {job} is running. It was asked to save and to end.")
        if time.monotonic() > until:
            say(f"Slurm job {job} is still {found.state} after {seconds_text(wait)}; to end it at once: scancel {job}")
            return
        time.sleep(ROUND)
    if names.read_run(folder).get("status") == names.QUEUED:
        _never_started(folder)
    say(f"{folder.name}: {names.read_run(folder).get('status')}.")


def _never_started(folder: Path) -> None:
    (folder / names.STOP).touch()
    names.change_run(folder, status="stopped")


def _stop_here(folder: Path, say: Callable[[str], object], wait: float) -> None:
    held = holder_of(folder)
    if held is None:
        raise UsageError(f"{folder.name}: the process of this run is not known. Press Ctrl-C where it was started.")
    host, process = held
    if host != socket.gethostname():
        raise UsageError(f"{folder.name} runs on {host}, in process {process}. Run meshwise stop on that machine.")
    os.kill(process, signal.SIGINT)
    say(f"{folder.name}: asked to save and to end.")
    until = time.monotonic() + wait
    while names.read_run(folder).get("status") == names.RUNNING and time.monotonic() < until:
        time.sleep(ROUND / 10)
    say(f"{folder.name}: {names.read_run(folder).get('status')}.")
