"""Odd models: each trains as on one device, or is refused in a sentence before a step. None crashes or hangs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import apply_with, backward
from tests.parallel.odd import ODD, WIDE, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*nested tensors.*")

REFUSED = {
    ("lazy", "every"): "parameter 0.weight belongs to a lazy module and has no shape yet",
    ("sparse embedding", "every"): "module embed makes sparse gradients",
    ("empty parameter", "shard"): r"parameter none of shape \(0, 4\) has no elements",
    ("two dtypes", "shard"): "must have one dtype, but they are one.bias in float32, two.bias in float64",
}
PLANS = {"shard": Plan(shard=2), "data": Plan(data=2), "zero1": Plan(data=2, zero1=True)}


def trained(name: str, plan: Plan | None) -> list[Tensor]:
    """The parameters after three steps on one batch after another; without a plan, by a plain loop."""
    world = World(rank=collectives.get_rank(), size=collectives.world_size())
    model = build(name)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(trainable, lr=0.1)] if trainable else []
    applied = Setup(model, Plan(), world) if plan is None else apply_with(model, plan, world, *optimizers)
    torch.manual_seed(5)
    for _ in range(3):
        batch = torch.randn(8, WIDE, dtype=torch.float64)
        loss = model(batch if plan is None else batch.chunk(world.size)[world.rank]).square().mean()
        if optimizers:
            backward(applied, loss)
            optimizers[0].step()
            optimizers[0].zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def compared(name: str, plan: Plan) -> tuple[float, float] | str:
    """How far parameters are from one device's, and how far these moved; or why the model is refused."""
    try:
        under = trained(name, plan)
    except PlanError as error:
        return str(error)
    before, alone = [p.detach().clone() for p in build(name).parameters()], trained(name, None)
    apart = [float((a - b).abs().max()) for a, b in zip(under, alone, strict=True) if a.numel()]
    moved = [float((a - b).abs().max()) for a, b in zip(alone, before, strict=True) if a.numel()]
    return max(apart, default=0.0), max(moved, default=0.0)


def all_compared(plan: Plan) -> dict[str, tuple[float, float] | str]:
    return {name: compared(name, plan) for name in ODD}


@pytest.mark.parametrize("axis", PLANS)
def test_odd_models_are_one_device_s_or_refused(axis: str, pool: Any) -> None:
    for found in pool(2).run(all_compared, PLANS[axis]):
        assert found.keys() == ODD.keys()
        for name, result in found.items():
            says = REFUSED.get((name, axis)) or REFUSED.get((name, "every"))
            if isinstance(result, str) or says is not None:
                assert says is not None and isinstance(result, str) and re.search(says, result), (name, result)
            else:
                apart, moved = result
                assert apart < (1e-6 if name == "two dtypes" else 1e-9), (name, apart)
                assert moved > 1e-4 or name == "no parameters", (name, moved)
