"""A machine that others use, nearly as if it were quiet: what a bench starts gets the cores before all else.

Linux shares cores between sessions, and root may give each its weight (`/proc/PID/autogroup`). Others get what is left.
What they do to caches and memory still counts, and so does the time until a core is taken from them (about 3 ms here),
so that waits for messages are longer than on a quiet machine. Where it cannot be done nothing is changed. The real-time
class would take cores at once, and threads that wait for each other in it held a core for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

FIRST = "-20"
INTERVAL = 1.0
"""Seconds from one look at the processes to the next. Each look takes some milliseconds of a core."""


@contextlib.contextmanager
def favoured() -> Iterator[bool]:
    """In the body, this process and what it starts come first; gives whether they do."""
    over = threading.Event()
    with contextlib.suppress(OSError):
        os.setsid()
    possible = os.getsid(0) == os.getpid() and _first(os.getpid())  # else others of its session would come first too

    def watch() -> None:
        known: set[int] = set()
        while not over.wait(INTERVAL):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process().children(recursive=True):
                    if child.pid not in known and _first(child.pid):
                        known.add(child.pid)

    if possible:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield possible
    finally:
        over.set()


def _first(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/autogroup").write_text(FIRST)
    except OSError:
        return False
    return True
