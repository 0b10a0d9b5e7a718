"""Measure how evenly microbatches follow each other, where a simulated step leaves some of them out.

If they follow each other evenly, each one that is left out takes as long as those beside it.

Tested in tests/rehearsal/test_period.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwise.rehearsal.growth import Unlike
from meshwise.rehearsal.play import Done, Item

EVENLY = 1e-7
"""By how much of itself a period may differ from the next, for rounding."""


def period_of(items: Mapping[int, Sequence[Item]], done: Iterable[Done], left_out: range) -> float:
    """Return the seconds from one microbatch to the next, at the place where microbatches are left out. Return 0 if
    none are.

    Raises Unlike if they do not follow each other evenly on all ranks, or if a host takes longer for a microbatch: then
    its device will have to wait for it at last.
    """
    if not left_out:
        return 0.0
    near = left_out.start - 2, left_out.start - 1, left_out.stop, left_out.stop + 1
    ends: dict[int, dict[int, float]] = {rank: defaultdict(float) for rank in items}
    for one in done:
        if one.launch.microbatch in near:
            of = ends[one.rank]
            of[one.launch.microbatch] = max(of[one.launch.microbatch], one.end)
    periods = [own[after] - own[before] for own in ends.values() for before, after in zip(near, near[1:], strict=False)]
    if not all(math.isclose(one, periods[0], rel_tol=EVENLY) for one in periods):
        raise Unlike("microbatches follow each other unevenly where some are left out")
    for own in items.values():
        if sum(item.host for item in own if item.launch.microbatch == left_out.stop) > periods[0] * (1 + EVENLY):
            raise Unlike("a host launches slower than its device computes")
    return periods[0]


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
