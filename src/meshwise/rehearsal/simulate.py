"""Simulate traced steps on a machine: a time and its interval.

The steps are those of one or more ranks.

The errors of prices that depend on the same factor (computing, memory, communication, launches, overlap) are
correlated. The errors of different factors are independent. So the step is simulated again with each factor at both
ends of its interval, and the differences are added as squares.

Tested in tests/rehearsal/test_simulate.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.rehearsal.constants import FIGURES
from meshwise.rehearsal.costs import Cost, Rows, all_that_join, costs_of, items, launched_in_time
from meshwise.rehearsal.period import around, period_of
from meshwise.rehearsal.play import Done, play
from meshwise.rehearsal.price import FACTORS
from meshwise.rehearsal.prices import Overlap, Prices, missing, overlap_of
from meshwise.rehearsal.work import Work
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine

OVERLAP, STEP = "overlap", "step"
"""Causes of uncertainty beside FACTORS: how much overlapping activities slow each other, and unknown effects."""


@dataclass(frozen=True)
class Step:
    """A simulated step.

    seconds: the time until the last simulated rank has ended.
    low, high: the ends of the 80 % interval of `seconds`.
    done: the launches of each rank, in the order in which they began. Their times are those of a step without
        the microbatches that are left out.
    factors: for each cause of uncertainty (FACTORS, OVERLAP, STEP), how many seconds longer the step may be. This is
        the case when all times that depend on the cause are at the upper end of their interval.
    left_out: microbatches that are not in `done`, though `seconds` counts them, see `Work.left_out`.
    period: the seconds of each of them.
    """

    seconds: float
    low: float
    high: float
    done: Mapping[int, tuple[Done, ...]]
    factors: Mapping[str, float]
    left_out: range = range(0)
    period: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were simulated. Each stands for all ranks that do the same work."""
        return tuple(self.done)


def simulate(
    works: Sequence[Work],
    machine: Machine | Prices,
    *,
    interval: bool = True,
    merged: bool = False,
    overlap: Overlap | None = None,
) -> Step:
    """Simulate the step of several ranks, such as one rank of each pipeline stage."""
    prices = machine if isinstance(machine, Prices) else Prices(machine)
    costs = _costs(works, prices)
    devices = prices.machine.devices
    overlaps = {rank: overlap or overlap_of(devices[rank]) for rank in costs}
    left_out = works[0].left_out if works else range(0)
    near = {rank: around(own, left_out) for rank, own in costs.items()} if left_out else {}

    def played(
        ends: Mapping[str, str], rows: Rows | None, overlapping: Mapping[int, Overlap]
    ) -> tuple[list[Done], float]:
        own = {rank: items(each, ends, rows) for rank, each in costs.items()}
        done = play(own, overlapping)
        return done, period_of(own, done, near) if left_out else 0.0

    def length(ends: Mapping[str, str], overlapping: Mapping[int, Overlap] = overlaps) -> float:
        done, period = played(ends, all_that_join, overlapping)
        return _length(done) + len(left_out) * period

    done, period = played({}, launched_in_time if merged else None, overlaps)
    seconds = low = high = _length(done) + len(left_out) * period
    factors: dict[str, float] = {}
    if interval:
        middle, under = length({}), []
        for factor in FACTORS:
            faster, slower = (length({factor: end}) for end in ("low", "high"))
            factors[factor] = max(slower - middle, 0.0)
            under.append(max(middle - faster, 0.0))
        if overlap is None:
            least, most = ({rank: overlap_of(devices[rank], way) for rank in costs} for way in (-1, 1))
            factors[OVERLAP] = max(length({}, most) - middle, 0.0)
            under.append(max(middle - length({}, least), 0.0))
            spread = FIGURES["step" if devices[0].kind == "cpu" else "step.gpu"].spread
            factors[STEP] = seconds * (spread - 1)
            under.append(seconds * (1 - 1 / spread))
        low, high = max(seconds - math.hypot(*under), 0.0), seconds + math.hypot(*factors.values())
    by_rank: dict[int, list[Done]] = {rank: [] for rank in costs}
    for one in done:
        by_rank[one.rank].append(one)
    ordered = {rank: tuple(sorted(own, key=lambda one: (one.start, one.place))) for rank, own in by_rank.items()}
    return Step(seconds, low, high, ordered, factors, left_out, period)


def _costs(works: Sequence[Work], prices: Prices) -> dict[int, list[Cost]]:
    if len({work.rank for work in works}) < len(works):
        raise ValueError(f"each rank must have one trace, but the traces are for ranks {[work.rank for work in works]}")
    if all(work.ranks <= len(prices.machine.devices) for work in works):
        costs = {work.rank: own for work in works if (own := costs_of(work, prices)) is not None}
        if len(costs) == len(works):
            return costs
    unknown = missing(works, prices)
    raise UsageError(
        f"machine '{prices.machine.name}': the time of a step is unknown: {unknown[0]}. Measure the machine with "
        "`meshwise bench --save FILE`, or write its figures into a machine file."
    )


def _length(done: Sequence[Done]) -> float:
    return max((one.end for one in done), default=0.0)
