"""Where the time went: seconds of each phase, from the spans of one rank.

Communication counts only where no computing hides it: the all-reduce of a bucket that runs under the rest of the
backward costs nothing. The backward itself ends for this account when the last bucket is handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwise.timeline.spans import Span

Interval = tuple[int, int]


class PhaseClock:
    """Adds up phases over a run; takes spans as they come from `Recorder.flush`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, spans: Sequence[Span]) -> None:
        for kind, seconds in phase_seconds(spans).items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


def phase_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds a phase. Exposed communication is taken out of the backward that contains it, so that phases add up."""
    by_kind: dict[str, list[Interval]] = {}
    for span in spans:
        by_kind.setdefault(span.kind, []).append((span.start, span.end))
    exposed = exposed_communication(spans)
    result = {kind: length(union(intervals)) for kind, intervals in by_kind.items() if kind != "communication"}
    for kind in ("backward", "evaluate"):
        if kind in result:
            result[kind] -= length(intersect(exposed, union(by_kind[kind])))
    if "communication" in by_kind:
        result["communication"] = length(exposed)
    return {kind: nanoseconds / 1e9 for kind, nanoseconds in result.items()}


def exposed_communication(spans: Sequence[Span]) -> list[Interval]:
    """The part of the communication that no backward computing hides.

    Within a backward, computing lasts until its last bucket begins to be reduced.
    """
    communication = sorted((s.start, s.end) for s in spans if s.kind == "communication")
    hidden: list[Interval] = []
    for start, end in ((s.start, s.end) for s in spans if s.kind == "backward"):
        begun = [a for a, _ in communication if start <= a < end]
        hidden.append((start, max(begun) if begun else end))
    return subtract(union(communication), union(hidden))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` lies in no hole; both sorted and disjoint."""
    left: list[Interval] = []
    for start, end in intervals:
        for a, b in holes:
            if b <= start or a >= end:
                continue
            if a > start:
                left.append((start, a))
            start = max(start, b)
            if start >= end:
                break
        if start < end:
            left.append((start, end))
    return left


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What lies in both; both sorted and disjoint."""
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]


def length(intervals: Iterable[Interval]) -> int:
    """The sum of the intervals' lengths, in their unit."""
    return sum(end - start for start, end in intervals)
