"""Cut a marked trace into its microbatches.

A marked trace says where the forward and the backward of each microbatch begin. An event refers to other events: to the
allocation that it frees, and to the launches that it waits for. A reference leads to the same, the previous or the
first microbatch, to the previous action, or to the last launch of a stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.trace import Trace
from meshwise.planner.work import Allocate, CollectiveOperation, Event, Free, Launch, Mark

REST, ACTIONS = "rest", ("forward", "backward")
FIRST, HELD, STEP = 1, 2, 3
"""Sections of a trace: the first step, the memory held before a later step, and this step."""
Order = tuple[bool, int]  # an action: whether it is a forward, and its microbatch


class Kind(NamedTuple):
    """A key of an event that does not depend on the number of blocks: the name, section and number of its piece, the
    kind of the event, and the kind of the next launch."""

    name: str
    section: int
    number: int
    event: Hashable
    following: Hashable


class Piece(NamedTuple):
    """A part of a trace. section: 0 and 2 are the memory held before the first and a later step, 1 and 3 the events.
    name: `input`, `forward` or `backward`, or `rest` for what belongs to no microbatch. number: the microbatch, or a
    running number for `rest`."""

    section: int
    name: str
    number: int


class Place(NamedTuple):
    """An entry of a piece. at: its index in the piece."""

    piece: Piece
    at: int


class Last(NamedTuple):
    """The last launch of a stream so far."""

    stream: str


class Left(NamedTuple):
    """A launch of the previous action, or an allocation that this action left in use: number `back` of this `kind`,
    counted from the last one. place: its place in the traced step."""

    kind: Hashable
    back: int
    place: Place


@dataclass
class Entry:
    """An event, with what it refers to: the first allocation of its storage, or launches of the same section."""

    event: Event
    refers: list[Place | Last | Left]


@dataclass
class Pieces:
    """A trace, cut into pieces."""

    entries: dict[Piece, list[Entry]]
    count: int
    before: dict[Piece, Piece]
    left: dict[Piece, dict[Hashable, list[int]]]
    _lasting: dict[Piece, list[int]] = field(default_factory=dict)

    def at(self, place: Place) -> Entry:
        """Return the entry at a place."""
        return self.entries[place.piece][place.at]

    def lasting(self, piece: Piece) -> list[tuple[int, Entry]]:
        """Return an action's allocations that no action frees, as (index in the piece, entry)."""
        if not self._lasting:
            actions = {piece: own for piece, own in self.entries.items() if piece.name in ACTIONS}
            frees = [each for own in actions.values() for each in own if isinstance(each.event, Free)]
            freed = {ref.place if isinstance(ref, Left) else ref for each in frees for ref in each.refers}
            for each, own in actions.items():
                allocates = (at for at, one in enumerate(own) if isinstance(one.event, Allocate) and not one.refers)
                self._lasting[each] = [at for at in allocates if Place(each, at) not in freed]
        return [(at, self.entries[piece][at]) for at in self._lasting[piece]]

    def kinds(self, names: Container[str] = (REST, "input", *ACTIONS)) -> Iterator[tuple[Place, Kind]]:
        """Yield each place in the pieces with these names, and its kind."""
        for piece, own in self.entries.items():
            following: Hashable = None
            for at in reversed(range(len(own) if piece.name in names else 0)):
                kind = kind_of(own[at].event)
                following = kind if isinstance(own[at].event, Launch) else following
                yield Place(piece, at), Kind(piece.name, piece.section, piece.number, kind, following)

    def moved(self, move: Callable[[Launch], Launch], sections: Container[int]) -> Pieces:
        """Return the pieces of these sections, with each launch replaced by `move(launch)`."""
        entries = {
            piece: [Entry(move(one.event), one.refers) if isinstance(one.event, Launch) else one for one in own]
            for piece, own in self.entries.items()
            if piece.section in sections
        }
        return replace(self, entries=entries)

    def with_events(self, changed: Mapping[Place, Event]) -> Pieces:
        """Return the pieces with the events in `changed` at their places."""
        entries = {piece: list(own) for piece, own in self.entries.items()} if changed else self.entries
        for (piece, at), event in changed.items():
            entries[piece][at] = Entry(event, entries[piece][at].refers)
        return replace(self, entries=entries)


def count_of(orders: Iterable[Order]) -> int:
    """Return the number of microbatches in the actions of a step."""
    return sum(forward for forward, _ in orders)


def sections_of(trace: Trace) -> Sequence[Sequence[Any]]:
    """Return the memory held before the first step, its events, and the same for a later step."""
    return trace.first.held, trace.first.events, trace.step.held, trace.step.events


def cut(trace: Trace, known: dict[Any, Any]) -> Pieces:
    """Cut a marked trace into pieces."""
    found: dict[Piece, list[Entry]] = {}
    origin: dict[int, Place] = {}
    pieces = Pieces(found, 0, {}, {})
    for section, events in enumerate(sections_of(trace)):
        piece = Piece(section, REST, 0)
        entries = found.setdefault(piece, [])
        places: list[Place | None] = []  # the place of each event in the section
        last: dict[str, int] = {}
        acted: Piece | None = None
        own: dict[int, int] = {}  # places of this piece's allocations that are still in use
        for event in events:
            if isinstance(event, Mark):
                pieces.left[piece], own = _left(entries, own.values()), {}
                rest = sum(each.section == section and each.name == REST for each in found)
                piece = Piece(section, event.piece, rest if event.piece == REST else event.number)
                if piece.name in ACTIONS:
                    if acted is not None:
                        pieces.before[piece] = acted
                    acted = piece
                entries = found[piece] = []
                pieces.count = max(pieces.count, event.number + 1)
                places.append(None)
                continue
            place = Place(piece, len(entries))
            refers: list[Place | Last | Left] = []
            if isinstance(event, Launch):
                for number in event.after:
                    target, launch = places[number], events[number]
                    if target is None or not isinstance(launch, Launch):
                        raise NotExtrapolable("an event waits for what is no launch")
                    beside = target.piece.number != piece.number or target.piece.name == REST
                    newest = beside and piece.name != REST and last[launch.stream] == number and not _sends(launch)
                    refers.append(Last(launch.stream) if newest else _of_piece(pieces, piece, target))
                last[event.stream] = len(places)
                event = replace(event, what=known.setdefault(event.what, event.what))
            elif event.storage in origin:
                refers.append(_of_piece(pieces, piece, origin[event.storage]))
            else:
                origin[event.storage] = place
            if isinstance(event, Allocate) and origin[event.storage] is place:
                own[event.storage] = place.at
            elif isinstance(event, Free):
                own.pop(event.storage, None)
            places.append(place)
            entries.append(Entry(event, refers))
    return pieces


def _sends(launch: Launch) -> bool:
    """Return whether a launch is a send. Launches wait for the send itself, not for the last of its stream."""
    return isinstance(launch.what, CollectiveOperation) and launch.what.kind == "send"


def _left(entries: Sequence[Entry], allocated: Iterable[int]) -> dict[Hashable, list[int]]:
    """Return the indices of a piece's launches, and of its allocations that are still in use, by kind."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for at in (*allocated, *(at for at, entry in enumerate(entries) if isinstance(entry.event, Launch))):
        found[kind_of(entries[at].event)].append(at)
    return found


def _of_piece(pieces: Pieces, piece: Piece, place: Place) -> Place | Left:
    """Return the reference of an event in a piece to the launch or allocation at `place`."""
    if pieces.before.get(piece) != place.piece or place.piece.number == piece.number:
        return place
    kind = kind_of(pieces.entries[place.piece][place.at].event)
    same = pieces.left[place.piece][kind]
    return Left(kind, len(same) - same.index(place.at), place) if place.at in same else place


def sort_of(action: Piece | None, count: int) -> tuple[str, int]:
    """Return `forward` or `backward`, and 0, 1, 2 or 3 for the first, second, a middle or the last microbatch."""
    if action is None:
        return "", 0
    return action.name, action.number if action.number < 2 else 3 if action.number == count - 1 else 2


def kind_of(event: Event) -> Hashable:
    """Return what events of one kind share, such as a launch's operator and stream."""
    if isinstance(event, Launch):
        return event.what, event.stream, event.module
    return replace(event, storage=0) if isinstance(event, Allocate) else None
