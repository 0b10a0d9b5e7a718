"""Define the report of a run as plain data.

The report has every number that any view shows, and the display text of each.

Text, page, trace, Mermaid, JSON, OpenMetrics and TensorBoard are drawn from report and timeline alone. A field's type
names its unit, which says how the number is written: `report_dict` has both the numbers and their texts.

Tested in tests/timeline/views/test_html_page.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshwise.spec.json_values import json_value
from meshwise.spec.units import bytes_text, count_text, percent_text, rate_text, seconds_text
from meshwise.timeline.attempt_report import AttemptReport

MEMORY = ("allocated", "resident")
"""Counters of the memory that a rank itself uses; the first one that is present stands for the rank's memory."""
NOT_MEMORY = ("samples", "loss")
"""Counters whose values are not in bytes; those of all other counters are."""
COMPUTING = ("forward", "backward", "optimizer")
OUTSIDE_STEPS = ("evaluate", "checkpoint")
"""Kinds of time that are not part of a step."""

Seconds = Annotated[float, seconds_text]
Bytes = Annotated[float, bytes_text]
Count = Annotated[int, count_text]
Share = Annotated[float, percent_text]
Rate = Annotated[float, rate_text]
Bandwidth = Annotated[float, lambda rate: f"{bytes_text(rate)}/s"]
Drift = Annotated[float, lambda drift: f"{drift * 1e6:.2f} ppm"]


@dataclass(frozen=True)
class Finding:
    """One thing that a reader should know. kind: straggler, late, input, communication, imbalance, bubble, idle,
    stalls, compute, checkpoint, evaluation, memory, slower. headline: at most ten words. share: of a step's time (of
    the run's for checkpoint and evaluation). seconds: per step (or in all). rank, phase: if the finding names one."""

    kind: str
    headline: str
    sentence: str
    advice: str
    share: Share
    seconds: Seconds
    rank: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class RankReport:
    """One rank and its device. seconds: by kind, of all training steps with evaluation and saving; the kinds add up.

    step_shares: shares of the time in steps, by kind, without evaluation and saving; empty if there was no time.
    hidden_seconds: communication that overlaps with computing, not counted in `seconds`. step_seconds: median time of a
    step. last_steps: in how many steps this rank was last; last_arrivals: at how many of all `sync_points`;
    straggler_seconds: what these delays cost in all.
    peak_memory: of the device, or of the process if only that is known. memory: peak bytes by counter name;
    memory_by_phase: the same at the ends of each kind of phase.
    """

    rank: int
    device: str
    host: str
    steps: Count
    seconds: Mapping[str, Seconds]
    step_shares: Mapping[str, Share]
    hidden_seconds: Seconds
    step_seconds: Seconds
    last_steps: Count
    last_arrivals: Count
    sync_points: Count
    straggler_seconds: Seconds
    peak_memory: Bytes | None
    memory: Mapping[str, Bytes]
    memory_by_phase: Mapping[str, Mapping[str, Bytes]]
    spans: Count
    complete: bool
    dropped: Count
    overhead_seconds: Seconds


@dataclass(frozen=True)
class ClockReport:
    """A rank's clock compared with rank 0's. error_seconds: the offset is known to within ± this."""

    rank: int
    offset_seconds: Seconds
    drift: Drift
    error_seconds: Seconds
    samples: Count


@dataclass(frozen=True)
class GoodputPart:
    """A part of a run's wall time, averaged over the run's devices."""

    name: str
    seconds: Seconds
    share: Share


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of one name and size. of: what they send, such as `gradients`; "" if the log does not say.

    seconds: median from the last arrival to the last end: pure communication. skew_seconds: median from the first to
    the last arrival: how long the first rank waits. share: of the time of all collectives. bus_bandwidth: bytes per
    second as nccl-tests define it; None if they do not. dtype: of the moved data; "" if unknown.
    """

    name: str
    of: str
    bytes: Bytes
    count: Count
    seconds: Seconds
    skew_seconds: Seconds
    share: Share
    bus_bandwidth: Bandwidth | None
    dtype: str = ""


@dataclass(frozen=True)
class StageReport:
    """A stage of a pipeline. ranks: those that compute it. forward_seconds, backward_seconds: median time of one
    microbatch, without waiting for another stage."""

    stage: int
    ranks: list[int]
    forward_seconds: Seconds
    backward_seconds: Seconds


@dataclass(frozen=True)
class PipelineReport:
    """The pipeline of a run. microbatches: per step. bubble: the share of the time from a step's first forward to its
    last backward in which a rank computes neither, mean over ranks, median over steps. bubble_of_schedule: the bubble
    if all stages took equally long; bubble_of_stages: with the stages' real times; in both, sending takes no time.
    """

    stages: list[StageReport]
    microbatches: Count
    bubble: Share
    bubble_of_schedule: Share
    bubble_of_stages: Share


@dataclass(frozen=True)
class Series:
    """The run over its steps, in at most a few hundred points, each of which is the mean over the steps to the next.

    step, time: where a point begins (time in seconds since the run began). seconds: time of a step, mean over ranks.
    kinds: the same by kind. loss: of the point's last step with a known loss; NaN if there is none.
    """

    step: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kinds: Mapping[str, list[float]] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CounterSeries:
    """A counter of one rank over time: seconds since the run began, and values."""

    rank: int
    name: str
    time: list[float]
    value: list[float]


@dataclass(frozen=True)
class Bar:
    """An interval of one rank's time. start: seconds since the window began. text: duration, start, and bytes moved.

    found: the bar is no span of the log, but computed: waiting for another rank, or an attributed interval.
    """

    rank: int
    lane: str
    kind: str
    name: str
    step: int
    start: float
    seconds: float
    bytes: int = 0
    collective: int = -1
    found: bool = False
    text: str = ""


@dataclass(frozen=True)
class StepTimes:
    """One step of a window, from its first start to its last end on any rank. start: seconds since the window began."""

    step: int
    start: float
    seconds: float


@dataclass(frozen=True)
class StepWindow:
    """A few steps, span by span. name: all, typical, slowest, first, last or chosen. start: time in the run (s).

    bars: the spans of the log; a collective that waits for a rank has two bars: the waiting, then the communication.
    attributed: each rank's time, each moment as one kind (see `attribution`), without idle.
    usual_step: the step to show first, whose time is nearest to the usual one.
    """

    name: str
    first_step: Count
    last_step: Count
    start: float
    seconds: float
    bars: list[Bar]
    attributed: list[Bar] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    usual_step: int = 0

    def step(self, number: int) -> StepTimes | None:
        """Return the times of one step; None if the step is not in the window."""
        return next((times for times in self.steps if times.step == number), None)


@dataclass(frozen=True)
class TimeBeside:
    """One kind of time in a step: predicted, and measured (mean over ranks, then median over steps)."""

    name: str
    predicted: Seconds
    measured: Seconds


@dataclass(frozen=True)
class MemoryBeside:
    """Bytes on the rank that needs most, predicted and measured; `measured` is None if nothing measures them."""

    name: str
    predicted: Bytes
    measured: Bytes | None


@dataclass(frozen=True)
class Reconciled:
    """The prediction for the run's plan beside the measurement. machine: predicted for; origin: of the prices used.

    seconds, low, high: predicted per step, 80 % interval; None if only memory was predicted. measured: median step.
    """

    machine: str
    origin: str
    sentence: str
    seconds: Seconds | None
    low: Seconds | None
    high: Seconds | None
    measured: Seconds
    kinds: list[TimeBeside]
    memory: list[MemoryBeside]


@dataclass(frozen=True)
class Report:
    """All that is known of a run. about: what was run: plan, command, commit, last metric and so on, as far as known.

    headline: the verdict in at most ten words. verdict: the verdict as a sentence. error_seconds: times of different
    ranks are comparable to within ± this.

    kinds: seconds by kind, mean over ranks. waiting: what the waiting in `goodput` consists of.
    """

    title: str
    status: str
    source: str
    folder: str
    facts: Mapping[str, Any]
    about: Mapping[str, str]
    headline: str
    verdict: str
    findings: list[Finding]
    missing: list[str]
    steps: Count
    step_seconds: Seconds
    step_seconds_p95: Seconds
    samples_per_second: Rate | None
    wall_seconds: Seconds
    goodput: list[GoodputPart]
    waiting: list[GoodputPart]
    kinds: Mapping[str, Seconds]
    ranks: list[RankReport]
    clocks: list[ClockReport]
    error_seconds: Seconds
    collectives: list[CollectiveReport]
    series: Series
    counters: list[CounterSeries]
    views: list[StepWindow]
    pipeline: PipelineReport | None = None
    predicted: Reconciled | None = None
    attempts: list[AttemptReport] = field(default_factory=list)

    @property
    def chosen_steps(self) -> tuple[int, int] | None:
        """The first and the last chosen step; None if no steps were chosen."""
        return next(((view.first_step, view.last_step) for view in self.views if view.name == "chosen"), None)


def report_dict(report: Report) -> dict[str, Any]:
    """Return the report as a dict for JSON, non-finite numbers as None. Key `text`: each number's text, by path."""
    return {"meshwise_report": 1, **json_value(report), "text": dict(texts_of(report))}


def texts_of(value: Any, hint: Any = None, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield, for each number that has a unit, its path, such as `ranks/0/seconds/forward`, and its text."""
    write = _unit(hint)
    if write is not None:
        yield path, "unknown" if value is None else write(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, of_field in _hints(type(value)).items():
            yield from texts_of(getattr(value, name), of_field, f"{path}/{name}".lstrip("/"))
    elif isinstance(value, Mapping | list) and get_args(hint):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from texts_of(item, get_args(hint)[-1], f"{path}/{key}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unit(hint: Any) -> Callable[[Any], str] | None:
    """Return the function that writes numbers of a type such as `Seconds` or `Seconds | None`; None for other types."""
    if get_origin(hint) is Annotated:
        write: Callable[[Any], str] = get_args(hint)[1]
        return write
    arms = [arm for arm in get_args(hint) if arm is not type(None)]
    return _unit(arms[0]) if len(arms) == 1 and type(None) in get_args(hint) else None
