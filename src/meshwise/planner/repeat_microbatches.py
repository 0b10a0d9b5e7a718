"""Compose a step of many microbatches from a trace of few.

All microbatches except the first two and the last run the same operators, each after the same action. So a step of any
number of microbatches can be composed from the pieces of a short step (repeat_pieces.py, repeat_steps.py). If the
microbatches differ, NotExtrapolable is raised.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.planner.extrapolate import grown_event
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.repeat_pieces import (
    FIRST,
    HELD,
    REST,
    STEP,
    Kind,
    Order,
    Piece,
    Place,
    count_of,
    cut,
    kind_of,
    sections_of,
)
from meshwise.planner.repeat_steps import Composing
from meshwise.planner.trace import Trace
from meshwise.planner.work import Allocate, Event, Free, Launch, Mark, Work

LEAST = 4
"""The fewest microbatches from which a step can be composed: the first two, the last, and one between."""
Composer = Callable[..., Trace]
Move = Callable[[Launch], Launch]
Growth = Mapping[Kind, tuple[Event, Event]]  # maps a kind to its events in traces of n and n + 1 microbatches


def composer(short: Trace, growth: Growth) -> Composer:
    """Return a function that composes the trace of a step of many microbatches from the pieces of `short`."""
    pieces = cut(short, {})
    if pieces.count < LEAST:
        raise NotExtrapolable(f"a trace of {pieces.count} microbatches")
    grows = {place: kind for place, kind in pieces.kinds({kind.name for kind in growth}) if kind in growth}
    if growth.keys() - set(grows.values()):
        raise NotExtrapolable("an event that grows with the number of microbatches is not in the trace")
    growing = {place: growth[kind] for place, kind in grows.items()}
    for at, entry in enumerate(pieces.entries[Piece(HELD, REST, 0)] if growing else ()):
        if (ref := next(iter(entry.refers), None)) in growing:
            growing[Place(Piece(HELD, REST, 0), at)] = growing[ref]

    def made(
        actions: Sequence[Order],
        left_out: range = range(0),
        move: Move = lambda launch: launch,
        launches: bool = False,
    ) -> Trace:
        times = count_of(actions) - pieces.count
        grown = {place: _grown(pieces.at(place).event, pair, times) for place, pair in growing.items()}
        own = pieces.with_events(grown).moved(move, (STEP,) if launches else range(4))
        held, begun, held_later, step = Composing(own, (actions, actions), left_out, launches).sections()
        return Trace(
            replace(short.first, held=held, events=begun, left_out=left_out),
            replace(short.step, held=held_later, events=step, left_out=left_out),
            short.reads_values,
            launches,
        )

    return made


def growth_of(short: Trace, long: Trace, orders: Callable[[int], Sequence[Order]]) -> Growth:
    """Compare traces of n and n + 1 microbatches. Return the events whose sizes grow."""
    pieces = cut(short, {})
    actions, first = (orders(_microbatches(work)) for work in (long.step, long.first))
    if count_of(actions) != pieces.count + 1:
        raise NotExtrapolable(f"traces of {pieces.count} and {count_of(actions)} microbatches")
    composing = Composing(pieces, (first, actions))
    pairs = list(_pairs(composing.sections(), long))
    if len(pairs) != len(composing.written):
        raise NotExtrapolable("a step of one more microbatch has other events than what is composed of its pieces")
    kinds = {id(pieces.at(place)): kind for place, kind in pieces.kinds()}
    growth: dict[Kind, tuple[Event, Event]] = {}
    same: set[Kind] = set()
    for entry, (event, traced) in zip(composing.written, pairs, strict=True):
        kind = kinds[id(entry)]
        if event == traced:
            same.add(kind)
        elif _grown(event, growth.setdefault(kind, (event, traced)), 1) != traced:
            raise NotExtrapolable("a step of one more microbatch is not what is composed of its pieces")
    if same & growth.keys():
        raise NotExtrapolable("some events of a kind grow with the number of microbatches, and others do not")
    begun = {kind._replace(section=FIRST): pair for kind, pair in growth.items() if kind.section == STEP}
    if not begun.keys() <= set(kinds.values()):
        raise NotExtrapolable("an event that grows with the number of microbatches is not in the first step")
    return {**begun, **growth}


def with_fewer(growth: Growth, count: int, fewer: int) -> Growth:
    """Return the events whose sizes grow, as they are in a trace of fewer microbatches."""
    kinds = {kind_of(one): kind_of(grown_event(one, other, -fewer)) for one, other in growth.values()}
    found: dict[Kind, tuple[Event, Event]] = {}
    for kind, (one, other) in growth.items():
        if kind.name != REST and 2 <= kind.number < count - 1:
            raise NotExtrapolable("an event of a microbatch between others grows with their number")
        number = kind.number - fewer if kind.name != REST and kind.number == count - 1 else kind.number
        following = kinds.get(kind.following, kind.following)
        found[kind._replace(number=number, event=kinds[kind.event], following=following)] = (
            grown_event(one, other, -fewer),
            grown_event(one, other, 1 - fewer),
        )
    return found


def _microbatches(work: Work) -> int:
    events: Iterable[Any] = work.events
    return 1 + max(event.number for event in events if isinstance(event, Mark))


def with_more(trace: Trace) -> Trace:
    """Return `trace` with `trace.more`, a step of one more microbatch, in place of `trace.step`."""
    step, more = trace.step, trace.more
    if more is None:
        raise NotExtrapolable("no step of one more microbatch was traced")
    sort = operator.attrgetter("category", "size", "on_host", "stream")
    begins: list[list[Allocate]] = [sorted(work.held, key=sort) for work in (step, more)]
    named = {old.storage: new.storage for new, old in zip(*begins, strict=False)}

    def of(event: Any) -> Any:
        """Return an event of `more`. If its storage is held at the beginning, number it as in `step`."""
        number = None if isinstance(event, Launch | Mark) else named.get(event.storage)
        return event if number is None else replace(event, storage=number)

    if [of(one) for one in begins[1]] != begins[0]:
        raise NotExtrapolable("a later step begins with other memory than the one before")
    return replace(trace, step=replace(more, held=step.held, events=tuple(map(of, more.events))))


def check_equal(traced: Trace, made: Trace) -> None:
    """Raise NotExtrapolable if two traces differ in more than marks and the numbers of storages."""
    if any(event != other for event, other in _pairs(sections_of(made), traced)):
        raise NotExtrapolable("a step of few microbatches is not what is composed of its pieces")


def _pairs(made: Sequence[Sequence[Any]], traced: Trace) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a composed and a traced event.
    Marks are skipped. The traced event gets the other's storage."""
    numbers: dict[int, int] = {}
    for others, events in zip(made, sections_of(traced), strict=True):
        before = list(itertools.accumulate((isinstance(event, Mark) for event in events), initial=0))
        unmarked = [event for event in events if not isinstance(event, Mark)]
        for other, event in itertools.zip_longest(others, unmarked):
            if isinstance(event, Launch):
                event = replace(event, after=tuple(place - before[place] for place in event.after))
            elif event is not None and isinstance(other, Allocate | Free):
                event = replace(event, storage=numbers.setdefault(event.storage, other.storage))
            yield other, event


def _grown(event: Event, pair: tuple[Event, Event], times: int) -> Event:
    """Extrapolate an event by `times` microbatches. pair: the event in traces of n and n + 1 microbatches."""
    found = grown_event(*pair, times)
    if isinstance(event, Launch) and isinstance(found, Launch):
        return replace(event, what=found.what)
    if isinstance(event, Allocate) and isinstance(found, Allocate):
        return replace(event, size=found.size)
    raise NotExtrapolable("an event has a counterpart of another kind in a step of one more microbatch")
