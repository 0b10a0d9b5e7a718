"""Keep a log file for each rank and attempt of a run.

Because each attempt has its own files, what a cut-off process of an earlier attempt prints is not taken for output of a
later attempt. Runs of older versions of meshwise have one file for all attempts.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import BinaryIO

from meshwise.records.files import make_folder

WORKERS = "workers"
BEGINS = re.compile(r"--- begins on (?P<host>\S+) at (?P<time>\d+(\.\d+)?)")
"""Matches the first line of an attempt's log, which has the launcher's host and the time in seconds since 1970."""
_RANK = re.compile(r"rank(\d+)(?:\.(\d+))?\.log")


def open_log(folder: Path, rank: int, attempt: int = 1) -> BinaryIO:
    """Open the log of a rank for one attempt of a run, for appending."""
    path = folder / WORKERS / (f"rank{rank}.log" if attempt == 1 else f"rank{rank}.{attempt}.log")
    make_folder(path.parent)
    log = path.open("ab")
    log.write(f"--- begins on {socket.gethostname()} at {time.time():.1f}\n".encode())
    log.flush()
    return log


def logs_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (rank, attempt, path) for each log in a run folder."""
    named = [(_RANK.fullmatch(path.name), path) for path in (folder / WORKERS).glob("*")]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in named if match)
