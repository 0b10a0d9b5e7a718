"""Define the report of a run as plain data.

The report has every number that any view shows, and the display text of each.

All views (text, page, trace, Mermaid, JSON) are drawn from the report and the timeline alone. A field's type names its
unit, which says how the number is written: `html_page.report_dict` has both the numbers and their texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from meshwise.spec.units import bytes_text, count_text, percent_text, rate_text, seconds_text

MEMORY = ("allocated", "resident")
"""Counters of the memory that a rank itself uses. If a rank has both counters, the first of them is reported."""
NOT_MEMORY = ("samples", "loss")
"""Counters whose values are not in bytes. The values of all other counters are in bytes."""
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
    """One thing that a reader of the report should know, such as a slow rank. `headline` has at most ten words. `share`
    is a share of a step's time, and `seconds` are per step. For the kinds checkpoint and evaluation, the two numbers
    are for the whole run. Other kinds are straggler, late, input, communication, imbalance, bubble, idle, stalls,
    compute, memory and slower."""

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
    """The times and the memory of one rank."""

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
    """A rank's clock compared with the clock of rank 0. The error of `offset_seconds` is at most ± `error_seconds`."""

    rank: int
    offset_seconds: Seconds
    drift: Drift
    error_seconds: Seconds
    samples: Count


@dataclass(frozen=True)
class GoodputPart:
    """A part of a run's wall time, such as saving, as the mean over the run's devices."""

    name: str
    seconds: Seconds
    share: Share


@dataclass(frozen=True)
class CollectiveReport:
    """The collectives of one name and size. `of` is what they send, such as `gradients`. If unknown, `of` and `dtype`
    are ""."""

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
    """A stage of a pipeline. `ranks` are the ranks that compute it. `forward_seconds` and `backward_seconds` are the
    median times of one microbatch, without waiting for another stage."""

    stage: int
    ranks: list[int]
    forward_seconds: Seconds
    backward_seconds: Seconds


@dataclass(frozen=True)
class PipelineReport:
    """The pipeline of a run. A bubble is the share of time in which a rank runs neither a forward nor a backward pass,
    between the first forward pass and the last backward pass of a step. `bubble` is measured: the mean over ranks and
    the median over steps. The other bubbles are simulated without time for sending. `bubble_of_schedule` has stages of
    equal length, and `bubble_of_stages` has stages of the measured lengths."""

    stages: list[StageReport]
    microbatches: Count
    bubble: Share
    bubble_of_schedule: Share
    bubble_of_stages: Share


@dataclass(frozen=True)
class AttemptReport:
    """One attempt of a run. Each start of the run's workers is an attempt."""

    number: Count
    began: str
    launched: str
    devices: Count
    before: Seconds
    queued: bool
    seconds: Seconds
    from_step: Count | None
    steps_lost: Count | None
    status: str
    ended: str


@dataclass(frozen=True)
class Series:
    """How the loss and the time of a step developed during a run, as at most a few hundred points. Each point stands
    for several steps in a row. `step` and `time` say where the point begins, with `time` in seconds since the run
    began. `seconds` is the time of a step as the mean over these steps and over ranks. `kinds` divides this time into
    forward, backward and so on. `loss` is the last known loss of these steps, or NaN."""

    step: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kinds: Mapping[str, list[float]] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CounterSeries:
    """The values of one counter of one rank. `time` is in seconds since the run began."""

    rank: int
    name: str
    time: list[float]
    value: list[float]


@dataclass(frozen=True)
class Bar:
    """An interval of one rank's time, drawn as a bar. `start` is in seconds since the `StepWindow` began. `text`
    gives the duration, the start, and the number of bytes sent. `found` is True if the interval was computed, such as
    the wait for another rank. It is False if the interval is a recorded span."""

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
    """The time of one step, from the first rank's start to the last rank's end. `start` is in seconds since the
    `StepWindow` began."""

    step: int
    start: float
    seconds: float


@dataclass(frozen=True)
class StepWindow:
    """A few steps of a run in detail. `name` says how they were chosen: all, typical, slowest, first, last or chosen
    (by the user). `start` is in seconds since the run began. `bars` has the recorded spans. A collective with a wait
    has a bar for the wait and a bar for the communication. `attributed` has bars that do not overlap: each moment of a
    rank counts as one kind of time. Idle time has no bar. `usual_step` is the step to show first. Its time is nearest
    to the usual time of a step."""

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
        """Return the times of the step with this number, or None if this step is not in `steps`."""
        return next((times for times in self.steps if times.step == number), None)


@dataclass(frozen=True)
class TimeBeside:
    """How many seconds of a step one kind of time takes, such as forward, as predicted and as measured. `measured` is
    the mean over ranks, then the median over steps."""

    name: str
    predicted: Seconds
    measured: Seconds


@dataclass(frozen=True)
class MemoryBeside:
    """Memory in bytes, as predicted and as measured on the rank that used the most. `measured` is None if no rank
    measured it."""

    name: str
    predicted: Bytes
    measured: Bytes | None


@dataclass(frozen=True)
class Reconciled:
    """The comparison of a run with its prediction. The prediction is for the machine `machine`, and `origin` says where
    its times of operations come from. `seconds` is the predicted time of a step, with its 80 % interval from `low` to
    `high`. `seconds`, `low` and `high` are None if only memory was predicted. `measured` is the median time of a
    step."""

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
    """The report on a run. `about` has facts such as plan, command, commit and last metric. `headline` is the verdict
    in at most ten words, and `verdict` is a sentence. Times of different ranks are comparable to within ±
    `error_seconds`. `kinds` has the seconds of each kind of time, averaged over ranks. `goodput` splits the wall time
    into useful, saving, waiting and so on. `waiting` splits the waiting time by cause."""

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
        """The first and the last chosen step, or None if no steps were chosen."""
        return next(((view.first_step, view.last_step) for view in self.views if view.name == "chosen"), None)
