"""A plan on another number of devices: what is kept on one, and that axes are found whatever their number."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.plan_devices import check_devices, factorisations, on_devices, on_one_device


@pytest.mark.parametrize(
    ("plan", "alone"),
    [
        (Plan(data=4), Plan()),
        (Plan(data=2, zero1=True, precision="bf16"), Plan(precision="bf16")),
        (Plan(shard=4, reshard=False, accumulate=3), Plan(accumulate=3)),
        (Plan(shard=2, offload=("optimizer", "parameters")), Plan(offload=("optimizer",))),
        (Plan(shard=2, offload=("activations", "parameters")), Plan(offload=("activations",))),
        (Plan(shard=2, compile=True, recompute="full"), Plan(compile=True, recompute="full")),
        (Plan(tensor=2, sequence=True), Plan()),
    ],
)
def test_on_one_device_what_needs_others_is_removed_and_all_else_kept(plan: Plan, alone: Plan) -> None:
    assert on_one_device(plan) == alone


@pytest.mark.parametrize(
    ("plan", "devices", "left"),
    [
        (Plan(data=4), 3, Plan(data=3)),
        (Plan(data=3), 4, Plan(data=4)),
        (Plan(data=2, zero1=True, accumulate=2), 1, Plan(accumulate=2)),
        (Plan(shard=4), 3, Plan(shard=3)),
        (Plan(data=2, shard=2), 3, Plan(shard=3)),
        (Plan(data=2, shard=4), 6, Plan(shard=6)),
        (Plan(shard=2, reshard=False), 1, Plan()),
        (Plan(shard=2, accumulate=2, reduce_each=True), 1, Plan(accumulate=2)),
        (Plan(data=2, tensor=2), 3, Plan(tensor=2)),
        (Plan(data=3, shares=(1, 2, 1)), 2, Plan(data=2)),
        (Plan(data=2, pipeline=2, accumulate=2), 3, Plan(pipeline=2, accumulate=2)),
    ],
)
def test_on_fewer_devices_replicas_or_shards_change_and_all_else_stays(plan: Plan, devices: int, left: Plan) -> None:
    assert on_devices(plan, devices) == left


def test_a_plan_that_needs_more_devices_than_are_left_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^data=2 x tensor=4 needs at least 4 devices, but the run now has 3\.$"):
        on_devices(Plan(data=2, tensor=4), 3)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_what_is_proposed_fills_the_devices_and_is_a_plan(data: int, shard: int, devices: int) -> None:
    plan = Plan(data=data, shard=shard, zero1=data > 1 and shard == 1)
    try:
        check_devices(plan, devices)
    except PlanError as error:
        words = str(error).partition("Use ")[2].partition(", or start")[0].split(", ")
        sizes: dict[str, Any] = {axis: getattr(plan, axis) for axis in AXES}
        sizes |= {name: int(size) for name, size in (word.split("=") for word in words)}
        assert math.prod(sizes.values()) == devices != plan.devices
        if devices > 1:
            Plan(zero1=plan.zero1, **sizes)
    else:
        assert plan.devices == devices


@pytest.mark.parametrize(("number", "count"), [(1, 3), (8, 3), (12, 2), (7, 4)])
def test_every_way_to_divide_devices_over_axes_is_tried_once(number: int, count: int) -> None:
    ways = list(factorisations(number, count))
    wanted = [w for w in _tuples(number, count) if math.prod(w) == number]
    assert sorted(ways) == sorted(wanted)


def _tuples(most: int, count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(first, *others) for first in range(1, most + 1) for others in _tuples(most, count - 1)]
