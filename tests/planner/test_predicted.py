"""A predicted step is a timeline like a measured one: the same report reads it."""

from __future__ import annotations

import pytest
from planner.works import FREE, Given, computes, gathers, receives, sends, work

from meshwise.planner.prediction import predicted_timeline
from meshwise.planner.simulate import simulate
from meshwise.planner.work import Copy, Launch
from meshwise.reports.analyse import report_of
from meshwise.reports.spans import KINDS, LANES
from meshwise.reports.step_table import step_table_of


def test_phases_blocks_and_collectives_have_their_lanes() -> None:
    events = (
        gathers((0, 1), phase="forward"),
        computes(phase="forward", module="layers.0", after=(0,)),
        gathers((0, 1), phase="forward"),
        computes(phase="forward", module="layers.1"),
        computes(phase="backward", module="layers.1"),
        gathers((0, 1), phase="backward", kind="reduce-scatter"),
        Launch(Copy(64, "host"), "out", phase="backward"),
        computes(phase="optimizer"),
    )
    given = Given()
    timeline = predicted_timeline(simulate([work(*events)], given, overlap=FREE), given.machine, facts={"job": "mine"})
    spans = timeline.of_rank(0)
    told = {
        (LANES[row["lane"]], KINDS[row["kind"]], timeline.names[row["name"]], row["start"] / 1e9, row["end"] / 1e9)
        for row in spans
    }
    assert told == {
        ("communication", "communication", "all-gather of parameters", 0, 1),
        ("communication", "communication", "all-gather of parameters", 1, 2),
        ("communication", "communication", "reduce-scatter of gradients", 2, 3),
        ("host", "transfer", "", 0, 1),
        ("main", "forward", "", 1, 3),
        ("main", "backward", "", 3, 4),
        ("main", "optimizer", "", 4, 5),
        ("blocks", "forward", "layers.0", 1, 2),
        ("blocks", "forward", "layers.1", 2, 3),
        ("blocks", "backward", "layers.1", 3, 4),
    }
    assert (spans["start"][1:] >= spans["start"][:-1]).all()
    assert timeline.source == "predicted" and timeline.ranks[0].device == "cuda:0"


def test_the_report_of_a_measured_run_reads_it() -> None:
    one = work(computes(phase="forward"), gathers((0, 1), "main", phase="forward"), computes(phase="backward"))
    late = [computes(phase="forward")] * 2
    other = work(*late, gathers((0, 1), "main", phase="forward"), computes(phase="backward"), rank=1)
    given = Given()
    step = simulate([one, other], given, overlap=FREE)
    timeline = predicted_timeline(step, given.machine, facts={"job": "mine", "plan": "data=2"})
    report = report_of(timeline)
    assert report.source == "predicted" and report.title == "mine"
    assert step_table_of(timeline).step_seconds()[0] == pytest.approx(step.seconds)


def test_stages_are_told_in_the_names_that_the_report_knows() -> None:
    first = work(
        computes(phase="forward", microbatch=0),
        sends(0, 1, after=(0,)),
        receives(1, 0, phase="backward"),
        computes(phase="backward", microbatch=0, after=(2,)),
    )
    last = work(
        receives(0, 1),
        computes(phase="forward", microbatch=0, after=(0,)),
        computes(phase="backward", microbatch=0),
        sends(1, 0, after=(2,), phase="backward"),
        rank=1,
    )
    given = Given({"send": 0.0, "receive": 0.0})
    step = simulate([first, last], given, overlap=FREE)
    timeline = predicted_timeline(step, given.machine, stages={0: 0, 1: 1})
    assert {"stage 0, microbatch 0", "stage 1, microbatch 0", "receive of gradients"} <= set(timeline.names)
    pipeline = report_of(timeline).pipeline
    assert pipeline is not None and pipeline.bubble == pytest.approx(0.5)
    assert (pipeline.bubble_of_schedule, pipeline.bubble_of_stages) == (pytest.approx(0.5), pytest.approx(0.5))
