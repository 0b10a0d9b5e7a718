"""Who was late, in which phase, and what it cost.

Ranks meet in collectives. Between two meetings each works alone; the one that takes longest makes the others wait. Its
excess is what it took longer than the others' median since it left the last meeting, each on its own clock. What it
cost is found by playing the meeting's collectives again with the late rank on time: each begins when the last rank has
come and the collective before it is through, and takes as long as it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.account import OUTSIDE, Account, Whole
from meshwise.timeline.arrivals import Arrivals
from meshwise.timeline.spans import KIND, LANE
from meshwise.timeline.timeline import Spans

WORK = [KIND[k] for k in ("data", "transfer", "forward", "backward", "optimizer", "evaluate", "checkpoint", "idle")]
Seconds = NDArray[np.float64]
CHANCE = 1e-3
"""How often ranks that are late by turns of chance may be called late, a run."""


@dataclass(frozen=True)
class Meetings:
    """Where ranks waited for each other, in order; all have the shape (meetings,).

    step: the step in which it was. beside: the end of a backward, not a collective by itself. rank: who came last, had
    all left the last meeting together: a slow link keeps its rank there for longer every time, which is no lateness.
    late: seconds that it took longer from there than the others' median. phase: index in KINDS of where it took longest
    over the others' median. cost: seconds by which the meeting would have ended earlier with this rank on time.
    """

    step: Whole
    beside: NDArray[np.bool_]
    rank: Whole
    late: Seconds
    phase: Whole
    cost: Seconds


_WHOLE, _SECONDS = np.empty(0, np.int64), np.empty(0, np.float64)
NONE = Meetings(_WHOLE, np.empty(0, np.bool_), _WHOLE, _SECONDS, _WHOLE, _SECONDS)


def meetings_of(arrivals: Arrivals, spans: Sequence[Spans], accounts: Sequence[Account]) -> Meetings:
    """Where ranks met, from their collectives. spans, accounts: of each rank of `arrivals`, in its order."""
    use = arrivals.together
    if len(arrivals.ranks) < 2 or not use.any():
        return NONE
    arrival, end, beside = arrivals.arrival[use], arrivals.end[use], arrivals.beside[use]
    leaving = np.stack([_left(s, arrival[:, r], end[:, r], beside) for r, s in enumerate(spans)], axis=1)
    # Collectives of one backward are left at one moment: they are one meeting.
    meeting = np.concatenate([[0], np.cumsum(np.diff(leaving[:, 0]) > 0)])
    last = np.flatnonzero(np.diff(meeting, append=meeting[-1] + 1))
    left = np.maximum.accumulate(leaving[last], axis=0)
    before = np.concatenate([[[int(s["start"][0]) for s in spans]], left[:-1]])
    came = arrival[last]
    rank = (came - before).argmax(axis=1)
    late = _excess(came - before, rank) / 1e9
    work = np.stack([a.sums(before[:, r])[:, :OUTSIDE] for r, a in enumerate(accounts)], axis=1)  # (m, ranks, kinds)
    excess = np.stack([_excess(work[:, :, kind], rank) for kind in WORK], axis=1)
    phase = np.array(WORK)[excess.argmax(axis=1)]
    cost = _cost(arrival, end, before, meeting, rank)
    return Meetings(arrivals.step[use][last], beside[last], arrivals.ranks[rank], late, phase, cost)


def _left(spans: Spans, arrival: Whole, end: Whole, beside: NDArray[np.bool_]) -> Whole:
    """When a rank went on after each collective: at its end, or at the end of the backward that it ran beside."""
    backward = spans[(spans["kind"] == KIND["backward"]) & (spans["lane"] == LANE["main"])]
    if not len(backward):
        return end
    at = np.maximum(np.searchsorted(backward["start"], arrival, side="right") - 1, 0)
    within = beside & (backward["start"][at] <= arrival) & (arrival <= backward["end"][at])
    return np.where(within, backward["end"][at], end)


def _median_of_others(values: NDArray[Any], rank: Whole) -> Seconds:
    """The median over the ranks but `rank`, a row each."""
    others = np.ones(values.shape, bool)
    others[np.arange(len(values)), rank] = False
    result: Seconds = np.median(values[others].reshape(len(values), -1), axis=1)
    return result


def _excess(work: Seconds, rank: Whole) -> Seconds:
    """What `rank` took longer than the others' median, a row each."""
    result: Seconds = work[np.arange(len(work)), rank] - _median_of_others(work, rank)
    return result


def _cost(arrival: Whole, end: Whole, before: Whole, meeting: Whole, rank: Whole) -> Seconds:
    """Replay each meeting with its last rank on time: how much earlier its last collective would have ended, s."""
    row, late = np.arange(len(arrival)), rank[meeting]
    taken = arrival - before[meeting]
    excess = np.maximum(taken[row, late] - _median_of_others(taken, late), 0)
    on_time = arrival.astype(np.float64)
    on_time[row, late] -= excess
    begun, could_begin = arrival.max(axis=1).astype(np.float64), on_time.max(axis=1)
    ended = end.max(axis=1).astype(np.float64)
    first = np.flatnonzero(np.diff(meeting, prepend=-1))
    count = np.diff(first, append=len(meeting))
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


def cost_by_rank(meetings: Meetings) -> dict[int, float]:
    """What each rank's coming late cost in all, s; of ranks that came last to none there is nothing."""
    ranks, row = np.unique(meetings.rank, return_inverse=True)
    return dict(zip(ranks.tolist(), np.bincount(row, weights=meetings.cost).tolist(), strict=True))


def late_ranks(meetings: Meetings, ranks: Whole) -> list[int]:
    """The ranks that are last so often that chance would do it less than once in 1 / CHANCE runs.

    Among meetings that any rank ends with the same probability, independently; Chernoff's bound on the binomial tail.
    """
    use = meetings.beside if meetings.beside.any() else np.ones(len(meetings.beside), bool)
    total, fair = int(use.sum()), 1 / max(len(ranks), 1)
    found = []
    for rank in ranks.tolist():
        times = int((meetings.rank[use] == rank).sum())
        if total and times / total > fair and tail_bound(total, times, fair) * len(ranks) < CHANCE:
            found.append(rank)
    return found


def tail_bound(total: int, times: int, fair: float) -> float:
    """An upper bound on the probability of at least `times` of `total`, each with probability `fair`.

    exp(-n KL(k/n, p)): Chernoff, 1952; Hoeffding, 1963, theorem 1.
    """
    share = times / total
    if share <= fair:
        return 1.0
    divergence = share * math.log(share / fair)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - fair))
    return math.exp(-total * divergence)
