"""A layer that is made inside a forward of a distributed model is refused where each rank has drawn its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.process.session import default_engine
from tests.pool import CaseFailed


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 2), between
        self.head: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self, torch.relu(self.first(x))))
        return result


def lazily(net: Net, hidden: Tensor) -> Tensor:
    if net.head is None:
        net.head = nn.Linear(4, 4)  # here
    result: Tensor = net.head(hidden)
    return result


def each_time(net: Net, hidden: Tensor) -> Tensor:
    result: Tensor = nn.Linear(4, 4)(hidden)
    return result


def a_norm(net: Net, hidden: Tensor) -> Tensor:
    result: Tensor = nn.LayerNorm(4)(hidden)
    return result


def from_a_seed(net: Net, hidden: Tensor) -> Tensor:
    made = nn.Linear(4, 4)
    nn.init.eye_(made.weight)
    nn.init.zeros_(made.bias)
    result: Tensor = made(hidden)
    return result


def train(between: Callable[[Any, Tensor], Tensor], before: bool = False) -> list[str]:
    torch.manual_seed(0)
    model: Any = Net(between)
    if before:
        model(torch.randn(2, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 4)), 4)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for (x,) in loader:
        mw.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if mw.is_main():  # what one rank makes beside its model
            nn.Linear(4, 4)
    return default_engine().notes


class Recurrent(nn.Module):
    """Its layer has a `__setattr__` of its own, by which torch puts in and takes away what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(x)[0][:, -1])
        return result


def train_recurrent(plan: mw.Plan) -> list[float]:
    torch.manual_seed(0)
    model: Any = Recurrent().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 5, 4, dtype=torch.float64)), 4)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    losses = []
    for (x,) in loader:
        losses.append(float(mw.backward(model(x).square().mean())))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("between", [lazily, each_time])
def test_it_is_refused_with_its_line(between: Any, pool: Any) -> None:
    message = (
        r"test_made_in_forward\.py:\d+: this creates a Linear inside a forward. Every rank has drawn its own weight, so"
    )
    with pytest.raises(CaseFailed, match=message):
        pool(2).run(train, between)


@pytest.mark.parametrize("between, before", [(a_norm, False), (from_a_seed, False), (lazily, True)])
def test_what_is_made_alike_or_before_is_no_alarm(between: Any, before: bool, pool: Any) -> None:
    assert pool(2).run(train, between, before) == [[], []]


def test_what_shard_puts_into_a_recurrent_layer_is_not_made_there(pool: Any) -> None:
    """It was read once its memory had been freed: SIGSEGV."""
    (one,) = pool(1).run(train_recurrent, mw.Plan())
    for losses in pool(2).run(train_recurrent, mw.Plan(shard=2)):
        assert losses == pytest.approx(one, rel=1e-12)
