"""Slurm's own commands: send a script, ask for a job's state, end it. Tested in tests/cli/test_submit.py."""

from __future__ import annotations

import os
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
    """Whether jobs can be sent from this machine."""
    return shutil.which("sbatch") is not None


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what Slurm told of the step in which this shell runs: sbatch would hand it on."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def send(script: Path, options: Sequence[str] = ()) -> str:
    """Send a script to the queue; the number of its job. Raises SchedulerError with what sbatch says."""
    said = _asked(["sbatch", "--parsable", *options, str(script)])
    return said.strip().partition(";")[0]


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Those of the jobs that wait or run, by number. Where nothing can be asked: none."""
    wanted = set(jobs)
    rows = [line.strip().split("|") for line in _queue().splitlines() if line.count("|") == 3] if wanted else []
    return {row[0]: Queued(*row) for row in rows if row[0].partition("_")[0] in wanted and row[1] not in OVER}


def queued(job: str) -> Queued | None:
    """What the queue says of one job, of an array of one of its tasks; None where it is not there."""
    return next(iter(queue([job]).values()), None)


def answers() -> bool:
    """Whether the queue can be asked here."""
    return bool(_queue())


def _queue() -> str:
    """What squeue prints, a head line first; "" where it cannot be asked."""
    if shutil.which("squeue") is None:
        return ""
    try:
        return _asked(["squeue", "--all", "--format", "%i|%T|%r|%P"], patience=5.0)
    except SchedulerError:
        return ""


def cancel(job: str) -> None:
    """End a job for good."""
    _asked(["scancel", job])


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
