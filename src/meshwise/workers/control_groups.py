"""Read this process's control groups, of version 2 or 1.

Control groups hold what Linux lets this process use, and what it was denied.

Tested in tests/machine/test_host_facts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folder of this process's control group, and then the folders of the groups above it. The last folder is
    the top of the tree: `root`, or the controller's folder in `root`.

    controller: the name of a controller of version 1, or "" for version 2.

    Inside a container, the path of the group may be its path on the host, so some of these folders may not exist. The
    last folder is then the group of the container.
    """
    base = root / controller
    lines = [line.split(":", 2) for line in read_text(own).splitlines()]  # `4:cpu,cpuacct:/box`, or `0::/box`
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
