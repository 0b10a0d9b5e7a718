"""Define the timeline: what every device did, or will do, when.

Measured and predicted runs have the same type.

Tested in tests/timeline/test_stragglers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.spans import SPAN

Spans = NDArray[np.void]
"""An array of spans, with dtype SPAN."""
NO_PHASE = -1
PER_SESSION = 1 << 40
"""Added to numbers of steps and collectives once per earlier session, so that two sessions never share a number."""


@dataclass(frozen=True)
class Counter:
    """The values of one counter of one rank. The arrays have the same length.

    time: in ns on the timeline's clock, ascending.
    step: the step of each value.
    phase: the kind of the phase that ended at this time, as an index in KINDS, or -1 for none.
    """

    rank: int
    name: str
    time: NDArray[np.int64]
    step: NDArray[np.int64]
    phase: NDArray[np.int64]
    value: NDArray[np.float64]

    def where(self, kept: NDArray[np.bool_]) -> Counter:
        """Return a copy of the counter with only the values selected by the mask."""
        return Counter(self.rank, self.name, self.time[kept], self.step[kept], self.phase[kept], self.value[kept])


@dataclass(frozen=True)
class Clock:
    """How the clock of a rank differs from the clock of rank 0.

    offset: the difference in ns when the clocks were first compared.
    drift: by how many ns the difference grows per ns.
    error: the offset may be wrong by up to ± this many ns.
    """

    rank: int
    offset: float = 0.0
    drift: float = 0.0
    error: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class RunSession:
    """One period in which the workers of a run were alive. A resumed run has several sessions.

    began, ended: in ns on the timeline's clock.
    status: finished, stopped, failed or running.
    """

    began: int
    ended: int
    status: str


@dataclass(frozen=True)
class Rank:
    """One rank of a run.

    last: the time of the rank's last record (ns).
    complete: whether the rank recorded its end. If not, it was cut off.
    """

    rank: int
    device: str
    host: str
    last: int
    complete: bool
    dropped: int = 0
    overhead_seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The spans and counters of all ranks of a run, on one clock. The clock is 0 when the run first starts.

    spans: sorted by rank, then by start.
    names: the texts that the column `name` of the spans refers to.
    missing: sentences that tell the user which data of the run is missing.
    facts: the contents of run.json of a measured run (job, plan, devices, versions), or the facts of a prediction.
    dtypes: the dtype of the data that a collective sent, if recorded. The key is the collective's name and number of
        bytes.
    """

    spans: Spans = field(default_factory=lambda: np.empty(0, SPAN))
    names: tuple[str, ...] = ("",)
    counters: tuple[Counter, ...] = ()
    ranks: tuple[Rank, ...] = ()
    clocks: tuple[Clock, ...] = ()
    sessions: tuple[RunSession, ...] = ()
    missing: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    source: str = "measured"
    dtypes: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Spans:
        """Return the spans of one rank, sorted by start, as a view of the array."""
        return of_rank(self.spans, rank)

    def counter(self, name: str) -> Counter | None:
        """Return the counter of this name on the lowest rank that has it, or None if no rank has it."""
        return next((counter for counter in self.counters if counter.name == name), None)

    @property
    def began(self) -> float | None:
        """When the run began, in seconds since 1970. It is None if unknown, as in a prediction."""
        sessions = self.facts.get("sessions") or [{}]
        began = sessions[0].get("began")
        return float(began) if isinstance(began, int | float) else None

    def newest_session(self) -> Timeline:
        """Return the part of the timeline that was recorded since the newest session began."""
        if len(self.sessions) < 2:
            return self
        newest = self.sessions[-1]
        later = [(counter, counter.time >= newest.began) for counter in self.counters]
        counters = tuple(counter.where(kept) for counter, kept in later if kept.any())
        spans = self.spans[self.spans["start"] >= newest.began]
        ranks = tuple(rank for rank in self.ranks if rank.last >= newest.began)  # it may have fewer than before
        return replace(self, spans=spans, counters=counters, sessions=(newest,), ranks=ranks or self.ranks)

    def of_steps(self, first: int, last: int) -> Spans:
        """Return the spans of the steps from `first` to `last`, both included."""
        step = self.spans["step"]
        return self.spans[(step >= first) & (step <= last)]


def of_rank(spans: Spans, rank: int) -> Spans:
    """Return the spans of one rank, as a view of the array. The spans must be sorted by rank."""
    low, high = np.searchsorted(spans["rank"], [rank, rank + 1])
    return spans[low:high]
