"""Define what a launcher tells its caller.

Tested in tests/workers/test_launchers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshwise.records.rank_logs import open_log
from meshwise.workers.channel import Message


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
