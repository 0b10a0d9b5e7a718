"""Compute memory over a step: by category and phase, and the peak.

The allocated bytes are known after each event. At the peak, the tensors are known too.

Bytes of a GPU are counted as by torch's `memory_allocated`, in blocks of 512. On a host or CPU, the requested bytes are
counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwise.planner.allocator import device_total, reserved_on, rounded
from meshwise.planner.explain import operation_words
from meshwise.planner.work import (
    CATEGORIES,
    Allocate,
    CollectiveOperation,
    Event,
    Free,
    Launch,
    Operation,
    What,
    Work,
)
from meshwise.spec.machine import Device

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Peak:
    """The largest number of bytes allocated at once during a step."""

    bytes: int
    place: int
    split: Mapping[str, int]
    phase: str = ""
    module: str = ""
    microbatch: int = -1


@dataclass(frozen=True)
class Curve:
    """The allocated memory over a step."""

    work: Work
    places: Bytes
    by_category: Bytes

    @property
    def total(self) -> Bytes:
        """The allocated bytes of all categories together, after each event in `places`."""
        total: Bytes = self.by_category.sum(axis=1)
        return total

    @cached_property
    def peak(self) -> Peak:
        """The largest number of bytes of all categories together."""
        at = int(self.total.argmax())
        place = int(self.places[at])
        split = {name: int(size) for name, size in zip(CATEGORIES, self.by_category[at], strict=True) if size}
        launch = next((event for event in self.work.events[max(place, 0) :] if isinstance(event, Launch)), None)
        launch = launch or next((event for event in reversed(self.work.events) if isinstance(event, Launch)), None)
        where = (launch.phase, launch.module, launch.microbatch) if launch is not None else ("", "", -1)
        return Peak(int(self.total[at]), place, split, *where)


def memory_curve(work: Work, on_host: bool = False) -> Curve:
    """Return the memory of the device over a step, or the host's memory if `on_host`."""
    column = {name: number for number, name in enumerate(CATEGORIES)}
    unit = 1 if on_host or work.kind == "cpu" else 0
    alive: dict[int, tuple[int, int]] = {}
    begins = np.zeros(len(CATEGORIES), np.int64)
    places, columns, sizes = list[int](), list[int](), list[int]()
    for place, event in _memory_events(work):
        if isinstance(event, Allocate):
            if event.storage in alive:
                raise ValueError(f"event {place}: storage {event.storage} is allocated twice without being freed")
            counted = event.on_host == on_host
            size = (event.size if unit else rounded(event.size)) if counted else 0
            alive[event.storage] = which, _ = column[event.category], size
        elif event.storage in alive:
            which, freed = alive.pop(event.storage)
            size = -freed
        else:
            raise ValueError(f"event {place}: storage {event.storage} is freed but was never allocated")
        if size == 0:
            continue
        if place < 0:
            begins[which] += size
        else:
            places.append(place)
            columns.append(which)
            sizes.append(size)
    changes = np.zeros((len(places) + 1, len(CATEGORIES)), np.int64)
    changes[0] = begins
    changes[np.arange(1, len(places) + 1), columns] = sizes
    return Curve(work, np.array([-1, *places], np.int64), np.cumsum(changes, axis=0))


def with_inside(work: Work, inside: Callable[[Operation], Sequence[int]]) -> Work:
    """Return a copy of the step with additional events for the memory that operators allocate internally."""
    events: list[Event] = []
    for event in work.events:
        if isinstance(event, Launch) and isinstance(event.what, Operation) and (own := inside(event.what)):
            results = list[Event]()
            while len(results) < own.count(0) and events and isinstance(events[-1], Allocate):
                results.append(events.pop())
            events += _in_order(own, results)
        events.append(event)
    return replace(work, events=tuple(events))


def _in_order(own: Sequence[int], results: list[Event]) -> Iterator[Event]:
    """Yield an operator's internal allocations and frees, with the allocations of its results in their places."""
    alive: dict[int, int] = {}
    for number, entry in enumerate(own, 1):
        if entry > 0:
            alive[-number] = entry
            yield Allocate(-number, entry, "temporary")
        elif alive.pop(entry, 0):
            yield Free(entry)
        elif entry == 0 and results:
            yield results.pop()
    yield from reversed(results)


def _memory_events(work: Work) -> Iterator[tuple[int, Allocate | Free]]:
    for held in work.held:
        yield -1, held
    for place, event in enumerate(work.events):
        if not isinstance(event, Launch):
            yield place, event


def next_launches(work: Work) -> list[Launch | None]:
    """Return the launch at or after each event, or else the last launch."""
    found: list[Launch | None] = [None] * len(work.events)
    last = next((event for event in reversed(work.events) if isinstance(event, Launch)), None)
    for place in range(len(work.events) - 1, -1, -1):
        event = work.events[place]
        last = found[place] = event if isinstance(event, Launch) else last
    return found


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
    """The memory of one rank in the step in which it needs the most."""

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
