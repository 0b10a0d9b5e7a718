"""Compute memory over a step: bytes by category, and the peak.

The allocated bytes are known after each event. At the peak, the tensors are known too.

Bytes of a GPU are counted like torch's `memory_allocated` counts them, in blocks of 512. Bytes of a host or of a CPU
device are counted as they were requested.

Tested in tests/rehearsal/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwise.rehearsal.allocator import rounded
from meshwise.rehearsal.work import CATEGORIES, Allocate, Event, Free, Launch, Operation, Work

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Peak:
    """The largest number of bytes allocated at once during a step.

    place: the index in `Work.events` of the event that reached the peak. It is -1 if the step begins at the peak.
    split: the bytes by category, without empty categories.
    phase, module, microbatch: describe the operator, collective or copy for which memory was allocated at the peak.
    """

    bytes: int
    place: int
    split: Mapping[str, int]
    phase: str = ""
    module: str = ""
    microbatch: int = -1


@dataclass(frozen=True)
class Curve:
    """The allocated memory over a step.

    places: the indices of the events that change it, ascending. The first is -1, for the memory held when the step
    begins.
    by_category: the bytes after each of these events, with a column for each of CATEGORIES, in that order.
    """

    work: Work
    places: Bytes
    by_category: Bytes

    @property
    def total(self) -> Bytes:
        """The allocated bytes of all categories together, as an array with the sum after each event in `places`."""
        total: Bytes = self.by_category.sum(axis=1)
        return total

    @cached_property
    def peak(self) -> Peak:
        """The largest number of bytes of all categories together. If several events reach it, the first of them
        counts."""
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
    """Yield what an operator allocates internally, with its results where it allocates them. results: the last one
    first."""
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
    """Return, for each event, the launch that it belongs to."""
    found: list[Launch | None] = [None] * len(work.events)
    last = next((event for event in reversed(work.events) if isinstance(event, Launch)), None)
    for place in range(len(work.events) - 1, -1, -1):
        event = work.events[place]
        last = found[place] = event if isinstance(event, Launch) else last
    return found
