"""Define a launch's listeners, and the state of each worker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, BinaryIO

from meshwise.records.attempts import open_log
from meshwise.workers import failure
from meshwise.workers.channel import Line, Message
from meshwise.workers.control_groups import Kills, evidence, kills
from meshwise.workers.failure import Failure, is_gloo_abort
from meshwise.workers.fork_server import ForkedWorker


@dataclass(frozen=True)
class Listeners:
    """Functions that the launcher calls while the workers run, to tell its caller what happens, and settings that
    decide what counts as a hang.

    message: called with a rank and each message of its worker that the launcher does not use itself.
    output: called with a stream, `stdout` or `stderr`, and each line that rank 0 prints to it.
    look: called several times a second, without arguments.
    log: called with the run folder and a rank. It opens the file that receives the rank's output.
    hang_limit: the seconds without progress of a rank after which the run is ended. With None, a hang is only reported.
    idle: whether a rank that computes counts as making progress, even if it reports none.
    """

    message: Callable[[int, Message], None] = lambda rank, message: None
    output: Callable[[str, str], None] = lambda stream, text: None
    look: Callable[[], None] = lambda: None
    log: Callable[[Path, int], BinaryIO] = open_log
    hang_limit: float | None = None
    idle: bool = False


class State(Enum):
    """The state of a worker. EXITED means that it exited with code 0 before its task was done, and reported no
    failure."""

    RUNNING = auto()
    DONE = auto()
    EXITED = auto()
    FAILED = auto()


@dataclass
class WatchedWorker:
    """A worker process, and what its launcher knows about it."""

    rank: int
    process: ForkedWorker
    log: BinaryIO
    line: Line
    state: State = State.RUNNING
    failure: Failure | None = None
    in_progress: bool = False
    since: float = 0.0
    readers: list[threading.Thread] = field(default_factory=list)
    killed_before: Kills = field(default_factory=kills)

    def turn(self, state: State, failure: Failure | None = None) -> None:
        self.state, self.failure, self.since = state, failure, time.monotonic()

    def died(self, status: int) -> None:
        """Record that the worker ended without a report. status: its exit status."""
        died = failure.by_exit_status(self.rank, status, lambda: evidence(self.killed_before, kills()))
        self.turn(State.FAILED, died)

    @property
    def seconds(self) -> float:
        """For how many seconds the worker has been in its current `state`."""
        return time.monotonic() - self.since


def shown(pipe: BinaryIO | Any, stream: str, log: BinaryIO, show: Callable[[str, str], None]) -> threading.Thread:
    """Start a thread that writes each line of a worker's output to the worker's log and shows it to the user."""

    def forward() -> None:
        with pipe, contextlib.suppress(ValueError):
            for line in iter(pipe.readline, b""):
                with contextlib.suppress(OSError):  # a full disk must not block a worker
                    log.write(line)
                    log.flush()
                text = line.decode(errors="replace")
                if not is_gloo_abort(text):
                    show(stream, text if text.endswith("\n") else f"{text}\n")

    thread = threading.Thread(target=forward, name=f"meshwise-{stream}", daemon=True)
    thread.start()
    return thread
