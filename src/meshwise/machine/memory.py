"""Read how much memory this process's device uses and has free.

Tested in tests/machine/test_host_facts.py and tests/timeline.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from meshwise.machine.allowance import memory_left
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text


def used_bytes(device: str) -> int:
    """Return how many bytes this process uses. On an accelerator, these are its tensors. On a CPU, it is the resident
    memory."""
    if has_streams(device):
        return int(torch.get_device_module(device).memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def memory_counters(device: str) -> dict[str, float]:
    """Return the bytes in use by name, for the timeline.

    On an accelerator, `allocated` and `reserved` are counted by torch, and `device` is the use of all processes
    together. A CPU worker has only `resident`, the resident memory of this process.
    """
    if not has_streams(device):
        return {"resident": used_bytes(device)}
    facts = memory_facts(device)
    return {"allocated": facts["allocated"], "reserved": facts["reserved"], "device": facts["total"] - facts["free"]}


def peak_bytes(device: str) -> int:
    """Return the largest number of bytes that this process has used at any moment so far. On an accelerator, only
    torch's tensors are counted. On a CPU, it is the resident memory of the process."""
    if has_streams(device):
        return int(torch.get_device_module(device).max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated now. For a CPU, this is the free memory of the host or the container."""
    if has_streams(device):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    available, left = int(psutil.virtual_memory().available), memory_left()
    return available if left is None else min(available, left)


def memory_facts(device: str) -> dict[str, int]:
    """Return the bytes `allocated`, `reserved`, `free` and `total` of the device, to report an out-of-memory error."""
    if has_streams(device):
        free, total = torch.get_device_module(device).mem_get_info(device)
        return {
            "allocated": torch.get_device_module(device).memory_allocated(device),
            "reserved": torch.get_device_module(device).memory_reserved(device),
            "free": free,
            "total": total,
        }
    memory = psutil.virtual_memory()
    process = psutil.Process().memory_info()
    return {
        "allocated": process.rss,
        "reserved": process.vms,
        "free": free_bytes(torch.device("cpu")),
        "total": memory.total,
    }


def cap_memory(device: str, limit: int) -> None:
    """Limit this process to `limit` bytes of the device's memory, or of the host's memory if the device is a CPU.

    Allocations beyond the limit fail, as on a smaller device. On a host, Linux counts writable memory (RLIMIT_DATA),
    but not memory that was mapped before and is still unused. For a CPU worker, raises UsageError if the process
    already uses `limit` bytes, or if the system is not Linux.
    """
    if has_streams(device):
        total = torch.get_device_module(device).mem_get_info(device)[1]
        if limit < total:
            torch.get_device_module(device).set_per_process_memory_fraction(limit / total)
        return
    if sys.platform != "linux":
        raise UsageError("--memory-limit works for CPU workers only on Linux. Leave this option out.")
    data, used = _of_status("VmData"), _of_status("RssAnon")
    if limit <= used:
        raise UsageError(
            f"--memory-limit {bytes_text(limit)}: without a model, a worker needs {bytes_text(used)}. Raise the limit."
        )
    resource.setrlimit(resource.RLIMIT_DATA, (data - used + limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _of_status(name: str) -> int:
    """Return a figure from /proc/self/status, such as `VmData`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
