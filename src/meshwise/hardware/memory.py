"""Read how much memory this process's device uses and has free."""

from __future__ import annotations

import resource

import psutil
import torch

from meshwise.hardware.allowance import memory_left
from meshwise.spec.devices import has_streams


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
    return {
        "allocated": facts["allocated"],
        "reserved": facts["reserved"],
        "device": facts["total"] - facts["free"],
    }


def peak_bytes(device: str) -> int:
    """Return the largest number of bytes that this process has used at any moment so far. On an accelerator, only
    torch's tensors are counted. On a CPU, it is the resident memory of the process."""
    if has_streams(device):
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
