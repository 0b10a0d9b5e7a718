"""Tabulate seconds by step, rank and kind of time.

The seconds are sums of each rank's attributed time (attribution.py).

Tested in tests/timeline/test_attribution.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.arrivals import Arrivals, arrival_table
from meshwise.timeline.attribution import OUTSIDE, Whole, attribution_of, step_starts_of
from meshwise.timeline.run_report import OUTSIDE_STEPS
from meshwise.timeline.spans import KIND, KINDS
from meshwise.timeline.stragglers import SyncPoints, sync_points_of
from meshwise.timeline.timeline import PER_SESSION, Timeline

Seconds = NDArray[np.float64]
HIDDEN = OUTSIDE + 1
"""The last column of `StepTable.seconds`: communication hidden by computing."""
OF_STEP = [code for kind, code in KIND.items() if kind not in OUTSIDE_STEPS]


@dataclass(frozen=True)
class StepTable:
    """The time that the ranks of a run spent in each step, by kind of time. Each array except `ranks` has one row per
    step, in the order in which the steps were done.

    step: the number of each step, of shape (steps,). Step 0 is the time before step 1.
    session: the index of the session in which each step was done, of shape (steps,).
    start: when each step began, in ns, of shape (steps,).
    seconds: the time by step, rank and kind, of shape (steps, ranks, kinds + 2). Column OUTSIDE has the time between
        two sessions, and column HIDDEN the communication that overlaps with computing.
    present: whether each rank did each step, of shape (steps, ranks).
    lost: whether the work of each step was lost, of shape (steps,). It was lost if a later session began again at this
        step or at an earlier step.
    """

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
        """Mask of the steps that count. Step 0 is left out, and steps whose work was lost in a restart."""
        return (self.step > 0) & ~self.lost

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Mask of the steps that count and have a backward pass. An evaluation after the last step is a row of this
        table too, but has no backward pass."""
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
        """Return how many seconds each step spent on each kind of time, as an array of shape (steps, kinds). A value is
        the mean over the ranks that did the step."""
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
    """Return a mask of the steps whose work was lost, because a later session began again at the same or at an earlier
    step."""
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
