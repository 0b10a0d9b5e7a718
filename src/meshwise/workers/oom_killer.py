"""Detect whether the kernel's out-of-memory killer ended a process.

A SIGKILL does not say who sent it. The kernel counts this killer's kills in each control group (`memory.events`,
or `memory.oom_control` of version 1) and for the machine (`/proc/vmstat`), and names the process in the kernel's log,
which not every user may read. Tested in tests/workers/test_oom_killer.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.units import bytes_text
from meshwise.workers.control_groups import OWN, ROOT, groups, read_text

LOG, STATISTICS = Path("/dev/kmsg"), Path("/proc/vmstat")
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Kills:
    """How many processes the out-of-memory killer has ended. None if unknown.

    group: in this process's control groups.
    machine: on the whole machine.
    """

    group: int | None
    machine: int | None


def kills(root: Path = ROOT, own: Path = OWN, statistics: Path = STATISTICS) -> Kills:
    """Return how many processes the out-of-memory killer has ended so far."""
    found = [count for file in _events(root, own) if (count := _count(file)) is not None]
    return Kills(max(found, default=None), _count(statistics))


def evidence(
    pid: int | None, before: Kills, log: Path = LOG, root: Path = ROOT, own: Path = OWN, statistics: Path = STATISTICS
) -> str | None:
    """Return a phrase that shows that the out-of-memory killer ended process `pid`, such as `it used 3.2 GiB`. Returns
    None if this is not known. Returns "" if the killer has ended no process, so that it is not the cause.

    before: how many processes the killer had ended when process `pid` began.
    """
    if found := re.search(rf"Killed process {pid} \(.*", _log(log)):
        held = re.search(r"anon-rss:(\d+)kB", found[0])
        return f"it used {bytes_text(int(held[1]) * 1024)}" if held else "as the kernel's log says"
    now = kills(root, own, statistics)
    if before.group is not None and now.group is not None and now.group > before.group:
        limit = min(_limits(root, own), default=None)
        allowed = "" if limit is None else f" of {bytes_text(limit)}"
        return f"{now.group - before.group} killed in its control group{allowed} since the run began"
    if before.machine is None or now.machine is None:
        return None
    return "" if now.machine == before.machine else f"{now.machine - before.machine} killed here since the run began"


def _events(root: Path, own: Path) -> list[Path]:
    return [
        *(group / "memory.events" for group in groups("", root, own)),
        *(group / "memory.oom_control" for group in groups("memory", root, own)),
    ]


def _limits(root: Path, own: Path) -> list[int]:
    files = [group / "memory.max" for group in groups("", root, own)]
    files += [group / "memory.limit_in_bytes" for group in groups("memory", root, own)]
    texts = [read_text(file) for file in files]
    return [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT]


def _count(file: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE)
    return None if found is None else int(found[1])


def _log(path: Path) -> str:
    """Return the text of the kernel's log at `path`, or "" if this process may not read it."""
    records: list[str] = []
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(file, 8192):
                records.append(record.decode(errors="replace"))
        finally:
            os.close(file)
    return "\n".join(records)
