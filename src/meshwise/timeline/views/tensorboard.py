"""Write the report's series as TensorBoard events.

They can then be compared with the events of other runs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import numpy as np

from meshwise.spec.errors import UsageError
from meshwise.timeline.run_report import NOT_MEMORY, Report
from meshwise.timeline.timeline import Counter, Timeline

Scalar = tuple[str, float, int, float]
"""Tag, value, step, and seconds since the run began."""
MOST_LOSSES = 5000


def render(report: Report, timeline: Timeline) -> Iterator[bytes]:
    """Yield the content of a TensorBoard event file with the scalars of a run. The time of an event is when it happened
    in the run. The file has these scalars:

    step/seconds: the seconds of each step, as the mean over ranks.
    step/forward: the seconds of each step that went into the forward. There is such a scalar for every kind of time.
    train/loss: the loss recorded by the lowest rank that recorded a loss. At most MOST_LOSSES values are written.
    memory/allocated/rank 0: the bytes of memory that rank 0 had allocated. There is such a scalar for every counter of
        memory on every rank.
    goodput/useful: the share of the wall time that was useful, written at the last step. There is such a scalar for
        every use of the wall time.
    throughput/samples_per_second: the throughput of the whole run, written at the last step.

    Non-finite values are left out. Raises UsageError if tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise UsageError("--tensorboard needs tensorboard. Use pip install 'meshwise[tensorboard]'") from None
    file, began = io.BytesIO(), timeline.began or 0.0
    records = RecordWriter(file)
    records.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
    for tag, value, step, time in _scalars(timeline, report):
        if math.isfinite(value):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            records.write(Event(wall_time=began + time, step=step, summary=summary).SerializeToString())
    yield file.getvalue()


def _scalars(timeline: Timeline, report: Report) -> Iterator[Scalar]:
    series = report.series
    for name, values in {"seconds": series.seconds, **series.kinds}.items():
        for value, step, time in zip(values, series.step, series.time, strict=True):
            yield f"step/{name}", value, step, time
    counters = {(counter.rank, counter.name): counter for counter in timeline.counters}
    yield from _loss(timeline.counter("loss"))
    for thinned in report.counters:
        if thinned.name not in NOT_MEMORY:
            whole = counters[thinned.rank, thinned.name]
            steps = whole.step[np.searchsorted(whole.time / 1e9, thinned.time)].tolist()
            for time, value, step in zip(thinned.time, thinned.value, steps, strict=True):
                yield f"memory/{thinned.name}/rank {thinned.rank}", value, step, time
    last = int(timeline.spans["step"].max(initial=0))
    for part in report.goodput:
        yield f"goodput/{part.name}", part.share, last, report.wall_seconds
    if report.samples_per_second is not None:
        yield "throughput/samples_per_second", report.samples_per_second, last, report.wall_seconds


def _loss(counter: Counter | None) -> Iterator[Scalar]:
    if counter is not None:
        some = np.unique(np.linspace(0, len(counter.value) - 1, min(MOST_LOSSES, len(counter.value))).astype(np.int64))
        facts = (counter.value[some].tolist(), counter.step[some].tolist(), (counter.time[some] / 1e9).tolist())
        for value, step, time in zip(*facts, strict=True):
            yield "train/loss", value, step, time
