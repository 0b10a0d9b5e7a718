"""When each rank came to each collective, and when it left: the one place where a late rank shows.

The walls of phases cannot show it, since the all-reduce makes every rank's backward as long as the slowest one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.spans import KIND, LANE, NO_COLLECTIVE
from meshwise.timeline.timeline import Spans

Table = NDArray[np.int64]
TOGETHER = ("all-reduce", "all-gather", "barrier")
"""Collectives that no rank can leave before all have come. A broadcast's source can."""
ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Arrivals:
    """Collectives, in the order of their numbers; ABSENT where a rank has no record of one.

    number, step, bytes, name: shape (collectives,). arrival, end: ns, shape (collectives, ranks).
    beside: runs beside the computing, so that ranks do not wait for it at once.
    together: every rank took part, and none could leave before the last came.
    last: when the ranks could begin to communicate: the last arrival, the source's for a broadcast; ABSENT where a rank
    is missing.
    """

    ranks: Table
    number: Table
    step: Table
    bytes: Table
    name: Table
    arrival: Table
    end: Table
    beside: NDArray[np.bool_]
    together: NDArray[np.bool_]
    last: Table

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Which collectives every rank has a record of."""
        known: NDArray[np.bool_] = self.last != ABSENT
        return known

    def last_of(self, numbers: Table) -> Table:
        """`last` of the collectives with these numbers; ABSENT for others."""
        if not len(self.number):
            return np.full(len(numbers), ABSENT)
        at = np.minimum(np.searchsorted(self.number, numbers), len(self.number) - 1)
        return np.where(self.number[at] == numbers, self.last[at], ABSENT)


def arrival_table(spans: Spans, names: Sequence[str]) -> Arrivals:
    """The collectives of a timeline's spans."""
    found = spans[(spans["kind"] == KIND["communication"]) & (spans["collective"] != NO_COLLECTIVE)]
    number, row = np.unique(found["collective"], return_inverse=True)
    ranks, column = np.unique(found["rank"], return_inverse=True)
    arrival = np.full((len(number), len(ranks)), ABSENT)
    end = arrival.copy()
    arrival[row, column], end[row, column] = found["start"], found["end"]
    facts = {key: np.zeros(len(number), np.int64) for key in ("step", "bytes", "name", "lane")}
    for key, values in facts.items():
        values[row] = found[key]
    text = np.array(names)[facts["name"]] if len(number) else np.empty(0, str)
    complete = (arrival != ABSENT).all(axis=1)
    last = arrival.max(axis=1, initial=ABSENT)
    if len(ranks) and ranks[0] == 0:
        last = np.where(text == "broadcast", arrival[:, 0], last)
    return Arrivals(
        ranks.astype(np.int64),
        number,
        facts["step"],
        facts["bytes"],
        facts["name"],
        arrival,
        end,
        beside=facts["lane"] == LANE["communication"],
        together=complete & np.isin(text, TOGETHER),
        last=np.where(complete, last, ABSENT),
    )
