"""Write a step of many microbatches from pieces of a shorter step.

The pieces follow each other in the order of the pipeline's schedule. Events after the last backward may concern
all microbatches, one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.repeat_pieces import (
    ACTIONS,
    REST,
    STEP,
    Entry,
    Last,
    Left,
    Order,
    Piece,
    Pieces,
    Place,
    count_of,
    sort_of,
)
from meshwise.planner.work import Allocate, Free, Launch

Target = tuple[Piece | str, int]  # an entry of a piece of the longer trace, or the last launch of a stream so far


class Composing:
    """Writes the longer trace, piece by piece."""

    def __init__(
        self,
        pieces: Pieces,
        orders: tuple[Sequence[Order], Sequence[Order]],
        left_out: range = range(0),
        launches: bool = False,
    ) -> None:
        """orders: the actions of the first step and of a later step, in order. left_out: the microbatches among them
        that are left out. launches: whether to write only the launches of a later step."""
        self._pieces, self._left_out, self._launches_alone = pieces, left_out, launches
        self._orders = {section: orders[section == STEP] for section in range(4)}
        self._counts = {section: count_of(own) for section, own in self._orders.items()}
        self._places = {piece: n for n, piece in enumerate(pieces.entries)}
        self._before = {
            section: dict(itertools.pairwise(order for order in reversed(own) if order[1] not in left_out))
            for section, own in self._orders.items()
        }
        self._storages: dict[Piece, dict[int, int]] = defaultdict(dict)
        self._alive, self._next = set[int](), 0
        self._events: list[Any] = []
        self._launches: dict[Piece, dict[int, int]] = defaultdict(dict)
        self._last: dict[str, int] = {}
        self._asked: dict[tuple[Piece, bool], list[tuple[int, Entry]]] = {}
        self.written: list[Entry] = []  # the source entry of each written event

    def sections(self) -> list[tuple[Any, ...]]:
        found = []
        for section in (STEP,) if self._launches_alone else range(4):
            self._events, self._last = [], {}
            self._launches.clear()
            if section == 2:
                self._alive.clear()
            for piece in self._longer(section):
                if piece.name == REST:
                    self._write_rest(piece)
                else:
                    like, led = self._like(piece), dict[Piece, Piece]()
                    for at, entry in self._entries(like, piece.name in ACTIONS and piece.number in self._left_out):
                        refers = [self._of(piece, like, ref, led) for ref in entry.refers] if entry.refers else ()
                        self._write(piece, at, entry, refers)
            found.append(tuple(self._events))
        return [(), (), (), *found][-4:]

    def _entries(self, like: Piece, left_out: bool) -> Sequence[tuple[int, Entry]]:
        """Return the entries of a piece of the shorter trace to write, with their places in the piece."""
        if (like, left_out) not in self._asked:
            own = self._pieces.lasting(like) if left_out else list(enumerate(self._pieces.entries[like]))
            alone = [each for each in own if isinstance(each[1].event, Launch)] if self._launches_alone else own
            self._asked[like, left_out] = alone
        return self._asked[like, left_out]

    def _longer(self, section: int) -> Iterator[Piece]:
        """Yield the pieces of a section of the longer trace, in order."""
        before = ""
        for piece in self._pieces.entries:
            if piece.section != section:
                continue
            name = "action" if piece.name in ACTIONS else piece.name
            if name == REST:
                yield piece
            elif name != before:
                yield from self._swept(section, name, piece.number)
            before = name

    def _swept(self, section: int, name: str, first: int = 0) -> Iterator[Piece]:
        """Yield the pieces of all microbatches in the longer trace, in order: inputs, or forwards and backwards."""
        if name == "action":
            for forward, number in self._orders[section]:
                yield Piece(section, "forward" if forward else "backward", number)
        else:
            for number in range(first, self._counts[section]):
                yield Piece(section, name, number)

    def _like(self, piece: Piece) -> Piece:
        """Return the piece of the shorter trace that corresponds to a piece of the longer one."""
        number, short, count = piece.number, self._pieces.count, self._counts[piece.section]
        numbers = range(2, short - 1) if 2 <= number < count - 1 else (number if number < 2 else short - 1,)
        found = [like for n in numbers if (like := piece._replace(number=n)) in self._pieces.entries]
        if not found:
            raise NotExtrapolable(f"the shorter step has no {piece.name} of microbatch {piece.number}")
        follows = sort_of(self._action_before(piece), count)
        sorts = {like: sort_of(self._pieces.before.get(like), short) for like in found}
        return max(found, key=lambda like: (sorts[like] == follows, sorts[like][0] == follows[0], like.number))

    def _action_before(self, piece: Piece) -> Piece | None:
        if piece.name not in ACTIONS:
            return None
        before = self._before[piece.section].get((piece.name == "forward", piece.number))
        return before and Piece(piece.section, "forward" if before[0] else "backward", before[1])

    def _of(self, piece: Piece, like: Piece, ref: Place | Last | Left, led: dict[Piece, Piece]) -> Target:
        """Translate a reference of the shorter trace to its target in the longer one, for the piece `piece`."""
        if isinstance(ref, Left):
            before = self._action_before(piece)
            if before is not None and before.name == ref.place.piece.name:
                same = self._pieces.left[self._like(before)][ref.kind]
                if len(same) < ref.back:
                    raise NotExtrapolable(f"the {before.name} of microbatch {before.number} has left less allocated")
                return before, same[-ref.back]
            ref = ref.place
        if isinstance(ref, Last):
            return ref.stream, 0
        target = led.get(ref.piece)
        if target is None:
            target = led[ref.piece] = self._piece_of(piece, like, ref.piece)
        return target, ref.at

    def _piece_of(self, piece: Piece, like: Piece, ref: Piece) -> Piece:
        """Return the piece of the longer trace to which a reference from `piece` leads."""
        if ref.name == REST:
            return ref
        own, target = like.number, ref.number
        if target == own:
            number = piece.number
        elif target == 0:
            number = 0
        elif target == own - 1:
            number = piece.number - 1
            if number in self._left_out and ref.name in ACTIONS:
                number = self._left_out[0] - 1
            elif number in self._left_out and piece.name in ACTIONS:
                raise NotExtrapolable(f"a {piece.name} refers to another microbatch's input")
        else:
            raise NotExtrapolable(f"the {piece.name} of microbatch {own} refers to microbatch {target}")
        return ref._replace(number=number)

    def _write_rest(self, piece: Piece) -> None:
        """Write events outside the microbatches. Some of them concern each microbatch in turn."""
        entries, at = self._pieces.entries[piece], 0
        while at < len(entries):
            if self._launches_alone and not isinstance(entries[at].event, Launch):
                at += 1
                continue
            sweep = self._sweep(entries, at)
            if sweep is None:
                refers = [ref for each in entries[at].refers for ref in self._of_rest(each, entries[at].refers)]
                self._write(piece, at, entries[at], refers)
                at += 1
                continue
            length, backwards, by_piece = sweep
            (first,) = entries[at].refers
            assert isinstance(first, Place)
            order = list(self._swept(first.piece.section, _family(entries[at])))
            for longer in reversed(order) if backwards else order:
                for entry in by_piece.get(self._like(longer), ()):
                    (ref,) = entry.refers
                    assert isinstance(ref, Place)
                    self._write(piece, at, entry, [(longer, ref.at)])
            at += length

    def _of_rest(self, ref: Place | Last | Left, refers: Sequence[Place | Last | Left]) -> Iterator[Target]:
        """Yield the targets of a reference from outside the microbatches."""
        if isinstance(ref, Left):
            ref = ref.place
        if isinstance(ref, Last) or ref.piece.name == REST:
            yield (ref.stream, 0) if isinstance(ref, Last) else ref
            return
        name, number, last = ref.piece.name, ref.piece.number, self._counts[ref.piece.section] - 1
        if number == 2 and not any(isinstance(each, Place) and each.piece[1:] == (name, 1) for each in refers):
            raise NotExtrapolable(f"an event refers to the {name} of microbatch {number} alone")
        # Microbatches 0, 1 and the last stand for themselves, 2 for all between 1 and the last, others for none.
        like = {0: (0,), 1: (1,), 2: range(2, last), self._pieces.count - 1: (last,)}
        for other in like.get(number, ()):
            if other not in self._left_out or name not in ACTIONS:
                yield ref.piece._replace(number=other), ref.at

    def _sweep(self, entries: Sequence[Entry], at: int) -> tuple[int, bool, dict[Piece, list[Entry]]] | None:
        """Return (number of entries from `at` that concern the microbatches in turn, whether in reverse, entries by
        piece)."""
        run = list(self._run(entries, at))
        names = {ref.piece.name for ref in run if 2 <= ref.piece.number < self._pieces.count - 1}
        if not names:
            return None
        best: tuple[int, bool, dict[Piece, list[Entry]]] | None = None
        for backwards in (False, True):
            found: dict[Piece, list[Entry]] = {}
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

    def _run(self, entries: Sequence[Entry], at: int) -> Iterator[Place]:
        """Yield the references of the entries from `at` on, until an entry is of another family (see `_family`)."""
        family = _family(entries[at])
        for entry in entries[at:]:
            if not family or _family(entry) != family:
                return
            (ref,) = entry.refers
            assert isinstance(ref, Place)
            yield ref

    def _write(self, piece: Piece, at: int, entry: Entry, refers: Sequence[Target]) -> None:
        event = entry.event
        self.written.append(entry)
        if isinstance(event, Launch):
            after = tuple(sorted({self._launched(*ref) for ref in refers})) if refers else ()
            number = event.microbatch if event.microbatch < 0 or piece.name == REST else piece.number
            self._launches[piece][at] = self._last[event.stream] = len(self._events)
            moved = Launch(event.what, event.stream, event.phase, event.module, number, after, event.blocks)
            self._events.append(moved)
            return
        if not isinstance(event, Allocate | Free):
            raise NotExtrapolable("a mark")
        if refers:
            target, number = refers[0]
            storage = -1 if isinstance(target, str) else self._storages[target].get(number, -1)
        else:
            storage, self._next = self._next, self._next + 1
            self._storages[piece][at] = storage
        if storage < 0 or (storage in self._alive) is isinstance(event, Allocate):
            raise NotExtrapolable("the longer step would allocate or free the same storage twice")
        if isinstance(event, Allocate):
            self._alive.add(storage)
            self._events.append(Allocate(storage, event.size, event.category, event.on_host, event.stream))
        else:
            self._alive.remove(storage)
            self._events.append(Free(storage))

    def _launched(self, of: Piece | str, at: int) -> int:
        found = self._last.get(of) if isinstance(of, str) else self._launches[of].get(at)
        if found is None:
            raise NotExtrapolable("an event of the longer step would wait for a launch that is not there")
        return found


def _family(entry: Entry) -> str:
    """Return `input` or `action` for memory that one microbatch allocates or frees there, and "" for other entries."""
    if isinstance(entry.event, Launch) or len(entry.refers) != 1 or not isinstance(entry.refers[0], Place):
        return ""
    name = entry.refers[0].piece.name
    return "" if name == REST else "action" if name in ACTIONS else name
