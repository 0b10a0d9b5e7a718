"""Track who last read and wrote which bytes, as intervals.

A write replaces all earlier accesses of the same bytes that are ordered before it. This loses no race: a later access
that does not wait for a replaced access does not wait for the write either. In the same way, a read replaces earlier
reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from meshwise.torch_compat.gpu_trace import Lane

MOST_STRIDED = 64
"""How many accesses of the same byte by strided views, such as columns, are remembered. The oldest are forgotten."""
MOST_TRIED = 4096
"""After this many tries, `have_common_bytes` assumes that two views overlap."""


class Region(NamedTuple):
    """The addresses of the bytes that a view of a tensor covers."""

    lo: int
    hi: int
    run: int
    outer: tuple[tuple[int, int], ...] = ()


def region_of(start: int, item: int, shape: Sequence[int], strides: Sequence[int]) -> Region | None:
    """Return the bytes of a view that begins at address `start`, or None if the view has no elements."""
    if 0 in shape:
        return None
    run, outer = item, list[tuple[int, int]]()
    for step, count in sorted((stride * item, size) for stride, size in zip(strides, shape, strict=True)):
        if step == run and not outer:
            run *= count
        elif count > 1 and step:
            outer.append((step, count))
    return Region(start, start + run + sum(step * (count - 1) for step, count in outer), run, tuple(outer))


def have_common_bytes(one: Region, other: Region) -> bool:
    """Return whether two views share at least one byte. If the search takes more than MOST_TRIED tries, return True."""
    if one.lo >= other.hi or other.lo >= one.hi:
        return False
    if not one.outer and not other.outer:
        return True
    try:
        return bool(np.shares_memory(_array(one), _array(other), MOST_TRIED))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _array(region: Region) -> Any:
    """Return an array over these addresses, whose elements must not be read."""
    steps, counts = zip(*region.outer, (1, region.run), strict=True)
    facts = {"data": (region.lo + 1, True), "shape": counts, "strides": steps, "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=facts))  # + 1, as address 0 would allocate memory


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """An operator's read or write of bytes."""

    lane: Lane
    number: int
    writes: bool
    region: Region
    block: Any
    what: str
    where: Any


IsBefore = Callable[[Access], bool]


class ShadowMemory:
    """The latest accesses of memory, by address. Each cell of memory ends where the next one begins."""

    def __init__(self) -> None:
        self._starts, self._cells = [0], [list[Access]()]

    def split(self, *addresses: int) -> None:
        """Begin a cell at each of these addresses. Accesses of strided views split no cells."""
        for at in addresses:
            index = bisect_right(self._starts, at)
            if self._starts[index - 1] < at:
                self._cells.insert(index, self._cells[index - 1])
                self._starts.insert(index, at)

    def add(self, access: Access, is_before: IsBefore) -> list[Access]:
        """Add an access. Return the earlier accesses that race with it."""
        region, found, writes = access.region, dict[int, Access](), access.writes
        if not region.outer:
            self.split(region.lo, region.hi)
        cells = self._between(region.lo, region.hi)
        for earlier in chain.from_iterable(self._cells[cells]):
            races = (writes or earlier.writes) and not is_before(earlier)
            if races and have_common_bytes(earlier.region, region):
                found[id(earlier)] = earlier
        if writes and not region.outer and not found:
            self._starts[cells], self._cells[cells] = [region.lo], [[access]]
        else:
            self._cells[cells] = [_followed(cell, access, is_before) for cell in self._cells[cells]]
        return list(found.values())

    def forget(self, lo: int, hi: int, which: Callable[[Access], bool]) -> None:
        """Forget the accesses of bytes in [lo, hi) for which `which` returns True."""
        self.split(lo, hi)
        cells = self._between(lo, hi)
        self._cells[cells] = [[each for each in cell if not which(each)] for cell in self._cells[cells]]

    def _between(self, lo: int, hi: int) -> slice:
        return slice(bisect_right(self._starts, lo) - 1, bisect_left(self._starts, hi))


def _followed(cell: list[Access], access: Access, is_before: IsBefore) -> list[Access]:
    """Return the accesses that the checker has to remember after `access`, and `access` itself."""
    dense = not access.region.outer
    kept = [
        each
        for each in cell
        if (each.writes and not access.writes) or not (dense or each.region == access.region) or not is_before(each)
    ]
    strided = [each for each in kept if each.region.outer]
    return [*(each for each in kept if each not in strided[:-MOST_STRIDED]), access]
