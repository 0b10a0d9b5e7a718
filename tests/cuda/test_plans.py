"""Every plan of docs/plans.md on fake GPUs: losses, metrics and parameters are those of as many CPU workers.

Two ranks add in one order on both, and the fake computes by the CPU's kernels: they are equal bit for bit. Of more
ranks, gloo and NCCL add in different orders, and Adam makes much of it where a gradient is near zero: those train in
float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwise.spec.plan import Plan
from tests.cuda.sides import apart, known, trained

pytestmark = pytest.mark.evidence(
    "plans over every axis, recompute and offload train on one and two ranks as on CPU workers, bit for bit, ten "
    "of them in four orders of streams; on four ranks in float64 within 1e-9; `--exact-random` draws one device's masks"
)

ACTIVATIONS, STATE, PARAMETERS = ("activations",), ("optimizer",), ("parameters",)
ROUNDING = 1e-9  # of float64

ONE = [
    Plan(),
    Plan(accumulate=2),
    Plan(recompute="full"),
    Plan(recompute="selective", offload=ACTIVATIONS),
    Plan(offload=STATE),
]
TWO = [
    Plan(data=2),
    Plan(data=2, accumulate=2),
    Plan(data=2, shares=(2, 1)),
    Plan(data=2, recompute="selective", offload=ACTIVATIONS),
    Plan(data=2, offload=STATE),
    Plan(data=2, zero1=True),
    Plan(data=2, zero1=True, recompute="full", offload=STATE),
    Plan(shard=2),
    Plan(shard=2, reshard=False),
    Plan(shard=2, recompute="full", accumulate=2),
    Plan(shard=2, offload=ACTIVATIONS),
    Plan(shard=2, offload=PARAMETERS),
    Plan(shard=2, offload=STATE),
    Plan(tensor=2),
    Plan(tensor=2, sequence=True),
    Plan(tensor=2, recompute="selective", offload=ACTIVATIONS),
    Plan(context=2),
    Plan(context=2, recompute="selective", offload=ACTIVATIONS),
    Plan(pipeline=2, accumulate=2),
    Plan(pipeline=2, accumulate=4, schedule="gpipe"),
    Plan(pipeline=2, accumulate=4, schedule="interleaved"),
    Plan(pipeline=2, accumulate=2, recompute="full", offload=ACTIVATIONS),
    Plan(pipeline=2, accumulate=2, offload=STATE),
]
IMAGES = [Plan(), Plan(data=2), Plan(data=2, batch_norm="local"), Plan(shard=2, accumulate=2), Plan(tensor=2)]
EXPERTS = [Plan(expert=2), Plan(expert=2, recompute="full", accumulate=2), Plan(expert=2, offload=ACTIVATIONS)]
FOUR = [
    Plan(data=4),
    Plan(data=4, zero1=True),
    Plan(shard=4),
    Plan(data=2, shard=2, accumulate=2, recompute="full", offload=ACTIVATIONS),
    Plan(tensor=4),
    Plan(data=2, tensor=2),
    Plan(shard=2, tensor=2),
    Plan(data=2, context=2),
    Plan(shard=2, context=2, accumulate=2, recompute="full"),
    Plan(context=2, tensor=2),
    Plan(context=2, pipeline=2, accumulate=2),
    Plan(shard=2, pipeline=2, accumulate=2),
    Plan(tensor=2, pipeline=2, accumulate=2),
    Plan(data=2, pipeline=2, accumulate=2, zero1=True),
    Plan(pipeline=4, accumulate=4),
]
BUILT_IN = [
    ("mnist-mlp", Plan(data=2)),
    ("mnist-cnn", Plan(shard=2)),
    ("mlp", Plan(data=2, zero1=True)),
]

CASES = [
    *BUILT_IN,
    *(("decoder", plan) for plan in [*ONE, *TWO]),
    *(("sometimes", plan) for plan in [Plan(data=2), Plan(shard=2)]),
    *(("images", plan) for plan in IMAGES),
    *(("experts", plan) for plan in EXPERTS),
]


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_gpus_train_what_cpu_workers_do_bit_for_bit(gpus: Any, pool: Any, name: str, plan: Plan) -> None:
    want, got = known(pool(plan.devices), name, plan), trained(gpus(plan.devices), name, plan)
    assert apart(want, got) == 0 and want.notes == got.notes


IN_FLOAT64 = [*(("decoder", plan) for plan in FOUR), ("gpt", Plan(tensor=2)), ("gpt", Plan(shard=2))]
"""RMS norms are one kernel on CUDA, and several on the CPU."""


@pytest.mark.parametrize(("name", "plan"), IN_FLOAT64, ids=str)
def test_gpus_train_in_float64_what_cpu_workers_do(gpus: Any, pool: Any, name: str, plan: Plan) -> None:
    plan = replace(plan, precision="fp64")
    want, got = known(pool(plan.devices), name, plan), trained(gpus(plan.devices), name, plan)
    assert apart(want, got) < ROUNDING and want.notes == got.notes


STREAMS = [
    Plan(data=2, precision="bf16"),
    Plan(data=2, recompute="selective", offload=ACTIVATIONS),
    Plan(data=2, zero1=True, offload=STATE),
    Plan(shard=2, precision="fp16"),
    Plan(shard=2, offload=PARAMETERS),
    Plan(shard=2, offload=ACTIVATIONS),
    Plan(tensor=2, sequence=True),
    Plan(context=2, offload=ACTIVATIONS),
    Plan(pipeline=2, accumulate=4),
    Plan(pipeline=2, accumulate=4, schedule="interleaved"),
]
SCHEDULES = [("default-late", 0), ("side-late", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_no_order_in_which_streams_may_run_changes_a_number(gpus: Any, pool: Any, schedule: str, seed: int) -> None:
    """What lacks a wait reads too early in one of them."""
    for plan in STREAMS:
        want, got = known(pool(2), "decoder", plan), trained(gpus(2, schedule, seed), "decoder", plan)
        assert apart(want, got) == 0, plan


def test_under_exact_random_gpus_draw_the_masks_of_one(gpus: Any) -> None:
    want = trained(gpus(1), "with dropout", Plan(precision="fp64"), exact_random=True)
    for plan in (Plan(data=2), Plan(shard=2), Plan(tensor=2), Plan(context=2), Plan(data=2, recompute="full")):
        got = trained(gpus(2), "with dropout", replace(plan, precision="fp64"), exact_random=True)
        assert apart(want, got) < ROUNDING, plan
