"""What a step costs beside the same thing written by hand: the same collectives, and no more operators. Counted."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.spec.plan import Plan
from tests.parallel import by_hand


@pytest.mark.parametrize(
    ("plan", "collectives"),
    [
        (Plan(shard=2), {"_allgather_base_": 5, "_reduce_scatter_base_": 3}),
        (Plan(shard=2, reshard=False), {"_allgather_base_": 3, "_reduce_scatter_base_": 3}),
        (Plan(data=2), {"allreduce_": 1}),
    ],
    ids=repr,
)
def test_a_plan_runs_the_collectives_of_hand_written_code_and_its_operators(
    plan: Plan, collectives: Any, pool: Any
) -> None:
    for found in pool(2).run(by_hand.counts, plan, 64, 2):
        facts = by_hand.summary(found)
        assert facts["same collectives"], facts
        assert {name: number for name, (number, _) in facts["collectives"].items()} == collectives
        assert facts["more operators %"] <= 2.0 and facts["operators"] > 500, facts
