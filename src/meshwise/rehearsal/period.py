"""Measure how evenly the microbatches of a simulated step follow each other.

If they follow each other evenly, those that the step leaves out take as long as those beside them.

Tested in tests/rehearsal/test_period.py.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwise.rehearsal.costs import Cost
from meshwise.rehearsal.growth import Unlike
from meshwise.rehearsal.play import Done, Item

EVENLY = 1e-7
"""By how much of itself a period may differ from the next, for rounding."""


def around(costs: Sequence[Cost], left_out: range) -> tuple[int, ...]:
    """Return the places of a rank's last launches for the two microbatches before those that are left out, and for the
    two after them."""
    near = left_out.start - 2, left_out.start - 1, left_out.stop, left_out.stop + 1
    last = {cost.launch.microbatch: cost.place for cost in costs}
    return tuple(last[number] for number in near)


def period_of(
    items: Mapping[int, Sequence[Item]], done: Iterable[Done], places: Mapping[int, tuple[int, ...]]
) -> float:
    """Return the seconds from one microbatch to the next, at the place where microbatches are left out."""
    ends: dict[int, dict[int, float]] = {rank: {} for rank in items}
    for one in done:
        ends[one.rank][one.place] = one.end
    period = 0.0
    for rank, own in items.items():
        at = [item.place for item in own]
        near = [bisect_left(at, place) for place in places[rank]]  # the place of joined operators is that of the last
        before, here, after = ([ends[rank][n] for n in at[a + 1 : b + 1]] for a, b in itertools.pairwise(near))
        period = period or here[-1] - before[-1]
        pairs = itertools.chain(itertools.zip_longest(before, here), itertools.zip_longest(here, after))
        if not all(one and other and abs(other - one - period) < EVENLY * period for one, other in pairs):
            raise Unlike("microbatches follow each other unevenly where some are left out")
        if sum(item.host for item in own[near[1] + 1 : near[2] + 1]) > period * (1 + EVENLY):
            raise Unlike("a host launches slower than its device computes")
    return period


def within_period(done: Sequence[Done], left_out: range, period: float) -> tuple[Done, ...]:
    """Return what a rank does during one period, in seconds from its beginning."""
    begin = max(one.end for one in done if one.launch.microbatch == left_out.start - 1)

    def clipped(time: float) -> float:
        return min(max(time - begin, 0.0), period)

    return tuple(
        replace(one, ready=clipped(one.ready), start=clipped(one.start), end=clipped(one.end))
        for one in done
        if one.end > begin and one.ready < begin + period
    )
