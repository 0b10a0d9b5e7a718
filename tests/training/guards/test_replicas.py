"""What parts replicas is noticed: noise on gradients; an optimizer's own noise is alike.

Of the draws of an optimizer's step (training/engine/seeds.py) and of training/guards/replicas.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import meshwise as mw
from meshwise.spec.errors import DataError, UsageError
from meshwise.torch_compat.loaders import fingerprint
from meshwise.training.guards.replicas import PARAMETERS, diverged
from meshwise.training.process.session import default_engine, end_sessions
from tests.pool import CaseFailed

F = nn.functional


class Sgld(torch.optim.SGD):
    """Adds noise to what it steps."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.add_(torch.randn_like(p), alpha=1e-2)
        return super().step(closure)


def train(kind: str) -> tuple[str, list[str], list[Tensor]]:
    """What was raised and said, and the parameters, after two epochs of three batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)).double()
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).double()
    optimizer = (Sgld if kind == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.argmax(1) % 2), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    raised = ""
    try:
        for a, b in (pair for _ in range(2) for pair in loader):
            mw.backward(F.cross_entropy(model(a), b))
            for p in model.parameters() if kind == "gradients" else ():
                assert p.grad is not None
                p.grad.add_(torch.randn_like(p), alpha=0.1)
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        raised = str(error)
    said = list(default_engine().notes)
    end_sessions()
    return raised, said, [p.detach() for p in model.parameters()]


def cases() -> dict[str, Any]:
    return {kind: train(kind) for kind in ("optimizer", "gradients")}


@pytest.fixture(scope="module")
def ranks(pool: Any) -> Any:
    return pool(2).run(cases)


def test_noise_on_gradients_of_each_rank_alone_ends_the_run(ranks: Any) -> None:
    for rank in ranks:
        raised = rank["gradients"][0]
        assert "test_replicas.py:" in raised and "the ranks' parameters have diverged" in raised


def test_what_an_optimizer_draws_is_that_of_one_device(ranks: Any) -> None:
    alone = train("optimizer")
    for rank in ranks:
        raised, said, parameters = rank["optimizer"]
        assert raised == "" and said == []
        torch.testing.assert_close(parameters, alone[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "is_told"),
    [
        (1.0, math.nan, True),
        (math.nan, 1.0, True),
        (math.inf, 1.0, True),
        (math.nan, math.nan, False),
        (1.0, 1 + 1e-9, False),
    ],
)
def test_a_rank_that_alone_came_to_no_number_is_told(rank_0: float, rank_1: float, is_told: bool) -> None:
    ranks = [((PARAMETERS, "", value),) for value in (rank_0, rank_1)]
    assert bool(diverged(ranks)) == is_told


def other_data() -> list[str]:
    said = []
    every = TensorDataset(torch.arange(8.0))
    ready: Any = TensorDataset(torch.arange(4.0))
    ready._fingerprint = str(mw.rank())
    assert [fingerprint(data) for data in (every, ready)] == [None, str(mw.rank())]
    mine = range(mw.rank() * 4, mw.rank() * 4 + 4)
    for data in (Subset(every, list(mine)), Subset(every, range(3 + mw.rank())), ready):
        with pytest.raises(DataError) as refused:
            mw.distribute(DataLoader(data, batch_size=2), view="rank")
        said.append(str(refused.value))
    return said


def test_data_that_was_split_by_rank_already_is_refused(pool: Any) -> None:
    for equal, unequal, of_others in pool(2).run(other_data):
        assert "rank 1 has other values than rank 0 in Subset.indices (4 rows)" in equal
        assert "the ranks pass different data sets" in of_others
        assert "(rank 0: 3, rank 1: 4 samples)" in unequal


def train_by_hand(by_data: bool) -> list[str]:
    end_sessions()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model, loader = mw.distribute(nn.Linear(4, 2), DataLoader(TensorDataset(x), 4), view="rank")
    for (rows,) in loader:
        model(rows).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if by_data:
                    p.data -= 0.1 * p.grad
                else:
                    p -= 0.1 * p.grad
                    p.grad = None
    said = list(default_engine().notes)
    end_sessions()
    return said


@pytest.mark.parametrize("by_data", [False, True])
def test_an_update_by_hand_of_a_ranks_own_gradients_is_said(by_data: bool, pool: Any) -> None:
    for (said,) in pool(2).run(train_by_hand, by_data):
        assert "test_replicas.py:" in said and "mw.backward(loss) instead of loss.backward()" in said


class Lazy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head: nn.Module = getattr(self, "head", None) or nn.Linear(2, 2)
        return self.head(super().forward(x))


def train_lazily() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    model, loader = mw.distribute(Lazy(4, 2), DataLoader(TensorDataset(x), 4), view="rank")
    for (rows,) in loader:
        mw.backward(model(rows).square().mean())


def test_a_layer_that_a_forward_makes_on_each_rank_is_refused(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"parameters have diverged: .* or a forward that creates parameters"):
        pool(2).run(train_lazily)
