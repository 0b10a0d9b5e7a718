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
    """Raised if a command of the scheduler fails or does not answer in time."""


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue.

    state: `PENDING`, `RUNNING` and so on.
    reason: why the job waits, such as `Priority`.
    """

    job: str
    state: str
    reason: str
    partition: str


def is_here() -> bool:
    """Return whether this machine has `sbatch`, with which jobs are submitted."""
    return shutil.which("sbatch") is not None


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables. Inside a job, sbatch would pass them on to the new job."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def send(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a batch script with sbatch. Return its job number. Raises SchedulerError with sbatch's message."""
    said = _asked(["sbatch", "--parsable", *options, str(script)])
    return said.strip().partition(";")[0]


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Return the queue entries of these jobs by job number. Only jobs that wait or run have an entry. For a job array,
    this is the entry of a running task if there is one, else the entry of the waiting tasks. If squeue fails, the dict
    is empty."""
    wanted = set(jobs)
    rows = [line.strip().split("|") for line in _queue().splitlines() if line.count("|") == 3] if wanted else []
    there = [Queued(*row) for row in rows if row[1] not in OVER]
    found = {job: sorted((one for one in there if _is_of(one.job, job)), key=_waits) for job in wanted}
    return {job: mine[0] for job, mine in found.items() if mine}


def _waits(one: Queued) -> bool:
    return one.state != RUNNING


def _is_of(row: str, job: str) -> bool:
    """Return whether a row of squeue belongs to `job`, the number of a job or of a task of a job array."""
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
    """Return the queue entry of a job. Return None if the job is not in the queue.

    A job array may have several entries. The entry of a running task is returned, or else an entry of waiting tasks.
    """
    return queue([job]).get(job)


def answers() -> bool:
    """Return True if squeue can be called on this machine and answers."""
    return bool(_queue())


def _queue() -> str:
    """Return what squeue prints, with a header line first. An empty string if squeue is missing or fails."""
    if shutil.which("squeue") is None:
        return ""
    try:
        return _asked(["squeue", "--all", "--format", "%i|%T|%r|%P"], patience=5.0)
    except SchedulerError:
        return ""


def newest(jobs: Sequence[str]) -> Queued | None:
    """Return the queue entry of a run's newest job. Returns None if the run has no job, or if the job has left the
    queue."""
    return queued(jobs[-1]) if jobs else None


def cancel_waiting(job: str) -> None:
    """Cancel a job if it waits in the queue. Of a job array, cancel the waiting tasks."""
    _asked(["scancel", f"--state={PENDING}", job])


def tell(job: str, signal: str) -> None:
    """Send a signal to the steps of a running job, but not to its batch script. signal: a name such as `TERM`."""
    _asked(["scancel", f"--signal={signal}", job])


def _asked(command: Sequence[str], patience: float = PATIENCE) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, env=clean_environment(os.environ)
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed here. Run meshwise where Slurm is installed.") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer in {patience:.0f} s. Check Slurm's controller.") from None
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'ended with exit code {done.returncode}'}")
    return done.stdout
