"""Measure each device by itself, in a worker that has the device, cores and threads that a run would give it.

CPU workers of one host take turns, since they share its memory; accelerators are measured at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from meshwise.machine.measure.compute import launch_seconds, matmuls, memory_rate
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.machine import Matmul
from meshwise.transfer.collectives import barrier
from meshwise.workers.channel import Message
from meshwise.workers.join import join
from meshwise.workers.launch import Listeners, launch

MEMORY_SHARE = 0.15
"""Of the budget goes to the memory's rate, the rest to products."""


@dataclass(frozen=True)
class Compute:
    """What one device did by itself: bytes/s of its memory (read and written), products, seconds a launch."""

    device: str
    memory_rate: float | None = None
    matmuls: tuple[Matmul, ...] = ()
    launch: float | None = None


def device_names(slots: Sequence[WorkerSlot]) -> list[str]:
    """The name of each slot's device: `cuda:2` for an accelerator, `cpu:1` for the second CPU worker."""
    return [f"cpu:{rank}" if slot.index is None else slot.name for rank, slot in enumerate(slots)]


def measure_alone(slots: Sequence[WorkerSlot], budget: float, tell: Callable[[Compute], None]) -> None:
    """Measure every device for about `budget` seconds in all; `tell` hears of each as soon as it is done."""
    turns = len(slots) if slots[0].device == "cpu" else 1

    def heard(rank: int, message: Message) -> None:
        if message["kind"] == "computed":
            tell(_from_message(message))

    launch(_measure, (device_names(slots), budget / turns, turns > 1), slots, listeners=Listeners(message=heard))


def measure_here(name: str, device: torch.device, budget: float) -> Compute:
    """Measure one device in this process for about `budget` seconds."""
    rate = memory_rate(device, budget * MEMORY_SHARE)
    products = tuple(matmuls(device, budget * (1 - MEMORY_SHARE)))
    return Compute(name, rate, products, launch_seconds(device))


def _measure(names: Sequence[str], budget: float, in_turn: bool) -> None:
    session = join()
    rank, size = session.world.rank, session.world.size
    for turn in range(size if in_turn else 1):
        if turn == rank or not in_turn:
            computed = measure_here(names[rank], torch.device(session.world.device), budget)
            if session.channel is not None:
                session.channel.send("computed", **asdict(computed))
        barrier()


def _from_message(message: Message) -> Compute:
    products = tuple(Matmul(**product) for product in message["matmuls"])
    return Compute(message["device"], message["memory_rate"], products, message["launch"])
