"""Call Slurm's commands: submit, query, cancel.

`asked` calls any command of a cluster, kubectl too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.errors import MeshwiseError, UsageError

PATIENCE = 30.0  # seconds to wait for an answer of the controller
PENDING, RUNNING = "PENDING", "RUNNING"
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


class SchedulerError(MeshwiseError):
    """Raised if a command of the scheduler fails or does not answer in time."""


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue."""

    job: str
    state: str
    reason: str
    partition: str


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables. Inside a job, sbatch would pass them on to the new job."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def send(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a batch script with sbatch. Return its job number. Raises SchedulerError with sbatch's message."""
    said = asked(["sbatch", "--parsable", *options, str(script)])
    return said.strip().partition(";")[0]


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Return the queue entries of these jobs by job number."""
    wanted = set(jobs)
    rows = [line.strip().split("|") for line in _queue().splitlines() if line.count("|") == 3] if wanted else []
    there = sorted((Queued(*row) for row in rows if row[1] not in OVER), key=lambda one: one.state == RUNNING)
    return {job: one for one in there for job in (one.job, one.job.partition("_")[0]) if job in wanted}


def answers() -> bool:
    """Return True if squeue can be called on this machine and answers."""
    return bool(_queue())


def _queue() -> str:
    """Return what squeue prints, a line for each task of an array, with a header line first."""
    with contextlib.suppress(MeshwiseError):
        return asked(["squeue", "--all", "--array", "--format", "%i|%T|%r|%P"], patience=5.0)
    return ""


def newest(jobs: Sequence[str]) -> Queued | None:
    """Return the queue entry of the last of a run's jobs, or None if it is not in the queue."""
    return queue(jobs[-1:]).get(jobs[-1]) if jobs else None


def cancel_waiting(job: str) -> None:
    """Cancel a job if it waits in the queue. If it is a job array, cancel its waiting tasks."""
    asked(["scancel", f"--state={PENDING}", job])


def tell(job: str, signal: str) -> None:
    """Send a signal to the steps of a running job, but not to its batch script. signal: a name such as `TERM`."""
    asked(["scancel", f"--signal={signal}", job])


def asked(command: Sequence[str], *, text: str | None = None, patience: float = PATIENCE) -> str:
    """Call a command with `text` as its input. Return what it prints. Raises SchedulerError with its message."""
    own = clean_environment(os.environ)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=patience, env=own)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed here. Run meshwise where it is.") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer in {patience:.0f} s. Check the cluster.") from None
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'ended with exit code {done.returncode}'}")
    return done.stdout
