"""Save and stop before a known time limit ends the run.

The limit is `--time-limit`, or that of a Slurm job: SLURM_JOB_END_TIME, and what `squeue` says once a minute, since a
job's limit may change while the job runs. Rank 0 watches the clock, and asks for a stop when the time left is less than
one step and three saves take, as measured in this run. No signal from the scheduler is needed.
Tested in tests/workers/test_deadline.py and, on a real Slurm, in tests/workers/test_slurm.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from threading import Event

from meshwise.spec.units import seconds_text
from meshwise.workers.gate import StepGate
from meshwise.workers.launchers import slurm

LIMIT = "MESHWISE_DEADLINE"
"""The environment variable that holds the time at which `--time-limit` ends the run, in seconds since 1970."""
LOOK, ASK = 0.5, 60.0  # seconds between two looks at the clock, and two calls of squeue
ANSWER = 20.0  # seconds in which squeue answers, or is not asked for this time
SAVES = 3  # a save may meet one that is still being written, on a disk on which all ranks and jobs write at the end
UNKNOWN, SHARE = 20.0, 0.1
"""The guess before a save is measured: UNKNOWN seconds. SAVES saves take at most SHARE of the time that is left."""
LEAVES = 5.0  # seconds for the processes of a job to end once all is saved: last lines, the interpreter


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Tell the workers started inside the `with` block that the run must end after `seconds`. None sets no limit."""
    if seconds is not None:
        limit(seconds)
    try:
        yield
    finally:
        os.environ.pop(LIMIT, None)


def limit(seconds: float) -> None:
    """Set the time at which this process, and the processes that it starts, must end: `seconds` from now.

    The time is kept in an environment variable, which child processes inherit.
    """
    os.environ[LIMIT] = repr(time.time() + seconds)


def watch(
    gate: StepGate,
    ask: Callable[[], object],
    over: Event,
    environment: Mapping[str, str] = os.environ,
    left_of: Callable[[str], float | None] | None = None,
) -> None:
    """Wait until the time left for the run is just enough for a stop. Then call `ask` and return.

    If `over` is set before that, return without calling `ask`.

    gate: tells how long steps and saves take.
    ask: asks all ranks to stop.
    left_of: takes the id of a Slurm job, and returns the seconds left for it, or None if unknown. By default, squeue is
        called.
    """
    job = slurm.job_id(environment) if slurm.JOB in environment else ""
    text, left_of = environment.get("SLURM_JOB_END_TIME", ""), left_of or left_by_squeue
    end = float(text) if job and text.isdigit() else math.inf
    asked = time.time() - (0.0 if end < math.inf else ASK)
    guess = leaves = 0.0
    while not over.wait(LOOK):
        now = time.time()
        if job and now - asked >= ASK:
            asked, told = now, left_of(job)
            end = end if told is None else time.time() + told
        guess, leaves = guess or _guessed(end - now), leaves or _leaving(end - now)
        limits = [("the time limit", float(environment.get(LIMIT, "inf")), 0.0)]
        limits += [(f"job {job}", end - leaves, guess)] if gate.saves else []  # else to its last second
        for of, at, unknown in limits:
            left, need = at - time.time(), seconds_needed(gate, unknown)
            if left < need + LOOK:
                _say(left, of, gate, need - gate.longest_step)
                ask()
                return


def least_limit(step: float, limit: float) -> float:
    """Return the shortest time limit, in seconds, in which a run can make one step, save its state and end.

    step: the seconds of a step.
    limit: the time limit that the user gave, in seconds. How long a save takes is not known yet, and is assumed to be
        at most a fixed share of this limit.
    """
    return step + SAVES * _guessed(limit) + _leaving(limit)


def _guessed(left: float) -> float:
    """Return how many seconds one save is assumed to take as long as no save was measured. left: the seconds left for
    the run."""
    return min(UNKNOWN, SHARE / SAVES * left)


def _leaving(left: float) -> float:
    return min(LEAVES, SHARE * left)


def _say(left: float, of: str, gate: StepGate, saves: float) -> None:
    step, measured = seconds_text(gate.longest_step), "" if gate.longest_save else ", none of which was measured"
    reckoned = f"a step ({step}) and {SAVES} saves ({seconds_text(saves)}{measured})" if saves else f"a step ({step})"
    print(f"{seconds_text(max(left, 0.0))} left of {of}, {reckoned} to come: stopping", file=sys.stderr, flush=True)


def seconds_needed(gate: StepGate, guess: float) -> float:
    """Return how many seconds a run needs to finish its current step and to stop."""
    return gate.longest_step + SAVES * ((gate.longest_save or guess) if gate.saves else 0.0)


def left_by_squeue(job: str) -> float | None:
    """Ask squeue how many seconds a Slurm job may still run."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return seconds_left(shown.stdout) if shown.returncode == 0 else None


def seconds_left(text: str) -> float | None:
    """Parse a duration as squeue prints it: `1-02:03:04`, `2:03:04`, `3:04` or `UNLIMITED`. Return the seconds.

    Returns infinity for `UNLIMITED`, and None for any other text.
    """
    if text.strip() == "UNLIMITED":
        return math.inf
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
