"""Read this process's control groups, of version 2 or 1.

Control groups limit what this process may use, and count what was denied. A SIGKILL does not say who sent it, but the
kernel counts the processes that its out-of-memory killer has ended: in each control group of version 2
(`memory.events`) and for the machine (`/proc/vmstat`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
STATISTICS = Path("/proc/vmstat")


def groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folder of this process's control group, and then the folders of the groups above it. The last folder is
    the top of the tree: `root`, or the controller's folder in `root`.

    controller: the name of a controller of version 1, or "" for version 2.

    Inside a container, the path of the group may be its path on the host, so some of these folders may not exist. The
    last folder is then the group of the container.
    """
    base = root / controller
    lines = [line.split(":", 2) for line in read_text(own).splitlines()]  # such as `4:cpu,cpuacct:/box`, or `0::/box`
    group = next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "").strip("/")
    while group:
        yield base / group
        group = group.rpartition("/")[0]
    yield base


def read_text(path: Path) -> str:
    """Return the text of a file, without surrounding whitespace. An empty string if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


Kills = tuple[int | None, int | None]
"""How many processes the out-of-memory killer has ended in a control group, and on the machine. None if unknown."""


def kills(root: Path = ROOT, own: Path = OWN, statistics: Path = STATISTICS) -> Kills:
    """Return how many processes the out-of-memory killer has ended so far: (in this control group, on this machine)."""
    counts = [_count(group / "memory.events") for group in groups("", root, own)]
    return max((count for count in counts if count is not None), default=None), _count(statistics)


def evidence(before: Kills, now: Kills) -> str | None:
    """Return a phrase that shows that the out-of-memory killer has ended a process, such as `1 killed here since the
    run began`. An empty string if it has ended none, and None if this is unknown."""
    for earlier, count, where in zip(before, now, ("in its control group", "here"), strict=True):
        if earlier is not None and count is not None and count > earlier:
            return f"{count - earlier} killed {where} since the run began"
    return None if None in (before[1], now[1]) else ""


def _count(file: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE)
    return None if found is None else int(found[1])
