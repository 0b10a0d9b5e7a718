"""TensorBoard events: read back by TensorBoard, they are the report's numbers at the run's own times."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwise.spec.errors import UsageError
from meshwise.timeline.analyse import report_of
from meshwise.timeline.timeline import Counter, Timeline
from meshwise.timeline.views import tensorboard
from meshwise.timeline.views.registry import VIEWS
from meshwise.timeline.views.tensorboard import render
from tests.timeline.schedules import Schedule, even, played

STEPS = 12
BEGAN = 1_700_000_000.0


@pytest.fixture
def timeline() -> Timeline:
    """Two ranks, with counters on both; the loss is not a number in step 3."""
    made = played(Schedule(ranks=2, steps=STEPS), even())
    step = np.arange(1, STEPS + 1)
    time, none = step * 35_000_000, np.full(STEPS, -1)
    counters = []
    for rank in range(2):
        loss = np.where(step == 3, np.nan, 1 / step + rank)
        counters.append(Counter(rank, "loss", time, step, none, loss))
        counters.append(Counter(rank, "allocated", time, step, none, 2.0**20 * (step + rank)))
        counters.append(Counter(rank, "samples", time, step, none, 64.0 * step))
    return dataclasses.replace(made, counters=tuple(counters), facts={"job": "a job", "sessions": [{"began": BEGAN}]})


def read(folder: Path) -> dict[str, list[Any]]:
    """The events of each tag: (wall_time, step, value)."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def written(timeline: Timeline, folder: Path) -> dict[str, list[Any]]:
    pytest.importorskip("tensorboard")
    (folder / Path(VIEWS["tensorboard"].file).name).write_bytes(b"".join(render(report_of(timeline), timeline)))
    return read(folder)


def test_the_steps_are_the_reports(timeline: Timeline, tmp_path: Path) -> None:
    found, series = written(timeline, tmp_path), report_of(timeline).series
    kinds = {f"step/{kind}": seconds for kind, seconds in series.kinds.items()}
    assert {tag for tag in found if tag.startswith("step/")} == {"step/seconds", *kinds}
    assert "step/backward" in kinds and "step/communication" in kinds
    for tag, seconds in {"step/seconds": series.seconds, **kinds}.items():
        assert [event.step for event in found[tag]] == series.step == list(range(1, STEPS + 1))
        assert [event.value for event in found[tag]] == pytest.approx(seconds, rel=1e-6)
        assert [event.wall_time for event in found[tag]] == pytest.approx([BEGAN + t for t in series.time], abs=1e-6)


def test_the_loss_is_the_first_ranks_and_what_is_no_number_is_left_out(timeline: Timeline, tmp_path: Path) -> None:
    losses = written(timeline, tmp_path)["train/loss"]
    steps = [step for step in range(1, STEPS + 1) if step != 3]
    assert [event.step for event in losses] == steps
    assert [event.value for event in losses] == pytest.approx([1 / step for step in steps])
    assert [event.wall_time for event in losses] == pytest.approx([BEGAN + 0.035 * step for step in steps], abs=1e-6)


def test_of_many_losses_some_are_written_the_first_and_the_last_among_them(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "MOST_LOSSES", 4)
    steps = [event.step for event in written(timeline, tmp_path)["train/loss"]]
    assert steps == [1, 4, 8, 12]


def test_memory_is_told_for_each_rank_at_its_step(timeline: Timeline, tmp_path: Path) -> None:
    found = written(timeline, tmp_path)
    for rank in range(2):
        events = found[f"memory/allocated/rank {rank}"]
        assert [(event.step, event.value) for event in events] == [
            (step, 2.0**20 * (step + rank)) for step in range(1, STEPS + 1)
        ]
    assert len([tag for tag in found if tag.startswith("memory/")]) == 2  # losses and samples are no memory


def test_of_the_run_there_is_one_value_at_the_last_step(timeline: Timeline, tmp_path: Path) -> None:
    found, report = written(timeline, tmp_path), report_of(timeline)
    for part in report.goodput:
        (event,) = found[f"goodput/{part.name}"]
        assert (event.step, event.value) == (STEPS, pytest.approx(part.share, rel=1e-6))
        assert event.wall_time == pytest.approx(BEGAN + report.wall_seconds)
    (event,) = found["throughput/samples_per_second"]
    assert event.value == pytest.approx(report.samples_per_second)


def test_a_run_without_steps_has_its_goodput_alone(tmp_path: Path) -> None:
    assert {tag.split("/")[0] for tag in written(Timeline(), tmp_path)} == {"goodput"}


def test_without_tensorboard_the_remedy_is_named(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(UsageError, match=r"pip install 'meshwise\[tensorboard\]'"):
        b"".join(render(report_of(timeline), timeline))
