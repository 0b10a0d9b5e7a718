"""Find the devices of a request, and bind workers to them.

Each worker gets its device, cores and threads.

CPU workers are found without torch, which takes a second to import.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from meshwise.hardware.allowance import allowed_cores, cores_near, split_cores
from meshwise.hardware.discovery.sysfs import address_of
from meshwise.spec.devices import STREAMED, DeviceRequest, WorkerSlot, core_ranges, has_streams, threads_in
from meshwise.spec.errors import UsageError
from meshwise.spec.units import plural


def find_devices(request: DeviceRequest) -> list[WorkerSlot]:
    """Return one slot per worker: for each requested device, or for each accelerator of this machine if no kind of
    device is requested. Without accelerators, this is one CPU worker.

    The number of threads of each slot is OMP_NUM_THREADS, if it is set. Otherwise, a slot has one thread for each of
    its cores, and a single slot has torch's default. Raises UsageError if a requested device is missing.
    """
    if request.kind is None:
        kind, count = accelerators()
        return find_devices(DeviceRequest(kind, count=count) if kind and count else DeviceRequest("cpu", count=1))
    slots = _cpu_shares(request.count or 1) if request.kind == "cpu" else _accelerator_shares(request)
    said = threads_in(os.environ)
    return [replace(slot, threads=said) for slot in slots] if said or len(slots) == 1 else slots


def accelerators() -> tuple[str | None, int]:
    """Return the kind of accelerator that torch can use on this machine, and how many there are. The kind is None if
    there are none."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        return device.type, torch.accelerator.device_count()
    # After a rehearsal in this process, torch.accelerator knows only the fake device.
    found = next((kind for kind in STREAMED if torch.get_device_module(kind).is_available()), None)
    return found, torch.get_device_module(found).device_count() if found else 0


def describe(slots: Sequence[WorkerSlot], first: int = 0) -> str:
    """Describe the slots for the user: `2 CPU workers: rank 0 on core 0 (1 thread), rank 1 on core 1 (1 thread)`.

    first: the lowest rank on this machine.
    """
    same_kind = "CPU worker" if slots[0].device == "cpu" else f"{slots[0].device} device"
    count = f"{len(slots)} {same_kind}{'s' if len(slots) > 1 else ''}"
    parts = [_one(rank, slot) for rank, slot in enumerate(slots[:4], first)]
    if len(slots) > 4:
        parts.append(f"and so on to rank {first + len(slots) - 1}")
    crowded = ""
    if any(slot.threads > max(len(slot.cores), 1) for slot in slots):
        cores = len({core for slot in slots for core in slot.cores}) or len(allowed_cores())
        threads = f"{sum(slot.threads for slot in slots)} threads on {plural(cores, 'core')}"
        crowded = f". OMP_NUM_THREADS={slots[0].threads}: {threads} slow the workers"
    return f"{count}: {', '.join(parts)}{crowded}"


def _one(rank: int, slot: WorkerSlot) -> str:
    cores = f"core{'s' if len(slot.cores) > 1 else ''} {core_ranges(slot.cores)}"
    on = "" if slot.index is None else f"{slot.name}, "
    threads = plural(slot.threads, "thread") if slot.threads else "as many threads as plain PyTorch"
    return f"rank {rank} on {on}{cores if slot.cores else 'no core of its own'} ({threads})"


def _cpu_shares(count: int) -> list[WorkerSlot]:
    parts = split_cores(allowed_cores(), count)
    return [WorkerSlot("cpu", None, part, max(1, len(part))) for part in parts]


def _accelerator_shares(request: DeviceRequest) -> list[WorkerSlot]:
    kind, present = accelerators()
    indices = request.indices if request.indices is not None else tuple(range(request.count or 1))
    if kind is None or kind != request.kind or present == 0:
        raise UsageError(
            f"--devices {request}: torch {version('torch')} finds no {request.kind} device here. Use 2xcpu, or all."
        )
    if max(indices) >= present:
        raise UsageError(
            f"--devices {request}: this machine has {plural(present, f'{kind} device')} "
            f"(indices 0 to {present - 1}). Use {present}x{kind}."
        )
    near = [cores_near(pci_address(f"{kind}:{index}"), allowed_cores()) for index in indices]
    sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, cores in enumerate(near):
        sharing[cores].append(position)
    slots: dict[int, WorkerSlot] = {}
    for cores, positions in sharing.items():
        for position, part in zip(positions, split_cores(cores, len(positions)), strict=True):
            slots[position] = WorkerSlot(kind, indices[position], part, max(1, len(part)))
    return [slots[position] for position in range(len(indices))]


def pci_address(device: str) -> str:
    """Return the PCI address of a device such as `cuda:0` as sysfs writes it (`0000:3b:00.0`), or "" if unknown."""
    if not has_streams(device):
        return ""
    import torch

    return address_of(torch.get_device_module(device).get_device_properties(device))
