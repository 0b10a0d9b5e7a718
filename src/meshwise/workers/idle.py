"""Tell whether a process and its children compute, by CPU time.

Tested in tests/workers/test_idle.py.
"""

from __future__ import annotations

import os

from meshwise.workers.stuck import children_of, stat_of

WINDOW = 5.0  # seconds between two looks
SHARE = 0.02  # of a core: one that computes has more with thirty others on two cores; one that polls has less
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Idleness:
    """Checks repeatedly, for several processes, whether each one computes."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def computes(self, pid: int | None, now: float) -> bool:
        """Check whether a process or its children have computed since the last check.

        Returns False if the last check was less than WINDOW seconds ago.
        """
        if pid is None:
            return False
        used = sum(map(_seconds, (pid, *children_of(pid))))
        at, before = self._seen.setdefault(pid, (now, used))
        if now - at < WINDOW:
            return False
        self._seen[pid] = now, used
        return used - before > SHARE * (now - at)


def _seconds(pid: int) -> float:
    return sum(map(int, stat_of(pid)[11:13])) / _TICKS  # of the program, and of the kernel for it
