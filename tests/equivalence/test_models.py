"""Models that nobody wrote for us, under every plan: what one device computes."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.spec.plan import Plan
from tests.equivalence.jobs_to_check import checked


@pytest.mark.parametrize("model", ["llama"])
def test_the_plan_is_equal(model: str, pool: Any) -> None:
    proof = checked(pool, model, Plan(shard=2), steps=5)
    assert proof.equal, (proof.comparison.first, proof.cause)
