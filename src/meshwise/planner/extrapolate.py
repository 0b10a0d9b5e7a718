"""Extend the trace of few blocks or microbatches to many.

If the blocks or microbatches are alike, the extended trace equals the real one, event for event. Two traces that differ
by one block (or microbatch) are compared. The longer one repeats some pieces once more. These pieces are inserted again
until there are as many as requested. An event refers to other events: to the allocation that it frees, and to the
launches that it waits for. The references move with the pieces, by the same distance from one piece to the next. If
something does not follow this rule, NotExtrapolable is raised, and the whole model is traced instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshwise.planner.insertions import Insertion, Insertions, NotExtrapolable, grown
from meshwise.planner.trace import Trace
from meshwise.planner.work import Allocate, CollectiveOperation, Event, Free, Launch, Mark, Operation

COUNT = re.compile(r"(?<= )\d+(?= )")
"""A number in a note, such as a number of blocks."""
Read = Callable[[Launch], tuple[Hashable, int | None]]
"""Returns the position of a launch in its block (or microbatch), and the block's index (None outside of blocks)."""

NUMBERS = 1 << 16
"""The size of a collective is only extrapolated up to this many bytes. Larger collectives consist of buckets, so that
their size does not grow linearly with the number of blocks."""
GROWS = ("optimizer", "other")
"""Only in these phases, a small collective (see NUMBERS) may get larger with the number of blocks or microbatches."""


@dataclass(frozen=True)
class GrowthAxis:
    """What a longer trace has more of: blocks of the model, or microbatches of a step."""

    read: Read
    write: Callable[[Launch, int], tuple[str, int]]


def _by_microbatch(launch: Launch) -> tuple[Hashable, int | None]:
    return launch.module, launch.microbatch if launch.microbatch >= 0 else None


MICROBATCHES = GrowthAxis(_by_microbatch, lambda launch, number: (launch.module, number))


def lengthened(short: Trace, long: Trace, times: int, axis: GrowthAxis, buckets: bool = False) -> Trace:
    """Extrapolate a trace with many blocks (or microbatches) from two traces with few."""
    numbers: dict[Hashable, int] = {}
    one, other = _Row(short, axis.read, numbers), _Row(long, axis.read, numbers)
    first_held, first, held, step = map(tuple, _Longer(one, other, times, axis, buckets).sections())
    notes = tuple(_notes(short.step.notes, long.step.notes, times))
    return Trace(
        replace(long.first, held=first_held, events=first, notes=notes),
        replace(long.step, held=held, events=step, notes=notes),
        long.reads_values,
    )


class _Row:
    """A trace as one list of entries: the events of all sections, with a None at the beginning of each section."""

    def __init__(self, trace: Trace, read: Read, numbers: dict[Hashable, int]) -> None:
        self.events: list[Any] = []
        self.keys: list[int] = []
        self.loose: list[int] = []
        self.at: list[int | None] = []
        self.refers: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        self._numbers, self._whats = numbers, dict[int, int]()
        last: dict[int, int] = {}
        sections: Sequence[Sequence[Any]] = (trace.first.held, trace.first.events, trace.step.held, trace.step.events)
        for section, events in enumerate(sections):
            self._add(None, ("section", section), ("section", section), None, ())
            start = len(self.events)
            self.starts.append(start)
            for event in events:
                if isinstance(event, Mark):
                    self._add(event, event, event, None, ())
                elif isinstance(event, Launch):
                    what, (place, number) = event.what, read(event)
                    common = "launch", event.stream, event.phase, place, event.blocks
                    loose: Hashable = what.name if isinstance(what, Operation) else self._what(what)
                    if isinstance(what, CollectiveOperation) and event.phase in GROWS and what.size <= NUMBERS:
                        loose = what.kind, what.ranks, what.dtype
                    key = *common, self._what(what), len(event.after)
                    self._add(event, key, (*common, loose), number, tuple(start + place for place in event.after))
                elif isinstance(event, Allocate):
                    before = last.get(event.storage)
                    own = "allocate", event.category, event.on_host, event.stream, before is None
                    last[event.storage] = len(self.events)
                    self._add(event, (*own, event.size), own, None, () if before is None else (before,))
                else:
                    before = last[event.storage]
                    self._add(event, ("free", self.keys[before]), ("free", self.loose[before]), None, (before,))

    def _what(self, what: Any) -> int:
        """Return a number that is equal for equal operators, collectives or copies."""
        found = self._whats.get(id(what))
        if found is None:
            found = self._whats[id(what)] = self._numbers.setdefault(what, len(self._numbers))
        return found

    def _add(
        self, event: Event | Mark | None, key: Hashable, loose: Hashable, number: int | None, refers: tuple[int, ...]
    ) -> None:
        self.events.append(event)
        self.keys.append(self._numbers.setdefault(key, len(self._numbers)))
        self.loose.append(self._numbers.setdefault(loose, len(self._numbers)))
        self.at.append(number)
        self.refers.append(refers)


class _Moved(NamedTuple):
    """An index that begins at `start` in the first added copy, and grows by `slope` with each further copy."""

    start: int
    slope: int = 0


class _Longer:
    """Builds the events of the extrapolated trace. Events that `long` has and `short` lacks are repeated."""

    def __init__(self, short: _Row, long: _Row, times: int, axis: GrowthAxis, buckets: bool) -> None:
        self.short, self.long, self.times, self.axis, self.buckets = short, long, times, axis, buckets
        self.pieces = Insertions(short.keys, long.keys, (short.loose, long.loose))
        self.keys: list[int] = []
        self.storages: list[int] = []
        self.alive: set[int] = set()
        self.start = self.next = 0

    def sections(self) -> list[list[Any]]:
        """Return the memory held before the first step, the events of this step, and the same for a later step."""
        found: list[list[Any]] = []
        for event in self._events():
            if event is None:
                self.start = len(self.keys)
                found.append([])
                if len(found) == 3:
                    self.alive.clear()
            else:
                found[-1].append(event)
        return found

    def _events(self) -> Iterator[Event | None]:
        begin, shift = 0, 0
        for piece in (*self.pieces.all, None):
            end = len(self.long.events) if piece is None else piece.at
            for place in range(begin, end):
                yield self._fixed(place, place - shift)
            if piece is None:
                return
            yield from self._copies(piece)
            begin, shift = end + piece.length, shift + piece.length

    def _fixed(self, place: int, before: int) -> Event | None:
        """Add to the extrapolated trace an event that is not repeated."""
        event, times = self.long.events[place], self.times
        if event is None:
            return self._put(place, None, (), None)
        refers = self._fixed_refers(place, before)
        number, old = self.long.at[place], self.short.at[before]
        if number is not None and old is not None:
            number = old + times * (number - old)
        if self.long.keys[place] != self.short.keys[before]:
            if self.buckets:
                raise NotExtrapolable("a launch grows with the trace, so that buckets would change at some length")
            event = grown_event(self.short.events[before], event, times)
        return self._put(place, event, refers, number)

    def _fixed_refers(self, place: int, before: int) -> list[int]:
        one, other = self.short.refers[before], self.long.refers[place]
        if len(one) == len(other):
            return [self._fixed_refer(old, new) for old, new in zip(one, other, strict=True)]
        found: list[int] = []  # the launch waits for an event in every copy of a repeated piece
        rest = list(one)
        for new in other:
            piece = self.pieces.of(new)
            if piece is not None:
                found += range(
                    new + (self.times - 1) * piece.shift,
                    new + (self.times - 1) * piece.shift + self.times * piece.length,
                    piece.length,
                )
            elif new - self.pieces.shift(new) in rest:
                old = new - self.pieces.shift(new)
                rest.remove(old)
                found.append(old + self.times * (new - old))
            else:
                raise NotExtrapolable("waits")
        if rest:
            raise NotExtrapolable("waits")
        return found

    def _fixed_refer(self, old: int, new: int) -> int:
        piece, moved = self.pieces.around(new), new - old
        if moved not in ((self.pieces.shift(new),) if piece is None else (piece.shift, piece.shift + piece.length)):
            raise NotExtrapolable("an event refers to different events in the shorter and in the longer of two traces")
        return old + self.times * moved

    def _copies(self, piece: Insertion) -> Iterator[Event | None]:
        places = range(piece.at, piece.at + piece.length)
        ways = [(place, self.long.events[place], *self._ways(piece, place)) for place in places]
        for copy in range(self.times):
            outer = copy in (0, self.times - 1)  # check these: if they are right, so are the copies in between
            for place, event, refers, number in ways:
                own = [start + copy * slope for start, slope in refers]
                at = None if number is None else number.start + copy * number.slope
                yield self._put(place, event, own, at, outer)

    def _ways(self, piece: Insertion, place: int) -> tuple[list[_Moved], _Moved | None]:
        """Return how the references of a repeated event, and its block's number, change from copy to copy."""
        if isinstance(self.long.events[place], Mark | None):
            raise NotExtrapolable("a run of repeated events extends into the next section of the trace")
        beside = [
            (other, way)
            for other, way in ((place - piece.length, -1), (place + piece.length, 1))
            if piece.first <= other < piece.end
        ]
        number, at = self.long.at[place], None
        if number is not None:
            slope = self._slope([(way, self.long.at[other]) for other, way in beside], number)
            other, way = beside[0]
            before = self.short.at[other - piece.shift - (piece.length if way > 0 else 0)]
            moved = number - (before or 0) - (slope if way < 0 else 0)
            at = _Moved(number + (self.times - 1) * moved, slope)
        refers = []
        for which, refer in enumerate(self.long.refers[place]):
            around = self.pieces.around(refer)
            length = around.length if around is not None else 0
            others = [(way, self.long.refers[other][which]) for other, way in beside]
            if around is not None:  # skip neighbors that refer outside of this run
                others = [(way, other) for way, other in others if self.pieces.around(other) is around]
            own = self._slope(others, refer, length)
            shift = self.pieces.shift(refer) if around is None else around.shift + (length if own < 0 else 0)
            if around is not None and not own:
                raise NotExtrapolable("all copies of a repeated event refer to the same copy of another repeated event")
            refers.append(_Moved(refer + (self.times - 1) * shift, own))
        return refers, at

    def _slope(self, beside: Sequence[tuple[int, int | None]], value: int, length: int | None = None) -> int:
        """Return by how much an index grows from each copy of a repeated event to the next."""
        slopes = {None if other is None else way * (other - value) for way, other in beside}
        slope = slopes.pop() if len(slopes) == 1 else None
        if slope is None or (length is not None and abs(slope) not in (0, length)):
            raise NotExtrapolable("an index in a repeated event does not change evenly from copy to copy")
        return slope

    def _put(
        self, place: int, event: Event | None, refers: Sequence[int], number: int | None, check: bool = True
    ) -> Event | None:
        """Add an event to the extrapolated trace, and return it with its new storage, module and references."""
        keys, key = self.keys, self.long.keys[place]
        if check and refers:
            old = self.long.refers[place]
            of = [self.long.keys[each] for each in old] if len(old) == len(refers) else None
            if min(refers) < 0 or max(refers) >= len(keys) or (of and of != [keys[each] for each in refers]):
                raise NotExtrapolable("a copy of a repeated event would refer to an event of another kind")
        keys.append(key)
        kind: type = type(event)
        if kind is Launch or kind is Mark or event is None:
            self.storages.append(-1)
            if event is None or kind is Mark or (number is None and not refers):
                return event
            return self._launch(event, refers, number)
        if refers:
            storage = self.storages[refers[0]]
        else:
            storage, self.next = self.next, self.next + 1
        self.storages.append(storage)
        if (storage in self.alive) is (kind is Allocate):
            raise NotExtrapolable("the extrapolated trace would allocate or free the same storage twice in a row")
        if isinstance(event, Allocate):
            self.alive.add(storage)
            return Allocate(storage, event.size, event.category, event.on_host, event.stream)
        self.alive.remove(storage)
        return Free(storage)

    def _launch(self, event: Any, refers: Sequence[int], number: int | None) -> Launch:
        module, microbatch = event.module, event.microbatch
        if number is not None:
            module, microbatch = self.axis.write(event, number)
        after = tuple(sorted(refer - self.start for refer in refers))
        return Launch(event.what, event.stream, event.phase, module, microbatch, after, event.blocks)


def grown_event(short: Event | None, long: Event, times: int) -> Event:
    """Return an event whose sizes are extrapolated. Raises NotExtrapolable if they cannot be."""
    if isinstance(short, Launch) and isinstance(long, Launch):
        what = grown(short.what, long.what, times)
        if isinstance(what, CollectiveOperation) and what.size > NUMBERS:
            raise NotExtrapolable(f"a collective of more than {NUMBERS} bytes grows with the length of the trace")
        return replace(long, what=what)
    if isinstance(short, Allocate) and isinstance(long, Allocate):
        return replace(long, size=grown(short.size, long.size, times))
    return long


def _notes(short: Sequence[str], long: Sequence[str], times: int) -> Iterator[str]:
    """Yield the notes of the extrapolated trace."""
    for one, other in zip(short, long, strict=False):
        (old, before), (new, now) = (([int(n) for n in COUNT.findall(t)], COUNT.sub("{}", t)) for t in (one, other))
        if before == now and "{}" not in one:
            yield before.format(*grown(old, new, times))
