"""Find when each rank arrived at and left each collective.

These times show which ranks are stragglers. The durations of phases cannot show this, since an all-reduce makes the
backward pass of every rank as long as the slowest rank's.

Tested in tests/timeline/test_attribution.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.pipeline_stages import waits_for_stages
from meshwise.timeline.spans import KIND, LANE, NO_COLLECTIVE, operation_and_source
from meshwise.timeline.timeline import Spans

Table = NDArray[np.int64]
TOGETHER = ("all-reduce", "all-gather", "barrier")
"""Collectives that no rank can leave before all ranks have arrived. (The source of a broadcast can leave early.)"""
ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Arrivals:
    """When each rank arrived at and left each collective of a run, in the order of the collectives' numbers.

    A time is ABSENT if the rank has no record of the collective. All times are in ns.

    number, step, bytes, name: shape (collectives,). A collective has the same number on every rank.
    arrival, end: shape (collectives, ranks).
    overlapped: whether the collective overlaps with computing. Ranks then go on computing and wait for it only later.
    complete: whether every rank has a record of the collective.
    together: whether the collective is complete, and is of a kind that no rank can leave before all have arrived.
    last_rank: the column of the rank for which the other ranks wait. This is the source of a broadcast. For any other
        collective, it is the rank that arrived last.
    last: when the rank in `last_rank` arrived, so that communication could begin. ABSENT if any rank has no record.
    until: when each rank stops waiting for the last rank, shape (collectives, ranks). This is `last`, minus the time by
        which a slow link kept the last rank longer in the collective before. ABSENT where `last` is ABSENT.
    of_stages: until when a receive of a pipeline waits for another stage. The key is (rank, start of the receive).
    """

    ranks: Table
    number: Table
    step: Table
    bytes: Table
    name: Table
    arrival: Table
    end: Table
    overlapped: NDArray[np.bool_]
    together: NDArray[np.bool_]
    last_rank: Table
    complete: NDArray[np.bool_]
    last: Table
    until: Table
    of_stages: Mapping[tuple[int, int], int]

    def until_of(self, ranks: Table, numbers: Table) -> Table:
        """Look up until when ranks wait in collectives, in the table `until`."""
        if not len(self.number):
            return np.full(len(numbers), ABSENT)
        at = np.minimum(np.searchsorted(self.number, numbers), len(self.number) - 1)
        column = np.minimum(np.searchsorted(self.ranks, ranks), len(self.ranks) - 1)
        known = (self.number[at] == numbers) & (self.ranks[column] == ranks)
        return np.where(known, self.until[at, column], ABSENT)

    def waits_until(self, spans: Spans) -> Table:
        """Return the time until which each span waits for another rank."""
        until = np.where(is_collective(spans), self.until_of(spans["rank"], spans["collective"]), ABSENT)
        if self.of_stages:
            places = zip(spans["rank"].tolist(), spans["start"].tolist(), strict=True)
            received = np.array([self.of_stages.get(place, ABSENT) for place in places], np.int64)
            until = np.where(is_collective(spans) | (spans["kind"] != KIND["communication"]), until, received)
        result: Table = np.where(until == ABSENT, spans["start"], np.clip(until, spans["start"], spans["end"]))
        return result


def is_collective(spans: Spans) -> NDArray[np.bool_]:
    """Return a mask of the spans that are collectives of all ranks. Other communication, such as a message between two
    ranks, has NO_COLLECTIVE instead of a collective's number."""
    found: NDArray[np.bool_] = (spans["kind"] == KIND["communication"]) & (spans["collective"] != NO_COLLECTIVE)
    return found


def arrival_table(spans: Spans, names: Sequence[str]) -> Arrivals:
    """Build the `Arrivals` of a run: when each rank arrived at and left each collective."""
    found = spans[is_collective(spans)]
    number, first, row = np.unique(found["collective"], return_index=True, return_inverse=True)
    ranks, column = np.unique(found["rank"], return_inverse=True)
    arrival = np.full((len(number), len(ranks)), ABSENT)
    end = arrival.copy()
    arrival[row, column], end[row, column] = found["start"], found["end"]
    facts = found[first]
    text = np.array([operation_and_source(name)[0] for name in names])[facts["name"]]
    complete = (arrival != ABSENT).all(axis=1)
    last_rank = arrival.argmax(axis=1) if len(ranks) else np.empty(0, np.int64)
    if len(ranks) and ranks[0] == 0:
        last_rank = np.where(text == "broadcast", 0, last_rank)
    last = np.take_along_axis(arrival, last_rank[:, None], axis=1)[:, 0] if len(ranks) else np.empty(0, np.int64)
    return Arrivals(
        ranks.astype(np.int64),
        number,
        facts["step"],
        facts["bytes"],
        facts["name"],
        arrival,
        end,
        overlapped=facts["lane"] == LANE["communication"],
        together=complete & np.isin(text, TOGETHER),
        last_rank=last_rank,
        complete=complete,
        last=np.where(complete, last, ABSENT),
        until=np.where(complete[:, None], last[:, None] - _left_later(arrival, end, last_rank), ABSENT),
        of_stages=waits_for_stages(spans, names),
    )


def _left_later(arrival: Table, end: Table, last_rank: Table) -> Table:
    """Return how long after each rank the last rank left the previous collective, in ns, shape (collectives, ranks)."""
    if not arrival.size:
        return np.zeros(arrival.shape, np.int64)
    row = np.arange(len(arrival))
    left = np.maximum.accumulate(end, axis=0)
    had_left = np.stack(
        [np.searchsorted(left[:, r], arrival[:, r], side="right") for r in range(left.shape[1])], axis=1
    )
    before = np.minimum(had_left[row, last_rank], row) - 1
    known = (before >= 0)[:, None] & (left[before] != ABSENT).all(axis=1, keepdims=True)
    later = left[before, last_rank][:, None] - left[before]
    return np.where(known, np.maximum(later, 0), 0)
