"""What is equal is found equal: every built-in job and small ones with all that is known to raise false alarms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwise.checker.proof import Proof
from meshwise.spec.plan import Plan
from tests.checker.jobs_to_check import checked

JOBS = (
    "mnist-mlp",
    "mnist-cnn",
    "mlp",
    "gpt",
    "plain",
    "dropped",
    "recomputed",
    "tied",
    "counting",
    "weighed",
    "biased",
    "normed",
    "by closure",
)

OWN = ("plain", "dropped", "recomputed", "tied", "counting", "weighed", "biased", "normed")


ALLOWED: dict[str, set[str]] = {}
"""Modules whose outputs are not compared, because their rows are not the samples."""


def cases() -> list[Any]:
    """Every job on 2 and 3 workers, whole and cut in two; `make test` runs a few, `make suite` all, on more seeds."""
    found = []
    for j, name in enumerate(JOBS):
        for d, devices in enumerate((2, 3)):
            for a, accumulate in enumerate((1, 2)):
                for seed in (0, 1):
                    quick = seed == 0 and (2 * d + a + j) % 4 == 0 and name in OWN  # built-in jobs: test_models.py
                    found.append(pytest.param(name, devices, accumulate, seed, marks=[] if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "devices", "accumulate", "seed"), cases())
def test_the_plan_is_equal(name: str, devices: int, accumulate: int, seed: int, pool: Any) -> None:
    proof = checked(pool, name, Plan(data=devices, accumulate=accumulate), seed=seed)
    assert proof.equal, (proof.comparison.first, proof.cause)
    assert proof.cause is None and (len(proof.batches) == 4 or name != "dropped"), "two steps of the second epoch"
    kinds = {compared.kind: compared.count for compared in proof.comparison.kinds}
    assert kinds["gradients"] and kinds["module outputs"] and kinds["parameters"] and kinds["evaluation"] > 1
    assert left_out_outputs(proof) == ALLOWED.get(name, set())
    assert all("rounding" in text for text in proof.comparison.left_out if not text.startswith("outputs of"))


EACH = Plan(shard=2, accumulate=2, reduce_each=True)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("weighed", EACH),
        ("plain", replace(EACH, recompute="full")),
        pytest.param("weighed", replace(EACH, data=2, shares=(1, 3, 2, 1)), marks=pytest.mark.slow),
        pytest.param("gpt", replace(EACH, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_shard_that_reduces_each_microbatch_is_equal(name: str, plan: Plan, pool: Any) -> None:
    """Also where only the losses know their weights, which are added over the ranks when the last one is done. With
    this seed ranks begin with other weights."""
    proof = checked(pool, name, plan, seed=2)
    assert proof.equal, (proof.comparison.first, proof.cause)


def left_out_outputs(proof: Proof) -> set[str]:
    """Modules of which some output was not compared."""
    return {text.split()[2] for text in proof.comparison.left_out if text.startswith("outputs of")}


PLANS = {
    "shard": Plan(shard=2),
    "zero1": Plan(data=2, zero1=True),
    "recompute": Plan(data=2, accumulate=2, recompute="full"),
    "all": Plan(shard=2, accumulate=2, recompute="selective"),
}
REFUSED = {("dropped", "all")}  # an LSTM in float64 writes in place: recompute="selective" is refused


def plan_cases() -> list[Any]:
    """Each technique on each small job; `make test` runs a sixth of them."""
    found = []
    for j, name in enumerate((*OWN, "gpt")):
        for p, plan in enumerate(PLANS):
            if (name, plan) not in REFUSED:
                quick = (j + p) % 6 == 0 and name != "gpt"
                found.append(pytest.param(name, plan, marks=[] if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "plan"), plan_cases())
def test_each_technique_is_equal(name: str, plan: str, pool: Any) -> None:
    """What the techniques leave behind (parts of tensors, state on one rank, second forwards) is seen whole."""
    proof = checked(pool, name, PLANS[plan])
    assert proof.equal, (proof.comparison.first, proof.cause)
    kinds = {compared.kind: compared.count for compared in proof.comparison.kinds}
    assert {"module outputs", "gradients", "parameters", "evaluation"} <= kinds.keys()
    assert name == "gpt" or all("rounding" in text for text in proof.comparison.left_out)


def test_noise_is_left_out_and_told(pool: Any) -> None:
    """Adam turns the rounding of a gradient that is zero into whole steps: the key's bias, a third of in_proj_bias."""
    proof = checked(pool, "biased", Plan(data=2))
    assert proof.equal
    assert any("most of them in mix.in_proj_bias: their gradients" in text for text in proof.comparison.left_out)


def test_draws_in_the_evaluation_are_those_of_one_device(pool: Any) -> None:
    proof = checked(pool, "sampling", Plan(data=2))
    assert proof.equal, (proof.comparison.first, proof.cause)


def test_rows_that_are_not_the_samples_are_no_fault_where_nothing_is_made_of_them(pool: Any) -> None:
    """The tokens of an expert may be as many as the samples by chance."""
    proof = checked(pool, "sorted", Plan(data=2))
    assert proof.equal, (proof.comparison.first, proof.cause)
    assert any("look (Tanh): its rows are not those of the samples" in text for text in proof.comparison.left_out)
