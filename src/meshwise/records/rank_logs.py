"""What each rank prints: a file of its own in the run folder, to which every attempt appends.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import BinaryIO

WORKERS = "workers"
BEGINS = re.compile(r"--- begins on (?P<host>\S+) at (?P<time>\d+(\.\d+)?)")
"""The line with which a launcher begins an attempt: its host, and seconds since 1970."""
_RANK = re.compile(r"rank(\d+)\.log")


def open_log(folder: Path, rank: int) -> BinaryIO:
    """The log of a rank in a run folder, for one more attempt."""
    path = folder / WORKERS / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    log.write(f"--- begins on {socket.gethostname()} at {time.time():.1f}\n".encode())
    log.flush()
    return log


def logs_of(folder: Path) -> dict[int, Path]:
    """The log of each rank that there is, by rank."""
    found = {int(match[1]): path for path in (folder / WORKERS).glob("*") if (match := _RANK.fullmatch(path.name))}
    return dict(sorted(found.items()))
