"""Stop all ranks after the same step, without a collective.

On a halt, each rank begins no further step and reports the last step that it began. The largest of these becomes the
last step of all ranks: ranks behind it catch up, ranks at it stop, so no rank waits in a collective for a rank that has
stopped earlier. Until a halt is asked for, this costs nothing. meshwise's launcher asks over the side channel; under
another launcher, the ranks agree in the store (stopping.py).

If no rank has begun a step, the script may never begin one: it gets SIGINT, the signal of a Ctrl-C.

Before a known time limit ends the run, rank 0 asks for such a stop (`watch_time`): when the time left is less than one
step and three saves take, as measured in this run. The limit is `--time-limit`, or the limit of a Slurm job:
SLURM_JOB_END_TIME, and what `squeue` says once a minute, since a job's limit may change while the job runs. No signal
from the scheduler is needed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from meshwise.spec.exit_codes import TIME_LIMIT, code_of_stop
from meshwise.spec.units import seconds_text
from meshwise.workers.channel import WorkerChannel
from meshwise.workers.places.slurm import JOB, job_id

WARM = 3  # first steps that are not timed: they compile, and create the optimizer's state
LIMIT = "MESHWISE_DEADLINE"
"""The environment variable that holds the time at which `--time-limit` ends the run, in seconds since 1970."""
LOOK, ASK = 0.5, 60.0  # seconds between checks of the clock, and between calls of squeue
ANSWER = 20.0  # timeout of squeue in seconds
SAVES = 3  # saves to leave time for: one in progress, and the last one twice, as it is slower while other jobs save
UNKNOWN, SHARE = 20.0, 0.1
"""Until a save is measured, it is assumed to take UNKNOWN seconds, but at most SHARE / SAVES of the time left."""
LEAVES = 5.0  # seconds for a job's processes to exit after the last save


class StepGate:
    """Counts the steps that this rank begins, and can stop all ranks after the same step. The loop calls `begin` before
    every step."""

    def __init__(self, channel: WorkerChannel | None = None) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._begun = 0
        self.halted = False
        """Whether the run was asked to stop, so that other ranks may have ended already."""
        self._last: int | None = None
        self.interrupts = False
        """Whether the program gets SIGINT if the run is stopped before any rank has begun a step."""
        self.interrupting = False
        """Whether this `StepGate` has sent SIGINT to the program. A Ctrl-C of the user does not change it."""
        self.signal = signal.SIGINT.value
        """The signal that asked for a stop. It is only valid in a process that meshwise's launcher did not start."""
        self.stopped_after: tuple[int, int | None] | None = None
        """The step and the epoch after which a stop ended the script's loop."""
        self.reached = threading.Event()
        """An event that is set once this rank has finished the agreed last step."""
        self.saves = False
        """Whether the state of the training is saved when a signal or the time limit stops the run."""
        self.longest_step = self.longest_save = 0.0
        """The longest time so far, in seconds: of a step until the next step begins, and of a save until the state is
        on the disk. The first steps of a process are left out, because they compile."""
        self._last_begun = 0.0
        self._channel = channel
        if channel is not None:
            channel.listeners["halt"] = lambda message: channel.send("halting", begun=self.freeze())
            channel.listeners["last"] = lambda message: self.set_last(int(message["step"]))

    @property
    def stopped(self) -> bool:
        """Whether this rank has finished the step after which all ranks have agreed to stop."""
        return self._last is not None and self._begun >= self._last

    def stop(self, step: int, epoch: int | None = None) -> BaseException:
        """Return the exception that a script's loop must raise once `begin` has returned False.

        step, epoch: the step and the epoch after which the loop ends.
        """
        self.stopped_after = step, epoch
        if self._channel is not None:
            self._channel.send("stopping", step=step, epoch=epoch, saves=self.saves)
            return KeyboardInterrupt("the run was asked to stop: every rank stops before the same batch")
        return SystemExit(code_of_stop(self.signal))

    def begin(self) -> bool:
        """Begin the next step and return True. If the agreed last step is over, return False. If the run was asked to
        stop, first wait until the ranks have agreed on the last step."""
        with self._lock:  # this is also the lock of `_changed`, but entering `_changed` would cost a Python call
            while self.halted and self._last is None:
                self._changed.wait()
            if self._last is not None and self._begun >= self._last:
                self.reached.set()
                return False
            self._begun += 1
        now = time.monotonic()
        if self._begun > WARM:
            self.longest_step = max(self.longest_step, now - self._last_begun)
        self._last_begun = now
        if self._begun == 2 and self._channel is not None:
            self._channel.send("stepped")  # sent once: tells the launcher that a restarted run is taking steps
        return True

    def freeze(self) -> int:
        """Make this rank wait before its next step until `set_last` is called. Return the number of steps that the rank
        has begun."""
        with self._changed:
            self.halted = True
            return self._begun

    def set_last(self, step: int) -> None:
        """Set the number of the step after which all ranks stop."""
        with self._changed:
            self._last = step
            self._changed.notify_all()
        if step == 0 and self.interrupts:
            self.interrupting = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class Halt:
    """The request to stop all ranks of a running launch after the same step. A signal handler or another thread makes
    the request.

    The launcher reads the attributes again and again. They are plain values, because a signal handler that calls
    `threading.Event.set` can deadlock: it may have interrupted a thread that holds the event's lock.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.at_once = False
        self.signal = 2
        """The signal that asked for the stop, or TIME_LIMIT."""

    def ask(self, number: int) -> None:
        """Ask all ranks to stop after the same step. Only the first request counts.

        number: who asks for the stop: the number of a signal, or TIME_LIMIT.
        """
        if not self.wanted:
            self.signal = number
            self.wanted = True

    @property
    def exit_code(self) -> int:
        """The exit code of the stopped run."""
        return code_of_stop(self.signal)

    @contextlib.contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """Tell the workers started inside the `with` block that the run must end after `seconds`. Then ask all ranks to
        stop after the same step. None sets no limit."""
        timer = threading.Timer(seconds or 0.0, self.ask, (TIME_LIMIT,))
        timer.daemon = True
        if seconds is not None:
            set_time_limit(seconds)
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            os.environ.pop(LIMIT, None)


def set_time_limit(seconds: float) -> None:
    """Set the time at which this process, and the processes that it starts, must end: `seconds` from now.

    The time is kept in an environment variable, which child processes inherit.
    """
    os.environ[LIMIT] = repr(time.time() + seconds)


def watch_time(gate: StepGate, ask: Callable[[], object], over: threading.Event) -> None:
    """Call `ask` once the time left for the run is just enough for a stop."""
    job, text = job_id(os.environ) if JOB in os.environ else "", os.environ.get("SLURM_JOB_END_TIME", "")
    end = float(text) if job and text.isdigit() else math.inf
    asked = time.time() - (0.0 if end < math.inf else ASK)
    guess = leaves = 0.0
    while not over.wait(LOOK):
        now = time.time()
        if job and now - asked >= ASK:
            asked, end = now, end_by_squeue(job) or end
        guess, leaves = guess or _guessed(end - now), leaves or _leaving(end - now)
        limits = [("the time limit", float(os.environ.get(LIMIT, "inf")), 0.0)]
        limits += [(f"job {job}", end - leaves, guess)] if gate.saves else []  # without saves, run until the job's end
        for of, at, unknown in limits:
            left = at - time.time()
            saves = SAVES * (gate.longest_save or unknown) if gate.saves else 0.0
            if left < gate.longest_step + saves + LOOK:
                _say(left, of, gate, saves)
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
    step = f"a step ({seconds_text(gate.longest_step)})"
    reckoned = f"{step} and {SAVES} saves ({seconds_text(saves)})" if saves else step
    print(f"{seconds_text(max(left, 0.0))} left of {of}, {reckoned} to come: stopping", file=sys.stderr, flush=True)


def end_by_squeue(job: str) -> float | None:
    """Ask squeue when a Slurm job must end, in seconds since 1970. Return None if squeue knows no such time."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    plain = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # such as `N/A`: it has no end
        told = subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, timeout=ANSWER, env=plain
        )
        return datetime.fromisoformat(told.strip()).timestamp()
    return None
