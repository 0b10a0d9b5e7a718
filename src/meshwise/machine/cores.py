"""Processor cores: how many this process may use, and which worker gets which."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from meshwise.machine.cgroup import cpu_quota


def allowed_cores() -> tuple[int, ...]:
    """The cores that this process may run on. A container limited to 2 of 64 cores gets 2."""
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    quota = cpu_quota()
    return cores if quota is None else cores[: max(1, math.ceil(quota))]


def split_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """An equal part of `cores` for each worker; empty parts, so that nobody is bound, for more workers than cores."""
    if workers > len(cores):
        return [()] * workers
    edges = [round(i * len(cores) / workers) for i in range(workers + 1)]
    return [tuple(cores[a:b]) for a, b in pairwise(edges)]


def cores_near(pci_address: str, cores: Sequence[int], root: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Those of `cores` on the NUMA node of a PCI device; all of them where the system does not say."""
    try:
        near = core_list((root / pci_address.lower() / "local_cpulist").read_text().strip())
    except (OSError, ValueError):
        return tuple(cores)
    return tuple(core for core in cores if core in near) or tuple(cores)


def core_list(text: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
