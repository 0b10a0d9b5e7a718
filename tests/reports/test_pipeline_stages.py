"""The stages of a pipeline in a timeline: steps that were played by the schedules, of which every moment is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwise.parallel.schedule import CHUNKS, Action, orders
from meshwise.reports.analyse import report_of
from meshwise.reports.arrivals import arrival_table
from meshwise.reports.pipeline_stages import actions_of, pipeline_report, played_bubble
from meshwise.reports.spans import KIND, LANE, Timeline, stage_and_microbatch, stage_name
from meshwise.reports.views.gantt_text import gantt_text
from meshwise.reports.views.report_text import report_text
from meshwise.spec.plan import SCHEDULES
from tests.reports.schedules import MS, timeline_of
from tests.reports.views.reports import printed

TRANSIT = 3 * MS


def pipeline_timeline(
    schedule: str, ranks: int, microbatches: int, cost: Callable[[Action], int], *, pipes: int = 1, steps: int = 2
) -> Timeline:
    """Steps of pipelines whose stages send in TRANSIT. Ranks of one stage are neighbours, as those of `data` are not
    in a plan but those of `tensor` are."""
    last = ranks * CHUNKS.get(schedule, 1) - 1
    names = ["", "receive"]
    rows: list[tuple[int, ...]] = []
    now = [0] * (ranks * pipes)
    for step in range(1, steps + 1):
        for pipe in range(pipes):
            ended: dict[Action, int] = {}
            queues = [list(order) for order in orders(schedule, ranks, microbatches)]
            while any(queues):
                for stage_rank, queue in enumerate(queues):
                    before = _needs(queue[0], last) if queue else None
                    if not queue or not (before is None or before in ended):
                        continue
                    action, rank = queue.pop(0), stage_rank * pipes + pipe
                    begun = now[rank]
                    if before is not None and before.stage != action.stage:
                        now[rank] = max(begun, ended[before] + TRANSIT)
                        rows.append((rank, KIND["communication"], LANE["main"], 1, step, begun, now[rank], 64, -1))
                    name = stage_name(action.stage, action.microbatch)
                    names += [name] if name not in names else []
                    start = begun if action.forward else now[rank]  # the receive lies inside of a forward
                    now[rank] = ended[action] = now[rank] + cost(action)
                    kind = KIND["forward" if action.forward else "backward"]
                    rows.append((rank, kind, LANE["main"], names.index(name), step, start, now[rank], 0, -1))
        now = [max(now)] * len(now)
    made = timeline_of(rows, ranks * pipes)
    return Timeline(made.spans, tuple(names), ranks=made.ranks, clocks=made.clocks, sessions=made.sessions)


def _needs(action: Action, last: int) -> Action | None:
    if action.forward:
        return Action(True, action.stage - 1, action.microbatch) if action.stage else None
    at_end = action.stage == last
    return Action(at_end, action.stage if at_end else action.stage + 1, action.microbatch)


def even(action: Action) -> int:
    return (10 if action.forward else 20) * MS


def test_a_name_is_read_back() -> None:
    assert stage_and_microbatch(stage_name(3, 12)) == (3, 12)
    assert stage_and_microbatch("all-reduce of gradients") is None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bubble_of_equal_stages_is_that_of_theory(schedule: str, ranks: int) -> None:
    """(p - 1) / (v m + p - 1) for p ranks of v stages and m microbatches: Narayanan and others, SC 2021."""
    microbatches, chunks = 2 * ranks, CHUNKS.get(schedule, 1)
    timeline = pipeline_timeline(schedule, ranks, microbatches, even)
    report = pipeline_report(timeline.spans, timeline.names, np.array([1, 2]))
    assert report is not None
    theory = (ranks - 1) / (chunks * microbatches + ranks - 1)
    assert report.bubble_of_schedule == pytest.approx(report.bubble_of_stages)
    if schedule != "interleaved" or ranks == 2:  # the greedy order is up to a moment longer
        assert report.bubble_of_schedule == pytest.approx(theory)
    assert report.bubble > report.bubble_of_schedule  # sending takes time
    assert [(stage.forward_seconds, stage.backward_seconds) for stage in report.stages] == [
        (pytest.approx(0.010), pytest.approx(0.020))
    ] * (ranks * chunks)


def test_a_long_stage_makes_a_bubble_of_its_own() -> None:
    timeline = pipeline_timeline("1f1b", 2, 4, lambda action: even(action) * (1 + action.stage))
    report = pipeline_report(timeline.spans, timeline.names, np.array([1, 2]))
    assert report is not None
    assert report.bubble_of_stages > report.bubble_of_schedule + 0.1
    assert report.stages[1].backward_seconds == pytest.approx(2 * report.stages[0].backward_seconds)


@pytest.mark.parametrize("pipes", [1, 2])
def test_a_receive_waits_until_the_other_stage_has_computed(pipes: int) -> None:
    """What is behind that is communication: here TRANSIT. Two pipelines beside each other are told apart."""
    cost = even if pipes == 1 else lambda action: even(action) + action.microbatch * MS
    timeline = pipeline_timeline("1f1b", 3, 4, cost, pipes=pipes, steps=1)
    until = arrival_table(timeline.spans, timeline.names).waits_until(timeline.spans)
    received = timeline.spans["kind"] == KIND["communication"]
    took = (timeline.spans["end"] - until)[received]
    assert len(took) == pipes * 2 * (3 - 1) * 4
    assert took.max() == TRANSIT and took.min() >= 0
    assert (until == timeline.spans["start"])[~received].all()


def test_the_report_names_the_bubble_and_draws_the_microbatches() -> None:
    timeline = pipeline_timeline("gpipe", 2, 4, even, steps=12)
    report = report_of(timeline)
    assert report.findings[0].kind == "bubble"
    assert "The schedule alone (2 stages, 4 microbatches) causes 20 %" in report.verdict
    assert report.kinds["waiting"] > report.kinds["communication"] > 0
    text = printed(report_text(report, 100))
    assert [line.split() for line in text.splitlines() if line.startswith("stage  ranks")]
    rows = [line.plain for line in gantt_text(report.views[0], [0, 1], 120, step=report.views[0].usual_step)]
    for row in rows[:2]:
        assert [mark for mark in row.split(" ", 2)[2] if mark.isdigit()] == list("01230123")


def test_a_rank_without_a_log_gives_no_stages() -> None:
    timeline = pipeline_timeline("1f1b", 2, 4, even)
    alone = timeline.spans[timeline.spans["rank"] == 0]
    assert len(actions_of(alone, timeline.names))
    assert pipeline_report(alone, timeline.names, np.array([1, 2])) is None
    assert not len(actions_of(alone[:0], timeline.names))


def test_an_order_that_waits_in_a_circle_has_no_end() -> None:
    first, second = (True, 0, 0), (True, 1, 0)
    assert played_bubble([[second, first], []], lambda place: 1.0) is None
    assert played_bubble([[first], [second]], lambda place: 1.0) == pytest.approx(0.5)
