"""Methods of a model that call parts of it, called by the program: they run as the model's forward does.

Tests torch_compat/modules.py, parallel/shard.py and parallel/tensor.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
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
    Plan(tensor=2),
    pytest.param(Plan(data=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(Plan(shard=2, tensor=2), marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Coded:
    """What `encode` of a variational autoencoder gives: no tensor, and no tree of tensors."""

    mean: Tensor
    scale: Tensor


class Autoencoder(nn.Module):
    """Used by its methods; the forward is there, as diffusers and stable-baselines3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        self.up = nn.Linear(64, 8)
        self.scale = nn.Parameter(torch.full((64,), 0.5))

    def encode(self, x: Tensor) -> Coded:
        found = self.down(x).tanh()
        return Coded(found, found * self.scale)

    def decode(self, coded: Coded) -> Tensor:
        found: Tensor = self.up(coded.mean + coded.scale)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def by_methods(net: Any, x: Tensor) -> Tensor:
    coded = net.encode(x)
    loss: Tensor = net.decode(coded).square().mean() + coded.scale.square().mean()
    return loss


def nothing_that_a_backward_finds(net: Any, x: Tensor) -> Tensor:
    """What a method has given is no tensor."""
    loss: Tensor = net.encode(x).scale.square().mean()
    return loss


def after_one_without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        coded = net.encode(x)
    loss: Tensor = net.decode(Coded(coded.mean, x)).square().mean()
    return loss


def forward_too(net: Any, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean() + by_methods(net, x.cos())
    return loss


LOSSES = [by_methods, nothing_that_a_backward_finds, after_one_without_gradient, forward_too]


def differing(plan: Plan, loss: Callable[[Any, Tensor], Tensor]) -> list[str]:
    """The parameters that are not what one device has after two steps."""
    torch.manual_seed(0)
    plain = Autoencoder().double()
    net = copy.deepcopy(plain)
    world = divide_work(plan, here())
    setup = apply_with(net, plan, world)
    samples = torch.arange(512.0, dtype=torch.float64).view(8, 64).sin()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, net)]
    for _ in range(2):
        loss(plain, samples).backward()
        backward(setup, loss(net, samples.chunk(world.size)[world.rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both = zip(net.named_parameters(), plain.parameters(), strict=True)
    return [name for (name, p), own in both if not torch.allclose(full_tensor(p.detach()), own, rtol=1e-12)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_method_that_calls_layers_runs_as_the_forward_does(
    plan: Plan, loss: Callable[[Any, Tensor], Tensor], pool: Callable[[int], Any]
) -> None:
    assert pool(plan.devices).run(differing, plan, loss) == [[]] * plan.devices
