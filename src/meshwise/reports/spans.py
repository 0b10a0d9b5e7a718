"""Define the timeline: what each device did or will do, and when.

Measured and predicted runs have the same type. A packed span takes about two bytes. The rows become columns of small
differences, which are deflated. Times are kept to the microsecond: start and end are rounded down, so spans that were
nested stay nested.
"""

from __future__ import annotations

import base64
import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = (
    "data",
    "transfer",
    "forward",
    "backward",
    "communication",
    "waiting",
    "optimizer",
    "evaluate",
    "checkpoint",
    "idle",
)
LANES = ("main", "blocks", "host", "communication")
"""The rows in which the spans of a rank are drawn, from top to bottom: phases and blocking collectives, the model's
blocks, work of the host while an accelerator computes, and collectives that run while the rank computes."""

KIND = {kind: code for code, kind in enumerate(KINDS)}
LANE = {lane: code for code, lane in enumerate(LANES)}
NO_COLLECTIVE = -1
WIDTH = 6
"""Number of integers that a recorder keeps per span: code, start, end, step, bytes, collective."""
VERSION = 2
"""Version of the format of a log. It covers the packing of spans and all other lines."""
QUANTUM = 1000  # resolution of stored times in ns
LEVEL = 1  # deflate's compression level: higher levels save 5 % and take twice as long
Rows = NDArray[np.int64]
"""An array of shape (spans, WIDTH) with the columns code, start, end, step, bytes, collective."""
Column = NDArray[np.int64]
_STAGE = re.compile(r"stage (\d+), microbatch (\d+)")


@functools.cache
def collective_name(operation: str, of: str) -> str:
    """Build the name of a collective's span, such as `all-reduce of gradients`."""
    return f"{operation} of {of}" if of else operation


def operation_and_source(name: str) -> tuple[str, str]:
    """Split the name of a collective's span into the operation and the data that it sends, such as `all-reduce` and
    `gradients`. The second part is "" if the name does not contain ` of `."""
    operation, _, of = name.partition(" of ")
    return operation, of


def stage_name(stage: int, microbatch: int) -> str:
    """Build the name of the span of a forward or backward pass in a pipeline stage."""
    return f"stage {stage}, microbatch {microbatch}"


def stage_and_microbatch(name: str) -> tuple[int, int] | None:
    """Read the stage and the microbatch from a span's name. Returns None for a span that belongs to no stage."""
    found = _STAGE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("name", "<i4"),
        ("step", "<i4"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("bytes", "<i8"),
        ("collective", "<i8"),
    ]
)
"""The fields of a span. `kind`, `lane` and `name` are indices: in KINDS, in LANES, and in `Timeline.names`. `start` and
`end` are in ns. `step` counts from 1, and is 0 before step 1. `bytes` is the size of the data that was sent or saved,
or 0. `collective` is the number of the collective, which is equal on all ranks, or -1."""


def as_rows(flat: Sequence[int]) -> Rows:
    """Convert the recorder's flat list of numbers to an array with one row per span."""
    return np.fromiter(flat, dtype=np.int64, count=len(flat)).reshape(-1, WIDTH)


def pack(rows: Rows) -> str:
    """Compress spans to text."""
    code, start, end, step, size, collective = rows.T
    start, end = start // QUANTUM, end // QUANTUM
    # A span begins about where the previous one ended, and steps hardly change: store small differences.
    gap = start - np.concatenate([[0], end[:-1]])
    columns = [code, gap, end - start, np.diff(step, prepend=0), size, np.diff(collective, prepend=0)]
    parts = [_column(column) for column in columns]
    head = bytes([width for width, _ in parts])
    return base64.b64encode(zlib.compress(head + b"".join(text for _, text in parts), LEVEL)).decode()


def unpack(text: str, count: int) -> tuple[Column, ...]:
    """Restore the columns of `count` spans: code, start, end, step, bytes, collective."""
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    widths = packed[:WIDTH]
    if len(packed) != WIDTH + sum(widths) * count or not set(widths) <= {1, 2, 4, 8}:
        raise ValueError(f"damaged: {len(packed)} bytes instead of {WIDTH + sum(widths) * count}")
    columns, at = [], WIDTH
    for width in widths:
        planes = np.frombuffer(packed, np.uint8, width * count, at).reshape(width, count)
        columns.append(np.ascontiguousarray(planes.T).view(f"<i{width}").reshape(count).astype(np.int64))
        at += width * count
    code, gap, long, step, size, collective = columns
    # Undo `pack`, where gap[i] = start[i] - end[i-1] and long[i] = end[i] - start[i].
    end = np.cumsum(gap + long)
    return code, (end - long) * QUANTUM, end * QUANTUM, np.cumsum(step), size, np.cumsum(collective)


def _column(values: NDArray[np.int64]) -> tuple[int, bytes]:
    """Return the width of the integers of a column in bytes, and the column's bytes."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    narrow = np.ascontiguousarray(values.astype(f"<i{width}"))
    return width, narrow.view(np.uint8).reshape(len(values), width).T.tobytes()


Spans = NDArray[np.void]
"""An array of spans, with dtype SPAN."""
NO_PHASE = -1
PER_SESSION = 1 << 40
"""Added to numbers of steps and collectives once per earlier session, so that two sessions never share a number."""


@dataclass(frozen=True)
class Counter:
    """The values of one counter of one rank. The arrays have the same length."""

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
    """How the clock of a rank differs from the clock of rank 0."""

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
        ranks = tuple(rank for rank in self.ranks if rank.last >= newest.began)  # a restarted run may have fewer ranks
        return replace(self, spans=spans, counters=counters, sessions=(newest,), ranks=ranks or self.ranks)

    def of_steps(self, first: int, last: int) -> Spans:
        """Return the spans of the steps from `first` to `last`, both included."""
        step = self.spans["step"]
        return self.spans[(step >= first) & (step <= last)]


def of_rank(spans: Spans, rank: int) -> Spans:
    """Return the spans of one rank, as a view of the array. The spans must be sorted by rank."""
    low, high = np.searchsorted(spans["rank"], [rank, rank + 1])
    return spans[low:high]
