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
    look: called several times a second.
    log: opens the file in the run folder that a rank prints into.
    hang_limit: a rank without progress for this many seconds ends the run; None: it is only reported. idle: such a
    rank computes nothing (see hang.py).
    """

    message: Callable[[int, Message], None] = lambda rank, message: None
    output: Callable[[str, str], None] = lambda stream, text: None
    look: Callable[[], None] = lambda: None
    log: Callable[[Path, int], BinaryIO] = open_log
    hang_limit: float | None = None
    idle: bool = False
