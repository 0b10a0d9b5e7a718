"""Processes that a test started and left: they end with it, and so does what they started.

A `Popen` whose process still runs when it is collected warns then, which fails whatever test is running.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import psutil

KEPT = "kept for later tests"
"""The name of a thread whose processes stay."""
_started: list[subprocess.Popen[Any]] = []
_start = subprocess.Popen.__init__


def _remember(self: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
    _start(self, *arguments, **named)
    if threading.current_thread().name != KEPT:
        _started.append(self)


subprocess.Popen.__init__ = _remember  # type: ignore[method-assign]


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """Kill what the body has started and left running, whole trees, in whatever session; and close its pipes."""
    before = len(_started)
    try:
        yield
    finally:
        for process in _started[before:]:
            if process.poll() is None:
                _kill_tree(process.pid)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):  # what is written to it still has no reader
                    if pipe is not None:
                        pipe.close()
        del _started[before:]


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
