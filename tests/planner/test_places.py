"""Each launch of a rehearsed step knows its block and its microbatch, in the backward too."""

from __future__ import annotations

import time
from itertools import groupby

import pytest

from meshwise.planner.places import OutOfTime, Places, until
from meshwise.planner.trace import trace
from meshwise.planner.work import MAIN
from meshwise.spec.plan import Plan
from meshwise.training.jobs.registry import find_job


def stretches(plan: Plan, rank: int = 0) -> list[tuple[str, str, int]]:
    """Phase, block and microbatch of what mlp computes in a step on a CPU, each once in a row."""
    step = trace(find_job("mlp"), plan, "cpu")[rank].step
    computed = [launch for launch in step.launches if launch.stream == MAIN and launch.phase in ("forward", "backward")]
    return [key for key, _ in groupby((launch.phase, launch.module, launch.microbatch) for launch in computed)]


def in_blocks(plan: Plan, rank: int = 0) -> list[tuple[str, str, int]]:
    return [key for key, _ in groupby(place for place in stretches(plan, rank) if place[1])]


def test_a_backward_is_of_the_blocks_of_its_forward_in_reverse() -> None:
    there = [("forward", block, 0) for block in ("0", "2", "4")]
    back = [("backward", block, 0) for block in ("4", "2", "0")]
    assert in_blocks(Plan()) == there + back
    assert in_blocks(Plan(data=2)) == there + back


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_microbatch_has_its_number(recompute: str) -> None:
    places = stretches(Plan(accumulate=2, recompute=recompute))
    assert [key for key, _ in groupby((phase, number) for phase, _, number in places)] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]
    assert {block for phase, block, _ in places if phase == "backward"} == {"", "0", "2", "4"}


def test_stages_know_the_microbatch_whose_backward_it_is() -> None:
    plan = Plan(pipeline=2, accumulate=4)
    first, last = in_blocks(plan), in_blocks(plan, rank=1)
    assert [number for phase, _, number in first if phase == "backward"] == [0, 1, 2, 3]
    assert first[:3] == [("forward", "0", 0), ("forward", "0", 1), ("backward", "0", 0)]
    assert {block for _, block, _ in first} == {"0"} and {block for _, block, _ in last} == {"2", "4"}


def test_a_rehearsal_over_its_time_ends_where_a_phase_begins() -> None:
    places = Places()
    with pytest.raises(OutOfTime), until(time.process_time() - 1, time.process_time):
        places.span("forward")
    places.span("forward")
