"""Extrapolate a sequence from two that differ by one repetition.

The longer sequence contains some pieces of the shorter one once more. The result contains these pieces even more
often.

The pieces are found by comparing the two sequences. A piece must directly follow an equal piece. If the two sequences
differ in any other way, NotExtrapolable is raised.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.planner.work import CollectiveOperation, Copy, Operation

ENOUGH = 64
"""The number of entries after which `_alike` stops comparing two sequences."""


class NotExtrapolable(Exception):
    """Raised if a long trace cannot be extrapolated exactly from short traces. For example, the longer of two traces
    may have events that do not repeat other events, or the model may do something between its blocks.
    """


@dataclass(frozen=True, slots=True)
class Insertion:
    """Consecutive entries that the longer of two sequences has, and the shorter one lacks. They repeat the entries
    directly before or after them. For example, a b b b c has one `b` more than a b b c."""

    at: int
    length: int
    first: int
    end: int
    shift: int


class Insertions:
    """The pieces of a longer sequence that a shorter one lacks, in order."""

    def __init__(self, short: Sequence[int], long: Sequence[int], loosely: tuple[Sequence[int], Sequence[int]]) -> None:
        """Find the entries that `long` has in addition to `short`."""
        self.all = tuple(_widened(_found(short, long, loosely), long))
        self._firsts = [piece.first for piece in self.all]
        self._ats = [piece.at for piece in self.all]

    def around(self, place: int) -> Insertion | None:
        """Return the insertion whose range from `first` to `end` contains the index `place`, or None."""
        number = bisect_right(self._firsts, place) - 1
        return self.all[number] if number >= 0 and place < self.all[number].end else None

    def of(self, place: int) -> Insertion | None:
        """Return the insertion that contains the entry at index `place` of the longer sequence, or None if there is
        none."""
        number = bisect_right(self._ats, place) - 1
        piece = self.all[number] if number >= 0 else None
        return piece if piece is not None and place < piece.at + piece.length else None

    def shift(self, place: int) -> int:
        """Return how many of the entries before index `place` of the longer sequence are additional."""
        number = bisect_right(self._ats, place) - 1
        return self.all[number].shift + self.all[number].length if number >= 0 else 0


def _found(
    short: Sequence[int], long: Sequence[int], loosely: tuple[Sequence[int], Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (index, length) of each run of entries that `long` has in addition to `short`."""
    found: list[tuple[int, int]] = []
    one = other = 0
    while other < len(long):
        if one < len(short) and short[one] == long[other]:
            one, other = one + 1, other + 1
            continue
        length = _put_in(short, long, loosely, one, other)
        if length:
            found.append((other, length))
            other += length
        else:
            one, other = one + 1, other + 1
    if one < len(short):
        raise NotExtrapolable("the shorter of two traces has events that the longer trace lacks")
    return found


def _put_in(
    short: Sequence[int], long: Sequence[int], loosely: tuple[Sequence[int], Sequence[int]], one: int, other: int
) -> int:
    """Return how many additional entries `long` has at index `other`, where it differs from `short`."""
    left, right = loosely
    most = min(len(long) - other - (len(left) - one), other)
    options: list[tuple[int, int, int]] = []
    if one == len(left):
        options += [(0, 0, -most)] if most and len(long) == other + most and _repeats(long, other, most) else []
    else:
        options += [
            (*_alike(short, long, loosely, one, other + length), -length)
            for length in range(most + 1)
            if right[other + length] == left[one] and (not length or _repeats(long, other, length))
        ]
    if not options:
        raise NotExtrapolable(f"entry {other} of {len(long)}")
    return -max(options)[2]


def _alike(
    short: Sequence[int], long: Sequence[int], loosely: tuple[Sequence[int], Sequence[int]], one: int, other: int
) -> tuple[int, int]:
    """Return how many entries are equal, and how many are loosely equal, before the first that is neither."""
    left, right = loosely
    equal = alike = 0
    for mine, its in zip(range(one, one + ENOUGH), range(other, other + ENOUGH), strict=True):
        if mine >= len(left) or its >= len(right) or left[mine] != right[its]:
            break
        equal, alike = equal + (short[mine] == long[its]), alike + 1
    return equal, alike


def _repeats(long: Sequence[int], place: int, length: int) -> bool:
    return long[place - length] == long[place] and long[place - length : place] == long[place : place + length]


def _widened(found: Sequence[tuple[int, int]], long: Sequence[int]) -> list[Insertion]:
    """Return the insertions, and choose which of several equal entries each insertion takes."""
    stretches = []
    for place, length in found:
        first, end = place - length, place + length
        while first > 0 and long[first - 1] == long[first - 1 + length]:
            first -= 1
        while end < len(long) and long[end] == long[end - length]:
            end += 1
        stretches.append([place, length, first, end])
    for before, behind in itertools.pairwise(stretches):
        before[3] = min(before[3], behind[0] - behind[1])
        behind[2] = max(behind[2], before[3])
    pieces, shift = [], 0
    for place, length, first, end in stretches:
        if end < place + length:  # the next insertion begins inside this one
            raise NotExtrapolable(f"two runs of repeated events overlap at event {place} of the trace")
        at = max(first + (end - length - first) // 2, end - 2 * length)
        pieces.append(Insertion(at, length, first, end, shift))
        shift += length
    return pieces


def grown(short: Any, long: Any, times: int) -> Any:
    """Extrapolate a value linearly."""
    if short == long and type(short) is type(long):
        return long
    if type(short) is type(long) is int:
        return short + times * (long - short)
    if type(short) is type(long) is float and 1 / short == round(1 / short) and 1 / long == round(1 / long):
        return 1 / grown(round(1 / short), round(1 / long), times)  # a fraction such as 1 / microbatches
    if type(short) is type(long) and isinstance(short, CollectiveOperation | Copy):
        return replace(long, size=grown(short.size, long.size, times))
    if isinstance(short, Operation) and isinstance(long, Operation) and short.name == long.name:
        names = ("shapes", "dtypes", "flops", "read", "written")
        values = {name: grown(getattr(short, name), getattr(long, name), times) for name in names}
        call = ""
        if short.call and long.call:
            call = json.dumps(grown(json.loads(short.call), json.loads(long.call), times))
        return replace(long, **values, call=call)
    if type(short) is type(long) is dict and short.keys() == long.keys():
        return {key: grown(short[key], long[key], times) for key in short}
    if type(short) is type(long) and isinstance(short, list | tuple):
        if len(short) == len(long):
            return type(long)(grown(one, other, times) for one, other in zip(short, long, strict=True))
        return type(long)(_longer(short, long, times))
    raise NotExtrapolable(f"{short!r} in the shorter trace and {long!r} in the longer trace cannot be extrapolated")


def _longer(short: Sequence[Any], long: Sequence[Any], times: int) -> list[Any]:
    numbers: dict[Hashable, int] = {}
    one, other = ([numbers.setdefault(json.dumps(each), len(numbers)) for each in given] for given in (short, long))
    found: list[Any] = []
    done = 0
    for piece in Insertions(one, other, (one, other)).all:
        if times < 0:
            gone = (1 - times) * piece.length
            if piece.first + gone > piece.end:
                raise NotExtrapolable("a list does not repeat as often as it is to get shorter")
            found, done = [*found, *long[done : piece.end - gone]], piece.end
            continue
        found += [*long[done : piece.at], *(list(long[piece.at : piece.at + piece.length]) * times)]
        done = piece.at + piece.length
    return [*found, *long[done:]]
