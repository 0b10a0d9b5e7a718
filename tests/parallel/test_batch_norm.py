"""Batch norm over all ranks: outputs, gradients and running statistics are those of the whole microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.apply import apply
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.zoo import ConvNet

SPLITS = {2: [5, 3], 4: [3, 2, 1, 2]}


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def make(momentum: float | None, affine: bool) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    for block in model.blocks:
        block[1] = nn.BatchNorm1d(3, momentum=momentum, affine=affine)
    return model.double()


def run(model: nn.Module, backward: Any, x: Tensor, scale: float) -> dict[str, Tensor]:
    for _ in range(2):
        backward(model(x * 3 + 100).square().mean() * scale)
    facts = dict(model.state_dict())
    facts |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    facts["evaluated"] = model.eval()(torch.ones(2, 3, 6).double())
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in facts.items()}


def apart(plan: Plan, momentum: float | None, affine: bool, absent: bool) -> float:
    """The largest difference from one device; with `absent`, the last rank runs a sample that does not count."""
    world = here()
    torch.manual_seed(1)
    whole = torch.randn(8, 3, 6).double()
    sizes = SPLITS[world.size]
    mine = whole.split(sizes)[world.rank]
    if absent:
        whole = whole[: 8 - sizes[-1]]
    samples = 0 if absent and world.rank == world.size - 1 else len(mine)
    model = make(momentum, affine)
    applied = apply(model, plan, world, counts=lambda: samples > 0)
    assert not any("batch norm" in note for note in applied.notes)
    got = run(model, applied.backward, mine, samples * world.size / len(whole))
    want = run(make(momentum, affine), Tensor.backward, whole, 1.0)
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize(
    ("plan", "momentum", "affine", "absent"),
    [
        (Plan(data=2), 0.1, True, False),
        (Plan(data=2), None, False, False),
        (Plan(data=4), 0.1, True, True),
        (Plan(data=2, recompute="full"), 0.1, True, False),
        (Plan(data=2, shard=2, recompute="full"), 0.1, True, True),
    ],
)
def test_it_is_that_of_one_device(plan: Plan, momentum: Any, affine: bool, absent: bool, pool: Any) -> None:
    assert max(pool(plan.devices).run(apart, plan, momentum, affine, absent)) < 1e-9


def by_itself() -> float:
    """Without the joining, the same comparison must fail."""
    world = here()
    torch.manual_seed(1)
    whole = torch.randn(8, 3, 6).double()
    model = make(0.1, True)
    applied = apply(model, Plan(data=2), world)
    assert any(note.startswith("batch norm: each rank") for note in applied.notes)
    got = run(model, applied.backward, whole.chunk(2)[world.rank], 1.0)
    want = run(make(0.1, True), Tensor.backward, whole, 1.0)
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def test_statistics_of_a_share_alone_are_others(pool: Any) -> None:
    assert min(pool(2).run(by_itself)) > 1e-3
