"""Track who last read and wrote which bytes, as intervals.

A write replaces all earlier accesses of the same bytes that are ordered before it. This loses no race: a later access
that does not wait for a replaced access does not wait for the write either. In the same way, a read replaces earlier
reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from meshwise.checker.races.order import Lane

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
    steps = [*((-step, count) for step, count in one.outer), *other.outer]
    steps.sort(key=lambda each: -abs(each[0]))
    tried = 0

    def lands(apart: int, rest: list[tuple[int, int]]) -> bool:
        """Return whether runs `apart` bytes apart can overlap if moved by the steps in `rest`."""
        nonlocal tried
        tried += 1
        if not rest or tried > MOST_TRIED:
            return tried > MOST_TRIED or -other.run < apart < one.run
        (step, count), rest = rest[0], rest[1:]
        low = sum(min(0, s * (c - 1)) for s, c in rest)
        high = sum(max(0, s * (c - 1)) for s, c in rest)
        ends = sorted(((-other.run - high - apart) / step, (one.run - low - apart) / step))
        return any(lands(apart + step * i, rest) for i in range(max(0, int(ends[0])), min(count, int(ends[1]) + 1)))

    return lands(other.lo - one.lo, steps)


class Access:
    """An operator's read or write of bytes."""

    __slots__ = ("block", "lane", "number", "region", "what", "where", "writes")

    def __init__(self, lane: Lane, number: int, writes: bool, region: Region, of: tuple[Any, Any, Any]) -> None:
        self.lane, self.number, self.writes, self.region = lane, number, writes, region
        self.block, self.what, self.where = of


class _Cell:
    """The remembered accesses of the bytes in [lo, hi)."""

    __slots__ = ("hi", "lo", "reads", "writes")

    def __init__(self, lo: int, hi: int, writes: Iterable[Access] = (), reads: Iterable[Access] = ()) -> None:
        self.lo, self.hi, self.writes, self.reads = lo, hi, list(writes), list(reads)


IsBefore = Callable[[Access], bool]


class ShadowMemory:
    """The latest accesses of memory, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[_Cell] = []

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, access: Access, is_before: IsBefore) -> list[Access]:
        """Add an access. Return the earlier accesses that race with it."""
        region, found = access.region, dict[int, Access]()
        cells = self._opened(region)
        for cell in cells:
            for earlier in (*cell.writes, *(cell.reads if access.writes else ())):
                if earlier is not access and not is_before(earlier) and have_common_bytes(earlier.region, region):
                    found[id(earlier)] = earlier
        if access.writes and not region.outer and not found:
            self._replace(region.lo, region.hi, _Cell(region.lo, region.hi, [access]))
            return list(found.values())
        for cell in cells:
            if access.writes:
                cell.reads = _kept(cell.reads, access, is_before)
                cell.writes = [*_kept(cell.writes, access, is_before), access][-MOST_STRIDED:]
            else:
                cell.reads = [*_kept(cell.reads, access, is_before), access]
                cell.reads = cell.reads if not region.outer else cell.reads[-MOST_STRIDED:]
        return list(found.values())

    def forget(self, lo: int, hi: int, which: Callable[[Access], bool]) -> None:
        """Forget the accesses of bytes in [lo, hi) for which `which` returns True."""
        self._split(lo)
        self._split(hi)
        first, last = self._between(lo, hi)
        for cell in self._cells[first:last]:
            cell.writes = [each for each in cell.writes if not which(each)]
            cell.reads = [each for each in cell.reads if not which(each)]
        left = [cell for cell in self._cells[first:last] if cell.writes or cell.reads]
        self._cells[first:last], self._starts[first:last] = left, [cell.lo for cell in left]

    def _opened(self, region: Region) -> list[_Cell]:
        """Return the cells that cover the region, in order."""
        if not region.outer:
            self._split(region.lo)
            self._split(region.hi)
        first, last = self._between(region.lo, region.hi)
        found, at = list[_Cell](), region.lo
        for cell in self._cells[first:last]:
            found += [_Cell(at, cell.lo)] if at < cell.lo else []
            found.append(cell)
            at = cell.hi
        found += [_Cell(at, region.hi)] if at < region.hi else []
        if len(found) > last - first:
            self._cells[first:last], self._starts[first:last] = found, [cell.lo for cell in found]
        return found

    def _between(self, lo: int, hi: int) -> tuple[int, int]:
        first = bisect_right(self._starts, lo) - 1
        first += first < 0 or self._cells[first].hi <= lo
        return first, max(first, bisect_left(self._starts, hi))

    def _split(self, at: int) -> None:
        index = bisect_right(self._starts, at) - 1
        if index >= 0 and self._cells[index].lo < at < self._cells[index].hi:
            cell = self._cells[index]
            self._cells.insert(index + 1, _Cell(at, cell.hi, cell.writes, cell.reads))
            self._starts.insert(index + 1, at)
            cell.hi = at

    def _replace(self, lo: int, hi: int, cell: _Cell) -> None:
        first, last = self._between(lo, hi)
        self._cells[first:last], self._starts[first:last] = [cell], [lo]


def _kept(earlier: list[Access], access: Access, is_before: IsBefore) -> list[Access]:
    """Return the accesses in `earlier` that the checker still has to remember after `access`."""
    dense = not access.region.outer
    return [each for each in earlier if not ((dense or each.region == access.region) and is_before(each))]
