"""Break a step's memory down by category and phase.

For each phase, the peak is given. For the peak of the whole step, the tensors are listed too.

Tested in tests/rehearsal/test_memory_parts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.rehearsal.allocator import device_total, reserved_on
from meshwise.rehearsal.explain import operation_words
from meshwise.rehearsal.memory import Curve, Peak, memory_curve, next_launches
from meshwise.rehearsal.work import CATEGORIES, Allocate, CollectiveOperation, Free, Launch, Operation, What, Work
from meshwise.spec.machine import Device

BEFORE = "before the step"
MOST = 10
"""The largest number of groups of equal tensors to list."""


@dataclass(frozen=True)
class Tensors:
    """A group of equal tensors at the memory peak.

    size: the bytes of each tensor.
    times: the number of tensors.
    maker, phase: the operator that created them, and its phase. Empty if they existed when the step began.
    """

    category: str
    size: int
    times: int
    maker: str = ""
    phase: str = ""


@dataclass(frozen=True)
class MemoryParts:
    """The memory of one rank in the step in which it needs the most.

    first: whether this is the rank's first step.
    peak: the peak of the memory of its tensors.
    phases: for each phase, and for the start of the step, the bytes by category when that phase needs the most.
    largest: the groups of equal tensors at the peak, in descending order of their total size.
    outside: other device memory in bytes by name: unused memory of the allocator, the CUDA context, communicators.
    host: the bytes in host memory by category, at their peak.
    """

    rank: int
    first: bool
    peak: Peak
    phases: Mapping[str, Mapping[str, int]]
    largest: tuple[Tensors, ...]
    outside: Mapping[str, int]
    host: Mapping[str, int]


def memory_parts(first: Work, step: Work, device: Device) -> MemoryParts:
    """Break down the memory of a rank in its first step or in a later step, whichever needs more."""
    works = (first, step)
    curves = [memory_curve(work) for work in works]
    most = max(curves, key=lambda curve: curve.peak.bytes)
    host = max((memory_curve(work, on_host=True).peak for work in works), key=lambda peak: peak.bytes)
    outside: dict[str, int] = {}
    if step.kind != "cpu":
        reserved = reserved_on(works, device.part, device.memory)
        outside = {"held by the allocator": reserved - most.peak.bytes}
        outside |= {name: size for name, size in device_total(reserved, step).parts.items() if name != "reserved"}
    launches = next_launches(most.work)
    return MemoryParts(
        step.rank,
        most is curves[0],
        most.peak,
        _by_phase(most, launches),
        _largest(most, launches)[:MOST],
        {name: size for name, size in outside.items() if size > 0},
        host.split,
    )


def _by_phase(curve: Curve, launches: list[Launch | None]) -> dict[str, dict[str, int]]:
    total = curve.total
    best: dict[str, int] = {}
    for row, place in enumerate(curve.places):
        launch = launches[place] if place >= 0 else None
        phase = BEFORE if place < 0 else launch.phase if launch is not None else "other"
        if phase not in best or total[row] > total[best[phase]]:
            best[phase] = row
    return {
        phase: {name: int(size) for name, size in zip(CATEGORIES, curve.by_category[row], strict=True) if size}
        for phase, row in best.items()
    }


def _largest(curve: Curve, launches: list[Launch | None]) -> tuple[Tensors, ...]:
    alive: dict[int, tuple[Allocate, int]] = {event.storage: (event, -1) for event in curve.work.held}
    for place, event in enumerate(curve.work.events[: curve.peak.place + 1]):
        if isinstance(event, Allocate):
            alive[event.storage] = event, place
        elif isinstance(event, Free):
            alive.pop(event.storage, None)
    counts = Counter(_sort(event, launches[place] if place >= 0 else None) for event, place in alive.values())
    found = [Tensors(category, size, times, *made) for (category, size, *made), times in counts.items() if size]
    return tuple(sorted(found, key=lambda one: (-one.size * one.times, one.category)))


def _sort(event: Allocate, launch: Launch | None) -> tuple[str, int, str, str]:
    size = 0 if event.on_host else event.size
    if launch is None:
        return event.category, size, "", ""
    return event.category, size, _maker(launch.what), launch.phase


def _maker(what: What) -> str:
    if isinstance(what, Operation):
        return operation_words(what)
    return what.kind if isinstance(what, CollectiveOperation) else f"copy to the {what.to}"
