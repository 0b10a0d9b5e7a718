"""Find a hanging process's kernel state and its line of Python.

This module also tells whether a process computes, by its CPU time.

The state is read from /proc. A signal asks a process for its stack (heartbeat.py). Only processes that handle the
signal get it, since it would kill others.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.user_code import is_users, place
from meshwise.workers.control_groups import read_text
from meshwise.workers.heartbeat import SIGNAL

WINDOW = 5.0  # seconds between readings of a process's CPU time
SHARE = 0.02  # of a core: a process that computes uses more, even if 30 share 2 cores, and one that polls uses less
TICKS = os.sysconf("SC_CLK_TCK")
ANSWER = 0.5  # seconds to wait for a process to write its stack
SETTLED = 0.03  # after this many seconds without output, the stack is complete
LOOKS = 5  # a process counts as in uninterruptible sleep if it is found so this many times in a row
MOST_CHILDREN = 8
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
STATES = {
    "T": "is stopped (kill -CONT PID lets it go on)",
    "t": "is stopped by a debugger",
    "D": "is in uninterruptible sleep (it may wait for a disk or a network file system)",
    "Z": "has ended",
}
"""The states of a process in which Python cannot answer, by their letter in /proc."""


@dataclass(frozen=True)
class ProcessState:
    """Where a process stands in its Python code, or why the process does not run.

    told: the text that follows the name of the process in a sentence, such as `stands at train.py:31 in load`.
    users: whether it stands in the user's code.
    """

    pid: int
    told: str
    users: bool = False


def standing(pid: int, stack: Path) -> ProcessState:
    """Find out where in its code a process is. stack: the file to which the process writes its Python stack."""
    state = STATES.get(state_of(pid), "")
    if state:
        return ProcessState(pid, state.replace("PID", str(pid)))
    frames = _FRAME.findall(_asked(pid, stack))
    users = [frame for frame in frames if is_users(frame[0])]
    for file, line, function in (users or frames)[:1]:
        return ProcessState(pid, f"stands at {place(file, int(line))} in {function}", bool(users))
    return ProcessState(pid, "does not report where its Python code is")


def stuck_child(pid: int, stack: Path) -> ProcessState | None:
    """Return a child process, such as a loader worker, that seems to hang.
    None if none does."""
    children = children_of(pid)[:MOST_CHILDREN]
    held = next((child for child in children if state_of(child) in ("T", "t", "D")), None)
    if held is not None:
        return standing(held, stack)
    return next((found for child in children if (found := standing(child, stack)).users), None)


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as "S" for sleeping."""
    for _ in range(LOOKS):
        letter = next(iter(stat_of(pid)), "")
        if letter != "D":
            break
        time.sleep(SETTLED)
    return letter


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat without the first two."""
    return read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's living children."""
    texts = map(read_text, Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in texts for child in text.split()]


def _asked(pid: int, stack: Path) -> str:
    """Ask a process by SIGNAL for its Python stack. Return what it writes to `stack`, or "" if it does not answer."""
    if not _handles(pid, SIGNAL):
        return ""
    before = _size(stack)
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    end, last, size = time.monotonic() + ANSWER, before, before
    while time.monotonic() < end and (size == before or size > last):
        time.sleep(SETTLED)
        last, size = size, _size(stack)
    with stack.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _handles(pid: int, number: int) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", read_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Idleness:
    """Checks repeatedly, for several processes, whether each one computes."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def computes(self, pid: int | None, now: float) -> bool:
        """Check whether a process or its children have computed since the last check."""
        if pid is None:
            return False
        used = sum(map(_seconds, (pid, *children_of(pid))))
        at, before = self._seen.setdefault(pid, (now, used))
        if now - at < WINDOW:
            return False
        self._seen[pid] = now, used
        return used - before > SHARE * (now - at)


def _seconds(pid: int) -> float:
    return sum(map(int, stat_of(pid)[11:13])) / TICKS  # user time and system time
