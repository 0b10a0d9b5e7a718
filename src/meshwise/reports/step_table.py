"""Tabulate seconds by step, rank and kind; find stragglers.

The seconds are sums of each rank's attributed time (arrivals.py). A straggler is the rank for which the others wait.

Ranks synchronize in collectives. Between two sync points each rank works alone, and the slowest rank makes the others
wait. Its delay is the time that it took since it left the previous sync point, minus the median of the others' times,
each measured on the rank's own clock. To find the cost of a delay, the sync point's collectives are replayed without
it: each begins when the last rank has arrived and the previous collective has ended, and takes as long as it did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.arrivals import (
    OUTSIDE,
    Arrivals,
    Attribution,
    Whole,
    arrival_table,
    attribution_of,
    step_starts_of,
)
from meshwise.reports.run_report import OUTSIDE_STEPS
from meshwise.reports.spans import KIND, KINDS, LANE, PER_SESSION, Spans, Timeline

WORK = [KIND[k] for k in ("data", "transfer", "forward", "backward", "optimizer", "evaluate", "checkpoint", "idle")]
Seconds = NDArray[np.float64]
CHANCE = 1e-3
"""The probability that a run calls any rank a straggler by mistake, if in fact all ranks are late equally often."""


@dataclass(frozen=True)
class SyncPoints:
    """The points of a run at which ranks waited for each other, in order. Each array has one value per sync point."""

    step: Whole
    rank: Whole
    delay: Seconds
    phase: Whole
    cost: Seconds


_WHOLE, _SECONDS = np.empty(0, np.int64), np.empty(0, np.float64)
NONE = SyncPoints(_WHOLE, _WHOLE, _SECONDS, _WHOLE, _SECONDS)


def sync_points_of(arrivals: Arrivals, spans: Sequence[Spans], attributions: Sequence[Attribution]) -> SyncPoints:
    """Find the sync points of a run."""
    use = arrivals.together
    if len(arrivals.ranks) < 2 or not use.any():
        return NONE
    arrival, end, overlapped = arrivals.arrival[use], arrivals.end[use], arrivals.overlapped[use]
    leaving = np.stack([_left(s, arrival[:, r], end[:, r], overlapped) for r, s in enumerate(spans)], axis=1)
    # A rank leaves all collectives that overlap with a backward when this backward ends, so they form one sync point.
    point = np.concatenate([[0], np.cumsum(np.diff(leaving[:, 0]) > 0)])
    last = np.flatnonzero(np.diff(point, append=point[-1] + 1))
    left = np.maximum.accumulate(leaving[last], axis=0)
    before = np.concatenate([[[int(s["start"][0]) for s in spans]], left[:-1]])
    came = arrival[last]
    rank = (came - before).argmax(axis=1)
    delay = _excess(came - before, rank) / 1e9
    work = np.stack(
        [a.sums(before[:, r])[:, :OUTSIDE] for r, a in enumerate(attributions)], axis=1
    )  # shape: (sync points, ranks, kinds)
    excess = np.stack([_excess(work[:, :, kind], rank) for kind in WORK], axis=1)
    phase = np.array(WORK)[excess.argmax(axis=1)]
    cost = _cost(arrival, end, before, point, rank)
    return SyncPoints(arrivals.step[use][last], arrivals.ranks[rank], delay, phase, cost)


def _left(spans: Spans, arrival: Whole, end: Whole, overlapped: NDArray[np.bool_]) -> Whole:
    """Return the time at which a rank continued after each collective."""
    backward = spans[(spans["kind"] == KIND["backward"]) & (spans["lane"] == LANE["main"])]
    if not len(backward):
        return end
    at = np.maximum(np.searchsorted(backward["start"], arrival, side="right") - 1, 0)
    within = overlapped & (backward["start"][at] <= arrival) & (arrival <= backward["end"][at])
    return np.where(within, backward["end"][at], end)


def _median_of_others(values: NDArray[Any], rank: Whole) -> Seconds:
    """Return the median of each row of `values`. Row i leaves out column `rank[i]`."""
    others = np.ones(values.shape, bool)
    others[np.arange(len(values)), rank] = False
    result: Seconds = np.median(values[others].reshape(len(values), -1), axis=1)
    return result


def _excess(work: Seconds, rank: Whole) -> Seconds:
    """Return how much longer one rank worked than the median of the other ranks, for each sync point."""
    result: Seconds = work[np.arange(len(work)), rank] - _median_of_others(work, rank)
    return result


def _cost(arrival: Whole, end: Whole, before: Whole, point: Whole, rank: Whole) -> Seconds:
    """Return how much earlier each sync point would have ended if its slowest rank were as fast as the median."""
    row, straggler = np.arange(len(arrival)), rank[point]
    taken = arrival - before[point]
    excess = np.maximum(taken[row, straggler] - _median_of_others(taken, straggler), 0)
    on_time = arrival.astype(np.float64)
    on_time[row, straggler] -= excess
    begun, could_begin = arrival.max(axis=1).astype(np.float64), on_time.max(axis=1)
    ended = end.max(axis=1).astype(np.float64)
    first = np.flatnonzero(np.diff(point, prepend=-1))
    count = np.diff(first, append=len(point))
    real = np.full(len(first), -np.inf)
    replayed = real.copy()
    for position in range(int(count.max())):
        has = count > position
        at = first[has] + position
        takes = np.maximum(ended[at] - np.maximum(begun[at], real[has]), 0)
        real[has] = ended[at]
        replayed[has] = np.maximum(could_begin[at], replayed[has]) + takes
    saved: Seconds = np.maximum(real - replayed, 0) / 1e9
    return saved


def decisive(sync_points: SyncPoints) -> Whole:
    """Return, for each step, the index of its most expensive sync point: its last rank was last in the step."""
    order = np.lexsort((sync_points.cost, sync_points.step))
    return order[np.flatnonzero(np.diff(sync_points.step[order], append=-1))]


def straggler_ranks(last: Whole, ranks: Whole) -> list[int]:
    """Return the ranks that are last in more steps than chance would explain. last: the last rank of each step."""
    fair, total = 1 / max(len(ranks), 1), len(last)
    times = {rank: int((last == rank).sum()) for rank in ranks.tolist()}
    return [rank for rank in times if total and tail_bound(total, times[rank], fair) * len(ranks) < CHANCE]


def tail_bound(total: int, times: int, fair: float) -> float:
    """Return an upper bound on the probability of at least `times` successes in `total` trials of probability
    `fair`."""
    share = times / total
    if share <= fair:
        return 1.0
    divergence = share * math.log(share / fair)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - fair))
    return math.exp(-total * divergence)


HIDDEN = OUTSIDE + 1
"""The last column of `StepTable.seconds`: communication hidden by computing."""
OF_STEP = [code for kind, code in KIND.items() if kind not in OUTSIDE_STEPS]


@dataclass(frozen=True)
class StepTable:
    """The time that the ranks of a run spent in each step, by kind of time. Each array except `ranks` has one row per
    step, in the order in which the steps were done."""

    ranks: Whole
    step: Whole
    session: Whole
    start: Whole
    seconds: Seconds
    present: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    arrivals: Arrivals
    sync_points: SyncPoints

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Mask of the steps that count: all but step 0 and steps whose work was lost in a restart."""
        return (self.step > 0) & ~self.lost

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Mask of the steps that count and have a backward pass."""
        return self.counted & (self.seconds[:, :, KIND["backward"]] > 0).any(axis=1)

    @property
    def steady(self) -> NDArray[np.bool_]:
        """Mask of the training steps that are used for medians."""
        first = np.concatenate([[True], np.diff(self.session) > 0]) | (np.concatenate([[0], self.step[:-1]]) == 0)
        rest = self.trained & ~first
        return rest if rest.sum() >= 5 else self.trained

    def step_seconds(self) -> Seconds:
        """Return the seconds of each step, without evaluation and saving."""
        return _mean_over_ranks(self.seconds[:, :, OF_STEP].sum(axis=2), self.present)

    def kind_seconds(self) -> Seconds:
        """Return how many seconds each step spent on each kind of time, as an array of shape (steps, kinds)."""
        return _mean_over_ranks(self.seconds[:, :, : len(KINDS)], self.present[:, :, None])


def step_table_of(timeline: Timeline) -> StepTable:
    """Build the step table of a timeline."""
    arrivals = arrival_table(timeline.spans, timeline.names)
    ranks = np.unique(timeline.spans["rank"])
    spans = [timeline.of_rank(rank) for rank in ranks.tolist()]
    attributions = [attribution_of(mine, arrivals, timeline.sessions) for mine in spans]
    begins = [step_starts_of(mine, timeline.sessions) for mine in spans]
    key = np.unique(np.concatenate([np.empty(0, np.int64), *(number for _, number in begins)]))
    start = np.full(len(key), np.iinfo(np.int64).max)
    seconds = np.zeros((len(key), len(ranks), HIDDEN + 1))
    present = np.zeros((len(key), len(ranks)), bool)
    for column, ((begun, number), attribution) in enumerate(zip(begins, attributions, strict=True)):
        row = np.searchsorted(key, number)
        seconds[row, column] = attribution.sums(begun)
        present[row, column] = True
        start[row] = np.minimum(start[row], begun)
    members = np.searchsorted(ranks, arrivals.ranks).tolist()
    points = sync_points_of(arrivals, [spans[at] for at in members], [attributions[at] for at in members])
    session, step = np.divmod(key, PER_SESSION)
    return StepTable(ranks, step, session, start, seconds, present, _lost(step, session), arrivals, points)


def _lost(step: Whole, session: Whole) -> NDArray[np.bool_]:
    """Return a mask of the steps that were lost: a later session began again at or before them."""
    lost = np.zeros(len(step), bool)
    for later in np.unique(session)[1:]:
        again = step[(session == later) & (step > 0)]
        if len(again):
            lost |= (session < later) & (step >= again.min())
    return lost


def _mean_over_ranks(values: Seconds, present: NDArray[np.bool_]) -> Seconds:
    count = np.maximum(present.sum(axis=1), 1)
    mean: Seconds = (values * present).sum(axis=1) / count
    return mean
