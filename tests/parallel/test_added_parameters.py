"""Parameters that are added to one another under tensor, such as a class token and positions: each has a gradient of
its own, also where a batch has one row, for which autograd gives both the same memory. Of parallel/tensor.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.mesh import divide_work
from meshwise.spec.plan import Plan
from meshwise.transfer.sharded import full_tensor
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_apply import here


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 4, 8))
        self.more = nn.Parameter(torch.zeros(1, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions + self.more
        found: Tensor = self.layers(x)
        return found


def gradients_that_differ() -> list[str]:
    torch.manual_seed(0)
    plain = Marked().double()
    net = copy.deepcopy(plain)
    setup = apply_with(net, Plan(tensor=2), divide_work(Plan(tensor=2), here()))
    x = torch.arange(24, dtype=torch.float64).view(1, 3, 8).sin()
    for number in range(2):
        plain(x).square().mean().backward()
        backward(setup, net(x).square().mean(), reduce=number == 1)
    with torch.no_grad():
        for p in (*plain.parameters(), *net.parameters()):
            assert p.grad is not None
            p.grad.mul_(0.5)
    pairs = zip(net.named_parameters(), plain.parameters(), strict=True)
    return [name for (name, p), own in pairs if not torch.allclose(full_tensor(p.grad), own.grad, rtol=1e-10)]  # type: ignore[arg-type]


def test_each_has_a_gradient_of_its_own(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(gradients_that_differ) == [[], []]
