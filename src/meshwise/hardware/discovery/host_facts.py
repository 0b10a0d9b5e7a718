"""Read the host's processor, cores, memory and limits.

The facts are what the host has, and what this process may use of it.

A container that may use 2 of 64 cores has 2 cores. Its memory is what its control group may use.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from meshwise.hardware.allowance import bound_cores, cpu_quota, memory_limit
from meshwise.hardware.discovery.sysfs import node_cores
from meshwise.spec.machine import Host
from meshwise.workers.control_groups import read_text

Sockets = Mapping[int | None, int | None]
"""The processor socket of each NUMA node, or None if unknown."""
SHM = Path("/dev/shm")


def host_facts(
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    affinity: Sequence[int] | None = None,
    limits: Mapping[str, float] | None = None,
) -> Host:
    """Describe the host.

    affinity: the cores that this process is bound to. The default is to ask the system.
    limits: the resource limits of this process. The default is to ask the system.
    """
    packages = core_packages(proc)
    present = len(packages) or os.cpu_count()
    bound = len(bound_cores() if affinity is None else affinity)
    quota = cpu_quota(sys / "fs/cgroup", proc / "self/cgroup")
    cores = bound if quota is None else min(bound, max(1, math.ceil(quota)))
    memory = _total_memory(proc)
    most = memory_limit(sys / "fs/cgroup", proc / "self/cgroup")
    return Host(
        socket.gethostname(),
        _processor(proc),
        cores,
        present,
        len({package for package in packages.values() if package is not None}) or None,
        len(node_cores(sys)) or None,
        memory if most is None else min(memory, most),
        memory,
        own_limits() if limits is None else limits,
    )


def core_packages(proc: Path) -> Mapping[int, int | None]:
    """Return the processor socket of each core according to /proc/cpuinfo."""
    found: dict[int, int | None] = {}
    for name, number in re.findall(r"^(processor|physical id)\s*:\s*(\d+)$", read_text(proc / "cpuinfo"), re.MULTILINE):
        if name == "processor":
            found[core := int(number)] = None
        elif found:
            found[core] = int(number)
    return found


def node_sockets(sys: Path, proc: Path) -> Sockets:
    """Return the processor socket of each NUMA node."""
    packages = core_packages(proc)
    return {node: packages.get(min(cores)) for node, cores in node_cores(sys).items()}


def own_limits() -> Mapping[str, float]:
    """Return this process's limits on open files, locked memory and shared memory, where there are any."""
    numbers = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    found = {name: limit for name, limit in soft.items() if limit != resource.RLIM_INFINITY}
    if SHM.is_dir():
        shared = os.statvfs(SHM)
        found["shared memory"] = shared.f_frsize * shared.f_blocks
    return found


def _processor(proc: Path) -> str:
    text = read_text(proc / "cpuinfo")
    for name in (
        "model name",
        "cpu model",
        "Model",
        "cpu",
        "Hardware",
    ):  # on x86, MIPS, Arm boards, POWER, old Arm
        found = re.search(rf"^{name}\s*:\s*(\S.*)$", text, re.MULTILINE)
        if found:
            return " ".join(found[1].split())
    return platform.processor() or platform.machine()


def _total_memory(proc: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else psutil.virtual_memory().total
