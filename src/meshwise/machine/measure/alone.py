"""Measure each device by itself, in a worker of its own.

The worker has the device, cores and threads that a run would give it.

CPU workers of one host take turns, since they share its memory; accelerators are measured at the same time.

Tested in tests/machine/test_compute.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwise.machine.measure.compute import launch_seconds, matmuls, memory_rate
from meshwise.machine.measure.progress import Progress, listeners, sent_over
from meshwise.machine.measure.result import DeviceResult
from meshwise.spec.devices import WorkerSlot
from meshwise.transfer.collectives import barrier
from meshwise.workers.join import join
from meshwise.workers.launch import launch

MEMORY_SHARE = 0.15
"""The share of the time budget that is used to measure the memory rate. The rest is used for matrix products."""


def device_names(slots: Sequence[WorkerSlot]) -> list[str]:
    """Return the name of each slot's device, such as `cuda:2` for an accelerator, or `cpu:1` for the second CPU
    worker."""
    return [f"cpu:{rank}" if slot.index is None else slot.name for rank, slot in enumerate(slots)]


def measure_alone(slots: Sequence[WorkerSlot], budget: float, progress: Progress) -> None:
    """Measure every device by itself, in about `budget` seconds for all devices together.

    progress: receives each result as soon as the device is measured.
    """
    turns = len(slots) if slots[0].device == "cpu" else 1
    arguments = (device_names(slots), budget / turns, turns > 1)
    launch(_measure, arguments, slots, listeners=listeners(progress))


def measure_here(name: str, device: torch.device, budget: float) -> DeviceResult:
    """Measure one device in this process for about `budget` seconds."""
    rate = memory_rate(device, budget * MEMORY_SHARE)
    products = tuple(matmuls(device, budget * (1 - MEMORY_SHARE)))
    return DeviceResult(name, rate, products, launch_seconds(device))


def _measure(names: Sequence[str], budget: float, in_turn: bool) -> None:
    session = join()
    rank, size = session.world.rank, session.world.size
    progress = sent_over(session.channel)
    for turn in range(size if in_turn else 1):
        if turn == rank or not in_turn:
            progress.done(measure_here(names[rank], torch.device(session.world.device), budget))
        barrier()
