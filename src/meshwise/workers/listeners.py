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
    """Callbacks of the launcher to its caller while the workers run.

    message: `(rank, message)` for every message of a worker that the launcher does not use itself.
    output: `(stream, text)` for every line that rank 0 prints; stream is `stdout` or `stderr`.
    look: called several times a second, without arguments.
    log: called with the run folder and a rank; opens the file that receives the rank's output.
    hang_limit: a rank without progress for this many seconds ends the run; None: a hang is only reported. idle: only
    a rank that computes nothing counts as hanging (see hang.py).
    """

    message: Callable[[int, Message], None] = lambda rank, message: None
    output: Callable[[str, str], None] = lambda stream, text: None
    look: Callable[[], None] = lambda: None
    log: Callable[[Path, int], BinaryIO] = open_log
    hang_limit: float | None = None
    idle: bool = False
