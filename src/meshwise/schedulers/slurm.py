"""Call Slurm's commands: submit, query, cancel.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.errors import MeshwiseError, UsageError

PATIENCE = 30.0  # seconds for an answer of the controller
PENDING, RUNNING = "PENDING", "RUNNING"
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


class SchedulerError(MeshwiseError):
    """The scheduler refused, or did not answer."""


@dataclass(frozen=True)
class Queued:
    """A job in the queue. state: `PENDING`, `RUNNING`. reason: why it waits: `Priority`. partition: of the cluster."""

    job: str
    state: str
    reason: str
    partition: str


def is_here() -> bool:
    """Check whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove Slurm's variables of the step in which this shell runs from the environment: sbatch would pass them on."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def send(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a script to the queue; return its job number. Raises SchedulerError with sbatch's message."""
    said = _asked(["sbatch", "--parsable", *options, str(script)])
    return said.strip().partition(";")[0]


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Return those of the jobs that wait or run, by number; for an array a running one before those that wait. Empty if
    the queue cannot be asked."""
    wanted = set(jobs)
    rows = [line.strip().split("|") for line in _queue().splitlines() if line.count("|") == 3] if wanted else []
    there = [Queued(*row) for row in rows if row[1] not in OVER]
    found = {job: sorted((one for one in there if _is_of(one.job, job)), key=_waits) for job in wanted}
    return {job: mine[0] for job, mine in found.items() if mine}


def _waits(one: Queued) -> bool:
    return one.state != RUNNING


def _is_of(row: str, job: str) -> bool:
    """Check whether a line of the queue belongs to a job: `7`, a task `7_3` of an array, or waiting `7_[0-2,5%4]`."""
    array, _, tasks = row.partition("_")
    if job in (row, array):
        return True
    wanted, _, task = job.partition("_")
    if wanted != array or not tasks.startswith("[") or not task.isdigit():
        return False
    for part in tasks.strip("[]").partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            low, high, by = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            if int(task) in range(low, high + 1, by):
                return True
    return False


def queued(job: str) -> Queued | None:
    """Return the queue's entry for one job, for an array that of one of its tasks; None if it is not there."""
    return queue([job]).get(job)


def answers() -> bool:
    """Check whether the queue can be asked here."""
    return bool(_queue())


def _queue() -> str:
    """Return what squeue prints, a head line first; "" where it cannot be asked."""
    if shutil.which("squeue") is None:
        return ""
    try:
        return _asked(["squeue", "--all", "--format", "%i|%T|%r|%P"], patience=5.0)
    except SchedulerError:
        return ""


def newest(jobs: Sequence[str]) -> Queued | None:
    """Return the queue's entry for the last of a run's jobs; None if it has left the queue, or without jobs."""
    return queued(jobs[-1]) if jobs else None


def cancel_waiting(job: str) -> None:
    """Remove a waiting job from the queue for good; for an array the waiting tasks."""
    _asked(["scancel", f"--state={PENDING}", job])


def tell(job: str, signal: str) -> None:
    """Send a signal to the steps of a job, not to its script."""
    _asked(["scancel", f"--signal={signal}", job])


def _asked(command: Sequence[str], patience: float = PATIENCE) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, env=clean_environment(os.environ)
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not on this machine. Run the command where Slurm's commands are.") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} gave no answer in {patience:.0f} s: is Slurm's controller up?") from None
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'ended with exit code {done.returncode}'}")
    return done.stdout
