"""Read this process's control groups, of version 2 or 1.

They hold what Linux lets it use, and what it was denied.

Tested in tests/machine/test_host_facts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folders of this process's group and those above it, of version 2 (no controller) or of version 1.

    Inside a container the path may be the host's, which does not exist there: then the root is the container's group.
    """
    base = root / controller
    lines = [line.split(":", 2) for line in read_text(own).splitlines()]  # `4:cpu,cpuacct:/box`, or `0::/box`
    group = next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "").strip("/")
    while group:
        yield base / group
        group = group.rpartition("/")[0]
    yield base


def read_text(path: Path) -> str:
    """Read a file without its end of line; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
