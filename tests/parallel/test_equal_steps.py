"""Under every plan, five optimizer steps are those of one device: gradients and parameters within 1e-9 in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import apply_with, backward
from tests.parallel.zoo import ZOO, batches, build

STEPS = 5
Facts = dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def facts_of(model: nn.Module) -> Facts:
    """Every parameter and gradient, whole, by name. Collective."""
    facts = {}
    for name, p in model.named_parameters():
        facts[name] = whole(p)
        if p.grad is not None:
            facts[f"{name}.grad"] = whole(p.grad)
    return facts


def one_device(name: str, clip: float | None = None, drop: float = 0.0) -> list[Facts]:
    model = build(name)
    optimizer = make_optimizer(model)
    found = []
    for batch, target in batches(name, STEPS):
        ZOO[name].score(model(batch), target).backward()
        found.append(step(model, optimizer, clip))
    return found


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups, whose settings are told apart."""
    ps = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": ps[::2], "lr": 1e-2}, {"params": ps[1::2], "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=3e-3, amsgrad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> Facts:
    facts = {}
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        facts["norm"] = whole(norm)
    optimizer.step()
    facts |= facts_of(model)
    optimizer.zero_grad()
    return facts


def under(name: str, plan: Plan, clip: float | None = None) -> list[Facts]:
    """The same steps under `plan`; each rank takes its share of the batch in `plan.accumulate` pieces."""
    world = here()
    model = build(name)
    optimizer = make_optimizer(model)
    applied = apply_with(model, plan, world, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[1]["weight_decay"] == 0.3
    found = []
    for batch, target in batches(name, STEPS):
        mine = zip(*(t.chunk(world.size)[world.rank].chunk(plan.accumulate) for t in (batch, target)), strict=True)
        run_backward(applied, name, list(mine))
        found.append(step(model, optimizer, clip))
    return found


def run_backward(applied: Setup, name: str, pieces: list[Any]) -> None:
    values = []
    for number, (batch, target) in enumerate(pieces):
        loss = ZOO[name].score(applied.model(batch), target) / len(pieces)
        values.append(backward(applied, loss, reduce=number == len(pieces) - 1, value=loss.detach()))
    assert all(v is not None and v.shape == () for v in values)


PLANS = {
    "shard 2": Plan(shard=2),
    "shard 4": Plan(shard=4),
    "data 2 x shard 2": Plan(data=2, shard=2),
    "shard 2, kept after forward": Plan(shard=2, reshard=False),
    "shard 2, accumulate 2": Plan(shard=2, accumulate=2),
    "data 2 x shard 2, accumulate 2, recompute": Plan(data=2, shard=2, accumulate=2, recompute="full"),
    "shard 2, recompute full": Plan(shard=2, recompute="full"),
    "shard 2, recompute selective": Plan(shard=2, recompute="selective"),
    "data 2, recompute selective": Plan(data=2, recompute="selective"),
    "data 1, recompute full": Plan(recompute="full"),
    "shard 2, offload activations": Plan(shard=2, offload=("activations",)),
    "data 1, offload activations": Plan(offload=("activations",)),
    "shard 2, offload, recompute full": Plan(shard=2, offload=("activations",), recompute="full"),
    "data 2, offload, recompute selective": Plan(data=2, offload=("activations",), recompute="selective"),
    "zero1 2": Plan(data=2, zero1=True),
    "zero1 4, accumulate 2, recompute": Plan(data=4, zero1=True, accumulate=2, recompute="full"),
}


def assert_equal(got: list[Facts], want: list[Facts]) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys(), (number, a.keys() ^ b.keys())
        for name, value in b.items():
            assert (a[name] - value).abs().max() < 1e-9, (number, name, (a[name] - value).abs().max())


def cases() -> list[Any]:
    """Every model under every plan: `make suite` runs all, `make test` a sixth."""
    found = []
    for m, name in enumerate(ZOO):
        for p, (text, plan) in enumerate(PLANS.items()):
            quick = (m + p) % 6 == 0
            found.append(pytest.param(name, plan, marks=[] if quick else [pytest.mark.slow], id=f"{text}-{name}"))
    return found


@pytest.mark.parametrize(("name", "plan"), cases())
def test_steps_are_those_of_one_device(name: str, plan: Plan, pool: Any) -> None:
    if name == "lstm" and plan.recompute == "selective":  # refused, see test_recompute.py
        plan = replace(plan, recompute=("lstm", "tag"))
    results = [under(name, plan)] if plan.devices == 1 else pool(plan.devices).run(under, name, plan)
    want = one_device(name)
    for got in results:
        assert_equal(got, want)


def kept_by_the_second() -> list[bool]:
    """Whether gradients of a weighed backward are there after another, which reaches one of two layers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    applied = apply_with(model, Plan(data=2), here())
    one = lambda: torch.ones(())  # noqa: E731
    for layers in (model, model[1]):
        backward(applied, layers(torch.ones(1, 2)).sum(), factor=one)
        model.zero_grad()
    backward(applied, model(torch.ones(1, 2)).sum(), factor=one)
    before = whole(model[0].weight.grad)
    backward(applied, model[1](torch.ones(1, 2)).sum(), factor=one)
    return [model[0].weight.grad is not None and torch.equal(whole(model[0].weight.grad), before)]


def test_a_weighed_backward_leaves_the_gradients_of_what_it_does_not_reach(pool: Any) -> None:
    assert pool(2).run(kept_by_the_second) == [[True], [True]]


def frozen_on_one() -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(collectives.get_rank() == 0)
    with pytest.raises(PlanError) as refused:
        backward(apply_with(model, Plan(data=2), here()), model(torch.ones(1, 2)).sum())
    return str(refused.value)


def test_a_parameter_that_one_rank_alone_trains_is_refused_by_its_name(pool: Any) -> None:
    """It was an error of DDP's, of another number of parameters."""
    says = "parameter 0.bias is trained on rank 0 and frozen on rank 1. Set requires_grad to the same on every rank."
    assert pool(2).run(frozen_on_one) == [says, says]


@pytest.mark.parametrize(
    "plan",
    [pytest.param(Plan(shard=2), marks=pytest.mark.slow), Plan(data=2, shard=2), Plan(data=2, zero1=True)],
    ids=repr,
)
def test_clipping_is_that_of_one_device(plan: Plan, pool: Any) -> None:
    want = one_device("transformer", clip=0.1)
    assert want[0]["norm"] > 0.1
    for got in pool(plan.devices).run(under, "transformer", plan, 0.1):
        assert_equal(got, want)
