"""What `fully_shard` communicates is on the timeline: each block gathered and reduced, with its bytes and number."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from meshwise.parallel.apply import apply
from meshwise.reports.recorder import WIDTH, Recorder, make_current
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import batches, build


def spans_of_a_step(plan: Plan) -> list[tuple[str, str, int, bool]]:
    """Lane, name, bytes and whether it has a number on all ranks, of each collective of a step."""
    model = build("mlp")
    applied = apply(model, plan, World(rank=collectives.get_rank(), size=collectives.world_size()))
    batch, target = batches("mlp", 1)[0]
    for _ in range(2):  # in the first step ranks compare notes
        recorder = Recorder()
        before = make_current(recorder)
        try:
            backward(applied, nn.functional.mse_loss(model(batch), target))
        finally:
            make_current(before)
    rows, _ = recorder.drain()
    found = [rows[at : at + WIDTH] for at in range(0, len(rows), WIDTH)]
    return [(*recorder.names[row[0]][1:], row[4], row[5] >= 0) for row in found]


@pytest.mark.parametrize(("plan", "numbered"), [(Plan(shard=2), True), (Plan(data=2, shard=2), False)], ids=repr)
def test_each_block_is_gathered_twice_and_reduced_once(plan: Plan, numbered: bool, pool: Any) -> None:
    layer = (72 * 72 + 72) * 8
    rest = sum(p.numel() for p in build("mlp").parameters()) * 8 - 2 * layer + (72 + 1) * 8  # three rows go as four
    for spans in pool(plan.devices).run(spans_of_a_step, plan):
        assert all(lane == "main" and known is numbered for lane, _, _, known in spans)
        told = [(name, bytes) for _, name, bytes, _ in spans]
        assert told[:3] == [
            ("all-gather of parameters", rest),
            ("all-gather of parameters", layer),
            ("all-gather of parameters", layer),
        ]
        assert sorted(told[3:]) == sorted(
            [("all-gather of parameters", layer)] * 2
            + [("reduce-scatter of gradients", layer)] * 2
            + [("reduce-scatter of gradients", rest)]
        )
