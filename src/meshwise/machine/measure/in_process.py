"""Measure all copies of one process, path by path, within a budget.

The process sees every accelerator of the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwise.machine.allowance import allowed_cores, cores_near
from meshwise.machine.discovery.nvml import pcie_now
from meshwise.machine.find import pci_address
from meshwise.machine.measure.copies import CopySpec, copy_paths, measure_copy
from meshwise.machine.measure.progress import Progress
from meshwise.spec.devices import has_streams
from meshwise.transfer.copy import CopyOptions, copy, move
from meshwise.transfer.path import AUTO, PEER, STAGED, reads_directly

Lanes = tuple[int | None, int | None]
"""The generation and the number of lanes of a PCIe link."""
LOAD_BYTES, LOAD_COPIES = 64 << 20, 200  # half a second on the slowest link of the catalog, longer than NVML takes


def measure_in_process(
    devices: Sequence[str], sizes: Sequence[int], budget: float, progress: Progress
) -> dict[str, Lanes]:
    """Measure and check all copies among these accelerators and the host, for about `budget` seconds in total.

    Returns the (generation, lanes) of each device's PCIe link under load, by the name of the device. A device for which
    NVML does not report them is left out.
    """
    paths = [path for path in copy_paths(devices, _peers) if _can(path)]
    for path in paths:
        progress.starts(str(path))
        with _near(path):
            progress.done(measure_copy(path, sizes, budget / len(paths), _move, lambda name: name))
    return {device: lanes for device in devices if (lanes := _lanes_under_load(device)) is not None}


def _lanes_under_load(device: str) -> Lanes | None:
    """Read the generation and lanes of a device's PCIe link while it copies data. An idle link is not measured, because
    it saves power by a lower generation or fewer lanes."""
    if not has_streams(device):
        return None
    source = torch.zeros(LOAD_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(LOAD_BYTES, dtype=torch.uint8, device=device)
    for _ in range(LOAD_COPIES):
        _move(target, source, "pinned")
    found = pcie_now().get(pci_address(device))
    torch.get_device_module(device).synchronize(device)
    return found


def _peers(source: str, target: str) -> bool:
    """Return whether the device `source` can read the memory of `target` directly, without the host."""
    return has_streams(source) and reads_directly(torch.device(source), torch.device(target))


def _can(path: CopySpec) -> bool:
    """Return whether the devices of a path support its copies. `pageable` copies work on every device. Other copies
    need devices with streams, such as CUDA devices."""
    return path.path == "pageable" or all(end == "host" or has_streams(end) for leg in path.legs for end in leg)


def _move(target: Tensor, source: Tensor, how: str) -> None:
    """Enqueue a copy in the current stream without making the host wait, since the copies are timed."""
    if has_streams(source.device) and target.is_cpu:
        copy(target, source, stream=torch.get_device_module(source.device).current_stream(source.device))
    elif has_streams(target.device) and source.is_cpu:
        move(target, source, "copy", CopyOptions(non_blocking=True))
    else:
        copy(target, source, path=how if how in (PEER, STAGED) else AUTO)


@contextmanager
def _near(path: CopySpec) -> Iterator[None]:
    """Context manager that runs its block on the cores near the path's device. Pinned memory is then on the same NUMA
    node."""
    device = next(end for leg in path.legs for end in leg if end != "host")
    before = allowed_cores()
    near = cores_near(pci_address(device), before)
    if not hasattr(os, "sched_setaffinity") or near == before:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
