"""Align all ranks' clocks with rank 0's.

It uses clock round trips, and the order that collectives impose.

A round trip (sent, theirs, received) shows that rank 0's clock is ahead by `theirs - (sent + received) / 2`, to within
half the round trip's duration; of one burst of round trips, only the shortest counts. A line fitted through the bursts
gives the drift. If the clocks wander more than the samples' errors allow, offsets are interpolated between bursts.

After that, no all-reduce may end on any rank before the last rank has arrived at it. Where one still does, the clocks
must be wrong, and they are shifted by the smallest amounts that correct it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.timeline import Clock

Times = NDArray[np.int64]
CLEAR = 3.0
"""A burst of clock round trips is congested if even its shortest trip takes this many times as long as the shortest
trip of all bursts. `fit_clock` first leaves out such bursts: congestion in one direction looks like clock drift."""
DRIFT = 1e-4
"""Assumed upper bound of the drift between two clocks: 100 µs per second. A bad quartz oscillator drifts that much."""
BURST = 1_000_000_000  # ns: samples closer than this belong to one burst


@dataclass(frozen=True)
class ClockFit:
    """Conversion from the clock of one rank to the clock of rank 0.

    at: times on the rank's clock (ns).
    offset: what to add to the rank's clock at each of the times in `at` (ns). Between two of these times, the offset is
        interpolated linearly.
    """

    clock: Clock
    at: NDArray[np.float64]
    offset: NDArray[np.float64]

    def to_reference(self, times: Times) -> Times:
        """Convert times in ns from the rank's own clock to the clock of rank 0."""
        if len(self.at) == 1:
            return times + round(float(self.offset[0]))
        origin = int(self.at[0])
        # Differences to `origin` are small enough for float64 to keep nanoseconds.
        offset = np.interp((times - origin).astype(np.float64), self.at - origin, self.offset)
        return times + np.rint(offset).astype(np.int64)


def fit_clock(rank: int, samples: Sequence[tuple[int, int, int]]) -> ClockFit:
    """Fit the clock of a rank to the clock of rank 0."""
    if not samples:
        return ClockFit(Clock(rank), np.zeros(1), np.zeros(1))
    at, offset, half = _bursts(np.asarray(samples, dtype=np.int64))
    for use in (half <= CLEAR * half.min(), np.full(len(at), True)):
        slope, level = _line(at[use], offset[use], half[use])
        level -= slope * float(at[use][0] - at[0])
        misfit = np.abs(offset - (level + slope * (at - at[0])))
        if (misfit <= half).all():
            apart = (DRIFT + abs(slope)) * np.abs(at[:, None] - at)
            error = float((half + misfit + apart).min(axis=1).max())
            ends = np.array([at[0] - 3.6e12, at[-1] + 3.6e12])  # an hour beyond either end
            return ClockFit(Clock(rank, level, slope, error, len(samples)), ends, level + slope * (ends - at[0]))
    drift = float((offset[-1] - offset[0]) / (at[-1] - at[0]))
    return ClockFit(Clock(rank, float(offset[0]), drift, float(half.max()), len(samples)), at, offset)


def _bursts(samples: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Select the shortest clock round trip of each burst, which is the most exact one."""
    sent, theirs, received = samples[np.argsort(samples[:, 0], kind="stable")].T
    burst = np.concatenate([[0], np.cumsum(np.diff(sent) > BURST)])
    order = np.lexsort((received - sent, burst))
    best = order[np.unique(burst[order], return_index=True)[1]]
    middle = sent[best] + (received[best] - sent[best]) // 2
    half = (received[best] - sent[best]) / 2
    return middle.astype(np.float64), (theirs[best] - middle).astype(np.float64), half


def _line(at: NDArray[np.float64], offset: NDArray[np.float64], half: NDArray[np.float64]) -> tuple[float, float]:
    """Fit a line to the clock offset over time."""
    if len(at) < 2 or (len(at) == 2 and abs(offset[1] - offset[0]) <= half.sum()):
        return 0.0, float(offset[np.argmin(half)])
    slope, level = np.polyfit(at - at[0], offset - offset[0], 1, w=1 / np.maximum(half, 1.0))
    return float(slope), float(level + offset[0])


def causal_shifts(arrivals: Times, ends: Times) -> NDArray[np.int64] | None:
    """Return how to shift the ranks' clocks so that no collective ends before its last rank has arrived."""
    ranks = arrivals.shape[1]
    if not len(arrivals):
        return np.zeros(ranks, np.int64)
    # lag[i, j]: by how much rank i's clock must be moved on against rank j's.
    lag = np.stack([(arrivals - ends[:, i : i + 1]).max(axis=0) for i in range(ranks)])
    np.fill_diagonal(lag, 0)
    shift = np.zeros(ranks, np.int64)
    for _ in range(ranks + 1):  # Bellman and Ford: longest paths, which end after `ranks` rounds if they end
        moved = np.maximum(shift, (shift[None, :] + lag).max(axis=1))
        if (moved == shift).all():
            result: NDArray[np.int64] = shift - shift[0]
            return result
        shift = moved
    return None


def widened(clock: Clock, shift: int) -> Clock:
    """Add a shift in ns to the offset of a clock."""
    return replace(clock, offset=clock.offset + shift, error=max(clock.error, float(abs(shift))))
