"""The report of a timeline, as plain data: every number that any view shows.

Text, page, trace, Mermaid, JSON and OpenMetrics are drawn from this and from the timeline alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORY = ("allocated", "resident")
"""The counters of what a rank itself uses; the first that there is stands for its memory."""
NOT_MEMORY = ("samples", "loss")
"""All other counters are bytes."""


@dataclass(frozen=True)
class Finding:
    """One thing that a reader should know. kind: straggler, input, communication, imbalance, compute, checkpoint,
    evaluation, memory. share: of the time of a step (of the run for checkpoint and evaluation), 0 to 1. seconds: a step
    (or in all). rank, phase: where it is about one."""

    kind: str
    sentence: str
    advice: str
    share: float
    seconds: float
    rank: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class RankReport:
    """One device. seconds: by kind, over all training steps, evaluation and saving included; they add up.

    hidden_seconds: communication under computing, beside the others. step_seconds: median time of a step.
    last_arrivals: at how many of the `sync_points` it was last; straggler_seconds: what that cost in all.
    memory: the peak in bytes by the counter's name; memory_by_phase: the same at the ends of phases.
    """

    rank: int
    device: str
    host: str
    steps: int
    seconds: Mapping[str, float]
    hidden_seconds: float
    step_seconds: float
    last_arrivals: int
    sync_points: int
    straggler_seconds: float
    memory: Mapping[str, float]
    memory_by_phase: Mapping[str, Mapping[str, float]]
    spans: int
    complete: bool
    dropped: int
    overhead_seconds: float


@dataclass(frozen=True)
class ClockReport:
    """How a rank's clock was laid on rank 0's. error_seconds: ±."""

    rank: int
    offset_seconds: float
    drift: float
    error_seconds: float
    samples: int


@dataclass(frozen=True)
class GoodputPart:
    """A part of the run's wall time, averaged over its devices."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of one name and size. seconds: median from the last arrival to the last end. bus_bandwidth: bytes a
    second by nccl-tests' definition, None where it has none."""

    name: str
    bytes: int
    count: int
    seconds: float
    bus_bandwidth: float | None


@dataclass(frozen=True)
class Series:
    """The run over its steps, in at most a few hundred points: each the mean over the steps up to the next point.

    step, time: where a point begins (time in seconds since the run began). seconds: of a step, mean over ranks. kinds:
    the same by kind. loss: at the last step of the point; NaN unknown.
    """

    step: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kinds: Mapping[str, list[float]] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CounterSeries:
    """A counter of one rank over time: seconds since the run began, values."""

    rank: int
    name: str
    time: list[float]
    value: list[float]


@dataclass(frozen=True)
class Bar:
    """A span of the log, or a waiting that was found in one (kind `waiting`, `found`). start: s since the view's."""

    rank: int
    lane: str
    kind: str
    name: str
    step: int
    start: float
    seconds: float
    bytes: int
    collective: int
    found: bool = False


@dataclass(frozen=True)
class StepWindow:
    """A few steps, span by span. name: all, typical, slowest, first, last or chosen. start: s since the run began.

    bars: the spans of the log, and the waiting found in collectives. blocked: when a rank could do nothing else than
    wait or communicate, on its main lane.
    """

    name: str
    first_step: int
    last_step: int
    start: float
    seconds: float
    bars: list[Bar]
    blocked: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """All that is said of a run. verdict: the one sentence. error_seconds: the ± of all times across ranks."""

    title: str
    status: str
    source: str
    folder: str
    facts: Mapping[str, Any]
    verdict: str
    findings: list[Finding]
    missing: list[str]
    steps: int
    step_seconds: float
    step_seconds_p95: float
    samples_per_second: float | None
    wall_seconds: float
    goodput: list[GoodputPart]
    waiting: list[GoodputPart]
    """The goodput's waiting in its own parts."""
    kinds: Mapping[str, float]
    """Seconds by kind, mean over ranks."""
    ranks: list[RankReport]
    clocks: list[ClockReport]
    error_seconds: float
    collectives: list[CollectiveReport]
    series: Series
    counters: list[CounterSeries]
    views: list[StepWindow]


def report_dict(report: Report) -> dict[str, Any]:
    """The report as JSON knows it: numbers that are not finite are null."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(report))
    return {"meshwise_report": 1, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
