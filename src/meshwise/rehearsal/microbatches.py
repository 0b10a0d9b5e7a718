"""Compose a step of many microbatches from a trace of few.

A marked trace says where the forward and the backward of each microbatch begin. All microbatches but the first two and
the last run the same operators, so a step of any number of them is put together from these pieces, in the order of the
pipeline's schedule.

An event refers to other events: to the allocation that it frees, and to the launches that it waits for. A reference
leads to the same microbatch, the one before, the first, or the last launch of a stream. After the last backward, all
microbatches are visited one after the other, for instance to free what was sent. Anything else raises Unlike.

Tested in tests/rehearsal/test_replay.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshwise.rehearsal.growth import Unlike
from meshwise.rehearsal.replay import grown_event
from meshwise.rehearsal.trace import Trace
from meshwise.rehearsal.work import Allocate, Event, Free, Launch, Mark

LEAST = 4
"""The fewest microbatches from which a step can be composed: the first two, the last, and one between."""
REST = "rest"
Order = tuple[bool, int]  # an action: whether it is a forward, and its microbatch


class Piece(NamedTuple):
    """A part of a trace. section: 0 and 2 are the memory held before the first and a later step, 1 and 3 the events.
    name: `input`, `forward` or `backward`, or `rest` for what belongs to no microbatch. number: the microbatch, or a
    running number for `rest`."""

    section: int
    name: str
    number: int


class _Place(NamedTuple):
    """An entry of a piece: the number `at`, from 0."""

    piece: Piece
    at: int


class _Last(NamedTuple):
    """The last launch of a stream so far."""

    stream: str


@dataclass
class _Entry:
    """An event, with what it refers to: the first allocation of its storage, or launches of the same section."""

    event: Event
    refers: list[_Place | _Last]


@dataclass
class _Pieces:
    """A trace, cut into pieces.

    entries: the events of each piece, in the order of the trace.
    count: the number of microbatches.
    """

    entries: dict[Piece, list[_Entry]]
    count: int


def composed(short: Trace, long: Trace, orders: Callable[[int], Sequence[Order]], count: int) -> Trace:
    """Return the trace of a step of `count` microbatches. Storages are numbered anew.

    short, long: marked traces of n and n + 1 microbatches, n at least LEAST.
    orders: returns the actions of a step of so many microbatches, in order.

    Raises Unlike if the longer step cannot be composed, or if `long` is not what is composed of `short`.
    """
    one, other = _cut(short), _cut(long)
    if one.count < LEAST or other.count != one.count + 1:
        raise Unlike(f"traces of {one.count} and {other.count} microbatches")

    def grown(size: int) -> list[tuple[Any, ...]]:
        mine, its = (_Composing(pieces, orders(size), size).sections() for pieces in (one, other))
        return [tuple(_grown(*two, size - one.count)) for two in zip(mine, its, strict=True)]

    _check_equal(_sections(long), grown(other.count))
    held, first, held_later, step = grown(count)
    return Trace(
        replace(long.first, held=held, events=first),
        replace(long.step, held=held_later, events=step),
        short.reads_values or long.reads_values,
    )


def _sections(trace: Trace) -> Sequence[Sequence[Any]]:
    return trace.first.held, trace.first.events, trace.step.held, trace.step.events


def _check_equal(traced: Sequence[Sequence[Any]], made: Sequence[Sequence[Any]]) -> None:
    """Raise Unlike if the two differ in more than marks and the numbers of storages."""
    numbers: dict[int, int] = {}
    for events, others in zip(traced, made, strict=True):
        before = list(itertools.accumulate((isinstance(event, Mark) for event in events), initial=0))
        unmarked = [event for event in events if not isinstance(event, Mark)]
        for event, other in itertools.zip_longest(unmarked, others):
            if isinstance(event, Launch):
                event = replace(event, after=tuple(place - before[place] for place in event.after))
            elif event is not None and isinstance(other, Allocate | Free):
                event = replace(event, storage=numbers.setdefault(event.storage, other.storage))
            if event != other:
                raise Unlike("a step of few microbatches is not what is composed of its pieces")


def _grown(short: Sequence[Event], long: Sequence[Event], times: int) -> Iterator[Any]:
    """Yield the events, with sizes that grow with the number of microbatches. Raises Unlike if they differ in more."""
    if len(short) != len(long):
        raise Unlike("a step that is composed of few microbatches has another number of events")
    for one, other in zip(short, long, strict=True):
        if one == other:
            yield other
            continue
        found = grown_event(one, other, times)
        changed = {"size": other.size} if isinstance(other, Allocate) else {"what": getattr(other, "what", None)}
        if isinstance(one, Free) or type(one) is not type(other) or replace(one, **changed) != other:
            raise Unlike("a step that is composed of few microbatches has another order of events")
        yield found


def _cut(trace: Trace) -> _Pieces:
    found: dict[Piece, list[_Entry]] = {}
    origin: dict[int, _Place] = {}
    count = 0
    for section, events in enumerate(_sections(trace)):
        piece = Piece(section, REST, 0)
        entries = found.setdefault(piece, [])
        places: list[_Place | None] = []  # of each event of the section
        last: dict[str, int] = {}
        for event in events:
            if isinstance(event, Mark):
                rest = sum(each.section == section and each.name == REST for each in found)
                piece = Piece(section, event.piece, rest if event.piece == REST else event.number)
                entries = found[piece] = []
                count = max(count, event.number + 1)
                places.append(None)
                continue
            place = _Place(piece, len(entries))
            refers: list[_Place | _Last] = []
            if isinstance(event, Launch):
                for number in event.after:
                    target, launch = places[number], events[number]
                    if target is None or not isinstance(launch, Launch):
                        raise Unlike("an event waits for what is no launch")
                    beside = target.piece.number != piece.number or target.piece.name == REST
                    newest = beside and last[launch.stream] == number
                    refers.append(_Last(launch.stream) if newest and piece.name != REST else target)
                last[event.stream] = len(places)
            elif event.storage in origin:
                refers.append(origin[event.storage])
            else:
                origin[event.storage] = place
            places.append(place)
            entries.append(_Entry(event, refers))
    return _Pieces(found, count)


class _Composing:
    """Writes the longer trace, piece by piece."""

    def __init__(self, pieces: _Pieces, orders: Sequence[Order], count: int) -> None:
        self._pieces, self._orders, self._count = pieces, orders, count
        self._places = {piece: n for n, piece in enumerate(pieces.entries)}
        self._storages: dict[_Place, int] = {}
        self._alive: set[int] = set()
        self._next = 0
        self._events: list[Any] = []
        self._launches: dict[_Place, int] = {}
        self._last: dict[str, int] = {}

    def sections(self) -> list[tuple[Any, ...]]:
        found = []
        for section in range(4):
            self._events, self._launches, self._last = [], {}, {}
            if section == 2:
                self._alive.clear()
            for piece in self._longer(section):
                if piece.name == REST:
                    self._write_rest(piece)
                else:
                    for at, entry in enumerate(self._like(piece)):
                        self._write(_Place(piece, at), entry, [self._of(piece, ref) for ref in entry.refers])
            found.append(tuple(self._events))
        return found

    def _longer(self, section: int) -> Iterator[Piece]:
        """The pieces of a section of the longer trace, in order."""
        before = ""
        for piece in self._pieces.entries:
            if piece.section != section:
                continue
            name = "action" if piece.name in ("forward", "backward") else piece.name
            if name == REST:
                yield piece
            elif name != before:
                yield from self._swept(section, name, piece.number)
            before = name

    def _swept(self, section: int, name: str, first: int = 0) -> Iterator[Piece]:
        """The pieces of all microbatches in the longer trace, in order: inputs, or forwards and backwards."""
        if name == "action":
            for forward, number in self._orders:
                yield Piece(section, "forward" if forward else "backward", number)
        else:
            for number in range(first, self._count):
                yield Piece(section, name, number)

    def _short(self, number: int) -> int:
        """The microbatch of the shorter trace that microbatch `number` of the longer one is like."""
        return number if number < 2 else self._pieces.count - 1 if number == self._count - 1 else 2

    def _like(self, piece: Piece) -> list[_Entry]:
        found = self._pieces.entries.get(piece._replace(number=self._short(piece.number)))
        if found is None:
            raise Unlike(f"the shorter step has no {piece.name} of microbatch {piece.number}")
        return found

    def _of(self, piece: Piece, ref: _Place | _Last) -> _Place | _Last:
        """Where a reference of the shorter trace leads, for this piece of the longer trace."""
        if isinstance(ref, _Last) or ref.piece.name == REST:
            return ref
        own, target = self._short(piece.number), ref.piece.number
        if target == own:
            number = piece.number
        elif target == 0:
            number = 0
        elif target == own - 1:
            number = piece.number - 1
        else:
            raise Unlike(f"the {piece.name} of microbatch {own} refers to microbatch {target}")
        return ref._replace(piece=ref.piece._replace(number=number))

    def _write_rest(self, piece: Piece) -> None:
        """Write what belongs to no microbatch, but may visit all of them."""
        entries, at = self._pieces.entries[piece], 0
        while at < len(entries):
            sweep = self._sweep(entries, at)
            if sweep is None:
                refers = [ref for each in entries[at].refers for ref in self._of_rest(each, entries[at].refers)]
                self._write(_Place(piece, at), entries[at], refers)
                at += 1
                continue
            length, backwards, by_piece = sweep
            (first,) = entries[at].refers
            assert isinstance(first, _Place)
            order = list(self._swept(first.piece.section, _family(entries[at])))
            for longer in reversed(order) if backwards else order:
                for entry in by_piece.get(longer._replace(number=self._short(longer.number)), ()):
                    (ref,) = entry.refers
                    assert isinstance(ref, _Place)
                    self._write(_Place(piece, at), entry, [ref._replace(piece=longer)])
            at += length

    def _of_rest(self, ref: _Place | _Last, refers: Sequence[_Place | _Last]) -> Iterator[_Place | _Last]:
        """Where a reference leads, from outside of the microbatches. Of launches that one waits for, to those of all
        microbatches, if the shorter trace has some of each."""
        if isinstance(ref, _Last) or ref.piece.name == REST:
            yield ref
            return
        name, number, last = ref.piece.name, ref.piece.number, self._count - 1
        if number == 2 and not any(isinstance(each, _Place) and each.piece[1:] == (name, 1) for each in refers):
            raise Unlike(f"an event refers to the {name} of microbatch {number} alone")
        # Number 2 of the shorter trace stands for all between the second and the last; those beside it for none.
        like = {0: (0,), 1: (1,), 2: range(2, last), self._pieces.count - 1: (last,)}
        for other in like.get(number, ()):
            yield ref._replace(piece=ref.piece._replace(number=other))

    def _sweep(self, entries: Sequence[_Entry], at: int) -> tuple[int, bool, dict[Piece, list[_Entry]]] | None:
        """Return how many entries from `at` on visit the microbatches in order, whether from the last to the first, and
        the entries of each piece. Return None if they do not visit those between."""
        run = list(self._run(entries, at))
        names = {ref.piece.name for ref in run if 2 <= ref.piece.number < self._pieces.count - 1}
        if not names:
            return None
        best: tuple[int, bool, dict[Piece, list[_Entry]]] | None = None
        for backwards in (False, True):
            found: dict[Piece, list[_Entry]] = {}
            length, newest = 0, -math.inf
            for ref, entry in zip(run, entries[at:], strict=False):
                place = -self._places[ref.piece] if backwards else self._places[ref.piece]
                if ref.piece.name not in names or place < newest:
                    break
                newest, length = place, length + 1
                found.setdefault(ref.piece, []).append(entry)
            if length > (0 if best is None else best[0]):
                best = length, backwards, found
        return best

    def _run(self, entries: Sequence[_Entry], at: int) -> Iterator[_Place]:
        """The references of the entries from `at` on, as long as each leads to a microbatch of one family."""
        family = _family(entries[at])
        for entry in entries[at:]:
            if not family or _family(entry) != family:
                return
            (ref,) = entry.refers
            assert isinstance(ref, _Place)
            yield ref

    def _write(self, place: _Place, entry: _Entry, refers: Sequence[_Place | _Last]) -> None:
        event = entry.event
        if isinstance(event, Launch):
            after = tuple(sorted({self._launched(ref) for ref in refers}))
            number = event.microbatch
            if number >= 0 and place.piece.name != REST:
                number = place.piece.number
            self._launches[place] = self._last[event.stream] = len(self._events)
            self._events.append(replace(event, after=after, microbatch=number))
            return
        if not isinstance(event, Allocate | Free):
            raise Unlike("a mark")
        if refers:
            storage = self._storages.get(refers[0], -1) if isinstance(refers[0], _Place) else -1
        else:
            storage, self._next = self._next, self._next + 1
            self._storages[place] = storage
        if storage < 0 or (storage in self._alive) is isinstance(event, Allocate):
            raise Unlike("the longer step would allocate or free the same storage twice")
        if isinstance(event, Allocate):
            self._alive.add(storage)
        else:
            self._alive.remove(storage)
        self._events.append(replace(event, storage=storage))

    def _launched(self, ref: _Place | _Last) -> int:
        found = self._last.get(ref.stream) if isinstance(ref, _Last) else self._launches.get(ref)
        if found is None:
            raise Unlike("an event of the longer step would wait for a launch that is not there")
        return found


def _family(entry: _Entry) -> str:
    """`input` or `action` if an entry concerns the memory of one microbatch alone, else an empty string."""
    if isinstance(entry.event, Launch) or len(entry.refers) != 1 or not isinstance(entry.refers[0], _Place):
        return ""
    name = entry.refers[0].piece.name
    return "" if name == REST else "action" if name in ("forward", "backward") else name
