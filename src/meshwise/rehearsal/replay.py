"""Extend the trace of few blocks or microbatches to many.

The blocks or microbatches must be alike. The extended trace then equals the real one, event for event.

Two traces that differ by one block (or microbatch) are compared. The longer one repeats some pieces once more. These
pieces are inserted again until there are as many as requested. An event refers to other events: to the allocation that
it frees, and to the launches that it waits for. The references move with the pieces, by the same distance from one
piece to the next. If something does not follow this rule, Unlike is raised, and the whole model is traced instead.

Tested in tests/rehearsal/test_replay.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshwise.rehearsal.growth import Insertion, Insertions, Unlike, grown
from meshwise.rehearsal.trace import Trace
from meshwise.rehearsal.work import Allocate, CollectiveOperation, Event, Free, Launch, Mark, Operation

_COUNT = re.compile(r"(?<= )\d+(?= )")
Read = Callable[[Launch], tuple[Hashable, int | None]]
"""Returns a key that corresponding launches of all blocks (or microbatches) share, and the index of the block."""

NUMBERS = 1 << 16
"""A collective of at most this many bytes may grow with depth, such as a collective with one number per parameter. A
larger collective is split into buckets at some depth, so that its size does not grow linearly."""
GROWS = ("optimizer", "other")
"""The phases in which collectives may grow with the number of blocks or microbatches."""


@dataclass(frozen=True)
class GrowthAxis:
    """A dimension along which traces grow: the number of blocks or of microbatches.

    read: see `Read`.
    write: takes a launch and the index of another block or microbatch. Returns the (module, microbatch) that the launch
    has there.
    """

    read: Read
    write: Callable[[Launch, int], tuple[str, int]]


def _by_microbatch(launch: Launch) -> tuple[Hashable, int | None]:
    return launch.module, launch.microbatch if launch.microbatch >= 0 else None


MICROBATCHES = GrowthAxis(_by_microbatch, lambda launch, number: (launch.module, number))


def lengthened(short: Trace, long: Trace, times: int, axis: GrowthAxis, buckets: bool = False) -> Trace:
    """Extrapolate two traces to a longer one. `long` repeats blocks (or microbatches) once more than `short`, and the
    result repeats them `times` times more than `short`. Raises Unlike if the traces cannot be extrapolated.

    Storages are numbered differently than in a trace of the whole model.

    buckets: whether the optimizer splits parameters into buckets of a fixed size. With more repetitions, the buckets
    may then change. So Unlike is raised if a launch works on more parameters in `long` than in `short`.
    """
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
    """A trace as one sequence of entries. Entry i consists of the values at index i of these lists.

    events: the event.
    keys: a number that is the same for equal entries.
    loose: a number that is the same for entries that are equal except for growth.
    at: the index of the block or microbatch.
    refers: the indices of earlier entries that the entry refers to.
    """

    def __init__(self, trace: Trace, read: Read, numbers: dict[Hashable, int]) -> None:
        self.events: list[Any] = []
        self.keys: list[int] = []
        self.loose: list[int] = []
        self.at: list[int | None] = []
        self.refers: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        self._numbers, self._whats, streams = numbers, dict[int, int](), dict[str, int]()
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
                    stream = streams.setdefault(event.stream, len(streams))
                    common = "launch", stream, event.phase, place, event.blocks
                    loose: Hashable = what.name if isinstance(what, Operation) else self._what(what)
                    if isinstance(what, CollectiveOperation) and event.phase in GROWS and what.size <= NUMBERS:
                        loose = what.kind, what.ranks, what.dtype
                    key = *common, self._what(what), len(event.after)
                    self._add(event, key, (*common, loose), number, tuple(start + place for place in event.after))
                elif isinstance(event, Allocate):
                    before = last.get(event.storage)
                    stream = streams.setdefault(event.stream, len(streams))
                    own = "allocate", event.category, event.on_host, stream, before is None
                    last[event.storage] = len(self.events)
                    self._add(event, (*own, event.size), own, None, () if before is None else (before,))
                else:
                    before = last[event.storage]
                    self._add(event, ("free", self.keys[before]), ("free", self.loose[before]), None, (before,))

    def _what(self, what: Any) -> int:
        """Return a number that is the same for equal operators, collectives or copies. The number is cached by the id
        of the object, because many launches hold the same object."""
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
    """A number that changes by the same amount from each copy of a piece to the next. `start` is its value in the first
    copy, and `slope` the change."""

    start: int
    slope: int = 0


class _Longer:
    """Builds the lengthened sequence of events, one entry at a time."""

    def __init__(self, short: _Row, long: _Row, times: int, axis: GrowthAxis, buckets: bool) -> None:
        self.short, self.long, self.times, self.axis, self.buckets = short, long, times, axis, buckets
        self.pieces = Insertions(short.keys, long.keys, (short.loose, long.loose))
        self.keys: list[int] = []
        self.storages: list[int] = []
        self.alive: set[int] = set()
        self.start = self.next = 0

    def sections(self) -> list[list[Any]]:
        """Return four lists: the memory held before the first step, the events of the first step, the memory held
        before a later step, and the events of that step."""
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
        """Append the event for an entry that is not repeated, and return it.

        place: the index of the entry in the longer sequence.
        before: the index of the same entry in the shorter sequence.
        """
        event, times = self.long.events[place], self.times
        if event is None:
            return self._put(place, None, (), None)
        refers = self._fixed_refers(place, before)
        number, old = self.long.at[place], self.short.at[before]
        if number is not None and old is not None:
            number = old + times * (number - old)
        if self.long.keys[place] != self.short.keys[before]:
            if self.buckets:
                raise Unlike("a launch has more parameters in the longer trace, so buckets would change at some depth")
            event = grown_event(self.short.events[before], event, times)
        return self._put(place, event, refers, number)

    def _fixed_refers(self, place: int, before: int) -> list[int]:
        one, other = self.short.refers[before], self.long.refers[place]
        if len(one) == len(other):
            return [self._fixed_refer(old, new) for old, new in zip(one, other, strict=True)]
        found: list[int] = []  # it waits for something of each piece
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
                raise Unlike("waits")
        if rest:
            raise Unlike("waits")
        return found

    def _fixed_refer(self, old: int, new: int) -> int:
        piece, moved = self.pieces.around(new), new - old
        if moved not in ((self.pieces.shift(new),) if piece is None else (piece.shift, piece.shift + piece.length)):
            raise Unlike("an event refers to an entry that does not shift by as much as the repeated pieces do")
        return old + self.times * moved

    def _copies(self, piece: Insertion) -> Iterator[Event | None]:
        places = range(piece.at, piece.at + piece.length)
        ways = [(place, self.long.events[place], *self._ways(piece, place)) for place in places]
        for copy in range(self.times):
            outer = copy in (0, self.times - 1)  # those between refer to what lies between
            for place, event, refers, number in ways:
                own = [start + copy * slope for start, slope in refers]
                at = None if number is None else number.start + copy * number.slope
                yield self._put(place, event, own, at, outer)

    def _ways(self, piece: Insertion, place: int) -> tuple[list[_Moved], _Moved | None]:
        """Return how an entry of a repeated piece changes from one copy of the piece to the next: first the changes of
        its references, then the change of its block or microbatch (None if it has none)."""
        if isinstance(self.long.events[place], Mark | None):
            raise Unlike("a repeated piece contains the start of a section of the trace")
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
            if around is not None:  # of a copy at the end of its stretch what lies beside the other stretch
                others = [(way, other) for way, other in others if self.pieces.around(other) is around]
            own = self._slope(others, refer, length)
            shift = self.pieces.shift(refer) if around is None else around.shift + (length if own < 0 else 0)
            if around is not None and not own:
                raise Unlike("the events of all copies of a repeated piece refer to a single copy")
            refers.append(_Moved(refer + (self.times - 1) * shift, own))
        return refers, at

    def _slope(self, beside: Sequence[tuple[int, int | None]], value: int, length: int | None = None) -> int:
        """Return the change of a value from one copy of a piece to the next.

        beside: pairs of a direction (-1 for the copy before, 1 for the copy after) and the value in that copy.

        Raises Unlike if the two copies give different changes, or if `length` is given and the change is not 0,
        `length` or -`length`.
        """
        slopes = {None if other is None else way * (other - value) for way, other in beside}
        slope = slopes.pop() if len(slopes) == 1 else None
        if slope is None or (length is not None and abs(slope) not in (0, length)):
            raise Unlike("a value does not change by the same amount from each copy of a piece to the next")
        return slope

    def _put(
        self, place: int, event: Event | None, refers: Sequence[int], number: int | None, check: bool = True
    ) -> Event | None:
        """Append an event to the longer trace, with new references to earlier entries, and return it.

        check: whether to raise Unlike if a new reference points to another kind of entry than the old reference did.
        """
        keys, key = self.keys, self.long.keys[place]
        if check and refers:
            old = self.long.refers[place]
            of = [self.long.keys[each] for each in old] if len(old) == len(refers) else None
            if min(refers) < 0 or max(refers) >= len(keys) or (of and of != [keys[each] for each in refers]):
                raise Unlike("an event of a repeated piece would refer to an entry of another kind")
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
            raise Unlike("the extended trace would allocate or free the same storage twice")
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
    """Return an event whose sizes are extrapolated. Raises Unlike if they cannot be."""
    if isinstance(short, Launch) and isinstance(long, Launch):
        what = grown(short.what, long.what, times)
        if isinstance(what, CollectiveOperation) and what.size > NUMBERS:
            raise Unlike(f"a collective of more than {NUMBERS} bytes is larger in the longer trace")
        return replace(long, what=what)
    if isinstance(short, Allocate) and isinstance(long, Allocate):
        return replace(long, size=grown(short.size, long.size, times))
    return long


def _notes(short: Sequence[str], long: Sequence[str], times: int) -> Iterator[str]:
    """Yield the notes for the longer trace. A note is kept if it is equal in both traces, or differs only in whole
    numbers, which are extrapolated."""
    for one, other in zip(short, long, strict=False):
        (old, before), (new, now) = (([int(n) for n in _COUNT.findall(t)], _COUNT.sub("{}", t)) for t in (one, other))
        if before == now and "{}" not in one:
            yield before.format(*grown(old, new, times))
