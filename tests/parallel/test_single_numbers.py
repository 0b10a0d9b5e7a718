"""Parameters without a dimension under shard: whole on every rank, and trained as one device trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.mesh import divide_work
from meshwise.spec.plan import Plan
from meshwise.transfer.sharded import full_tensor
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_apply import here

PLANS = [
    Plan(shard=2),
    Plan(data=2, tensor=2),
    Plan(shard=2, tensor=2),
]


class Gated(nn.Module):
    def __init__(self, gate: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.own, self.gate, self.idle = nn.Parameter(torch.tensor(0.5)), gate, nn.Parameter(torch.tensor(1.0))

    def mixed(self, x: Tensor) -> Tensor:
        return self.own * (self.layer(x) * self.gate).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(x)


class Scaled(nn.Module):
    """A temperature of the whole model, a number that two blocks share, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        gate = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(Gated(gate) for _ in range(2))
        self.out, self.scale = nn.Linear(64, 8), nn.Parameter(torch.tensor(2.0))

    def logits(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.out(x) * self.scale.exp()
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def differing(plan: Plan, microbatches: int, by_method: bool) -> list[str]:
    """The parameters that are not what one device has after two steps."""
    torch.manual_seed(0)
    plain = Scaled().double()
    net = copy.deepcopy(plain)
    world = divide_work(plan, here())
    setup = apply_with(net, plan, world)
    samples = torch.arange(512.0, dtype=torch.float64).view(8, 64).sin()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, net)]
    run: Any = net.logits if by_method else net
    for _ in range(2):
        plain(samples).square().mean().backward()
        for place, part in enumerate(samples.chunk(world.size)[world.rank].chunk(microbatches)):
            backward(setup, run(part).square().mean() / microbatches, reduce=place == microbatches - 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both = zip(net.named_parameters(), plain.parameters(), strict=True)
    return [
        name
        for (name, p), own in both
        if p.requires_grad != own.requires_grad or not torch.allclose(full_tensor(p.detach()), own, rtol=1e-10)
    ]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("microbatches", "by_method"), [(1, False), (2, False), (1, True)])
def test_a_single_number_is_trained_as_on_one_device(
    plan: Plan, microbatches: int, by_method: bool, pool: Callable[[int], Any]
) -> None:
    assert pool(plan.devices).run(differing, plan, microbatches, by_method) == [[]] * plan.devices


def differing_after_a_load(plan: Plan) -> list[str]:
    """The parameters that are not what one device has after a step from the state of one device's optimizer."""
    torch.manual_seed(0)
    plain = Scaled().double()
    one = torch.optim.AdamW(plain.parameters(), lr=0.1)
    samples = torch.arange(512.0, dtype=torch.float64).view(8, 64).sin()
    plain(samples).square().mean().backward()
    one.step()
    one.zero_grad()
    net = copy.deepcopy(plain)
    world = divide_work(plan, here())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    setup = apply_with(net, plan, world, optimizer)
    optimizer.load_state_dict(copy.deepcopy(one.state_dict()))
    plain(samples).square().mean().backward()
    backward(setup, net(samples.chunk(world.size)[world.rank]).square().mean())
    one.step()
    optimizer.step()
    both = zip(net.named_parameters(), plain.parameters(), strict=True)
    return [name for (name, p), own in both if not torch.allclose(full_tensor(p.detach()), own, rtol=1e-10)]


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(shard=2)])
def test_state_of_single_numbers_is_loaded(plan: Plan, pool: Callable[[int], Any]) -> None:
    assert pool(2).run(differing_after_a_load, plan) == [[], []]
