"""Find what this process may use: cores and control group limits.

Cores are divided among workers.

Control groups of versions 1 and 2 are read. Every limit from this process's own group up to the root group applies, so
the smallest limit counts. Tested in tests/hardware/test_host_facts.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from meshwise.workers.control_groups import OWN, ROOT, groups, read_text

NO_LIMIT = 2**60  # without a limit, cgroup v1 shows about 2**63 bytes, rounded to pages


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may use. These are the cores it is bound to, but no more than its CPU quota
    allows."""
    cores, quota = bound_cores(), cpu_quota()
    return cores if quota is None else cores[: max(1, math.ceil(quota))]


def bound_cores() -> tuple[int, ...]:
    """Return the cores that this process is bound to by its CPU affinity. The CPU quota is not considered."""
    return tuple(sorted(os.sched_getaffinity(0)))


def split_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Divide `cores` equally among workers."""
    if workers > len(cores):
        return [()] * workers
    edges = [round(i * len(cores) / workers) for i in range(workers + 1)]
    return [tuple(cores[a:b]) for a, b in pairwise(edges)]


def cores_near(pci_address: str, cores: Sequence[int], root: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Return the cores among `cores` that are on the NUMA node of a PCI device."""
    try:
        near = core_list((root / pci_address.lower() / "local_cpulist").read_text().strip())
    except (OSError, ValueError):
        return tuple(cores)
    return tuple(core for core in cores if core in near) or tuple(cores)


def core_list(text: str) -> set[int]:
    """Parse a list of cores as the kernel writes it. `0-3,8` gives {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the CPU quota of this process in cores, such as 1.5 for one and a half cores."""
    if (root / "cpu.max").exists() or (root / "cgroup.controllers").exists():
        pairs = [read_text(group / "cpu.max").split() for group in groups("", root, own)]
    else:
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        pairs = [[read_text(group / file) for file in files] for group in groups("cpu", root, own)]
    # `max`, -1 and unreadable values mean no limit.
    limits = [tuple(map(int, pair)) for pair in pairs if len(pair) == 2 and all(word.isdecimal() for word in pair)]
    return min((quota / period for quota, period in limits if quota and period), default=None)


def memory_limit(root: Path, own: Path) -> int | None:
    """Return how many bytes of memory the control groups allow this process. Returns None if there is no limit."""
    return min((limit for limit, _ in _memory(root, own)), default=None)


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return how many bytes remain below the memory limit. Returns None if there is no limit."""
    return min((max(limit - used, 0) for limit, used in _memory(root, own)), default=None)


def _memory(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the bytes in use of each control group with a limit. Cached files count as free."""
    versions = (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    )
    for controller, limit_file, used_file, prefix in versions:
        for group in groups(controller, root, own):
            limit, used = read_text(group / limit_file), read_text(group / used_file)
            if limit.isdecimal() and int(limit) < NO_LIMIT:
                lines = map(str.split, read_text(group / "memory.stat").splitlines())
                facts = dict(line for line in lines if len(line) == 2)
                cached = facts.get(f"{prefix}inactive_file", "0")
                yield int(limit), max(int(used) - int(cached), 0) if used.isdecimal() else 0
