"""Models that nobody wrote for us, under every plan: what one device computes, and what the plan is for.

`make test` runs each plan on one model, `make suite` each plan on a third of them.

Tests parallel/tensor.py too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from meshwise.checker.check import uncompiled_plan
from meshwise.checker.proof import Proof
from meshwise.spec.plan import Plan
from tests.checker import effects
from tests.checker.effects import Effect, effect_of
from tests.checker.jobs_to_check import checked, job_named
from tests.checker.plans_to_check import NAMES, REFUSED, Case, cases
from tests.pool import CaseFailed

EFFECTS: dict[str, tuple[Callable[[list[Effect], Effect], None], Plan]] = {
    "data": (effects.data, Plan()),
    "shard": (effects.shard, Plan()),
    "shard, kept after the forward": (effects.shard, Plan()),
    "zero1": (effects.zero1, Plan()),
    "accumulate": (effects.accumulate, Plan()),
    "recompute full": (effects.again, Plan()),
    "recompute selective": (effects.selective, Plan()),
    "recompute of one block": (effects.again, Plan()),
    "offload activations": (effects.offload, Plan()),
    "bf16": (effects.bf16, Plan()),
    "offload parameters": (effects.shard, Plan()),
    "offload optimizer": (effects.state_away, Plan()),
    "gradients in bf16": (effects.halved, Plan()),
}
"""What each technique does beside computing the same, and the plan without it."""

LAYERS_AS_BLOCKS = {"mnist-mlp", "mnist-cnn", "mlp", "two-tower"}


def measured(name: str, plan: Plan) -> Effect:
    return effect_of(job_named(name), plan)


@cache
def without(name: str, plan: Plan, pool: Any) -> Effect:
    return pool(plan.devices).run(measured, name, plan)[0]


def proved(case: Case, pool: Any) -> Proof:
    return checked(pool, case.model, case.plan, steps=case.steps, rounding=case.plan.precision == "bf16")


def test_a_check_leaves_the_compiler_out_and_reports_it() -> None:
    compiled, said = [case.plan for case in cases() if case.plan.compile], list[str]()
    assert len(compiled) == len(NAMES) and all(not uncompiled_plan(plan, said.append).compile for plan in compiled)
    assert said == ["compile is left out: the modules are compared as they are written"] * len(NAMES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[] if c.quick else pytest.mark.slow) for c in cases(3) if not c.plan.compile],
)
def test_a_plan_computes_what_one_device_computes(case: Case, pool: Any) -> None:
    if case.refused:
        with pytest.raises(CaseFailed) as failed:
            proved(case, pool)
        assert failed.value.kind == "PlanError" and REFUSED[case.model, case.refused] in failed.value.text
        return
    proof = proved(case, pool)
    assert proof.equal, (proof.comparison.first, proof.cause)
    counts = {compared.kind: compared.count for compared in proof.comparison.kinds}
    assert {"module outputs", "gradients", "gradient norm", "parameters", "evaluation"} <= counts.keys()
    assert len(proof.batches) in (case.steps, case.steps + 1)  # one more where the job has a second epoch
    for rounding in proof.rounding:  # how many of a few are right is another number at the least rounding
        assert rounding.kind == "evaluation" or rounding.plan <= 10 * rounding.one_device, rounding
    if case.label in EFFECTS:
        assert_effect, plan = EFFECTS[case.label]
        if case.plan.recompute != "none" and case.model in LAYERS_AS_BLOCKS:
            assert_effect = effects.hardly
        ranks = pool(case.plan.devices).run(measured, case.model, case.plan)
        assert_effect(ranks, without(case.model, plan, pool))
