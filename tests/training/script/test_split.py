"""`mw.split` in the view by rank: a program without a loader is that of one device.

training/engine/seeds.py is tested here too. Of the whole view: tests/checker/test_scripts_that_split.py.
"""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.training.process.session import end_sessions


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def both(case: Any, size: int, pool: Any) -> tuple[Any, list[Any]]:
    """What `case` gives on one device, here, and on `size` ranks."""
    end_sessions()
    want = case()
    end_sessions()
    return want, pool(size).run(case)


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def in_turn() -> Any:
    """Batches drawn in the loop, in turn with a token mean, an accumulated one and an evaluation."""
    torch.manual_seed(1)
    data = torch.randn(50, 6, dtype=torch.float64)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = mw.distribute(model, optimizer, view="rank")
    seen, losses, sums = [], [], []
    for size in (8, 7, 2, 5):
        rows = torch.randint(50, (size,))
        seen += rows.tolist()
        batch = mw.split({"x": data[rows], "y": [(data[rows].sum(1) > 0).long(), None]})
        weight = float(len(batch["x"])) if size == 5 else None
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"][0])
        if size == 7:
            with mw.accumulate():
                losses.append(float(mw.backward(loss)))
        else:
            losses.append(float(mw.backward(loss, weight=weight)))
            optimizer.step()
            optimizer.zero_grad()
        x = mw.split(data[rows])
        sums.append((mw.sum(float(x.sum())), mw.sum(len(x)), mw.sum(x.sum(0))))
    return seen, losses, sums, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_losses_sums_weights_and_statistics_are_those_of_one_device(size: int, pool: Any) -> None:
    want, results = both(in_turn, size, pool)
    for got in results:
        same(got, want)


def drawn() -> Any:
    """What a program with dropout draws, with torch, Python and numpy."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    model = mw.distribute(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1)), view="rank")
    numbers = []
    for _ in range(3):
        x = torch.rand(5, 6)
        numbers.append((x.tolist(), float(torch.rand(())), random.random(), numpy.random.rand()))
        mw.backward(model(mw.split(x)).mean())
    return numbers


def test_outside_the_model_every_rank_draws_what_one_device_draws(pool: Any) -> None:
    want, results = both(drawn, 2, pool)
    assert results == [want, want]


def masks() -> Any:
    """What dropout leaves of ones, of a batch and of the next."""
    torch.manual_seed(1)
    model = mw.distribute(Doubled(), view="rank")
    return [model(mw.split(torch.ones(8, 64))) for _ in range(2)]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5).detach()


def test_dropout_is_keyed_by_batch_and_rank(pool: Any) -> None:
    want, (first, second) = both(masks, 2, pool)
    assert torch.equal(first[0], want[0][:4]) and not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])


def test_a_batch_without_rows_is_refused_by_rank(pool: Any) -> None:
    def case() -> str:
        mw.distribute(nn.Linear(2, 1), view="rank")
        with pytest.raises(mw.UsageError) as refused:
            mw.split(torch.ones(4, 2), whole=True)
        return str(refused.value)

    assert all("without view=" in text for text in pool(2).run(case))


def test_a_sum_after_a_loop_and_a_split_is_of_the_split_batch(pool: Any) -> None:
    def case() -> int:
        for _ in mw.distribute(DataLoader(TensorDataset(torch.ones(6, 2)), 1), view="rank"):
            pass
        return mw.sum(len(mw.split(torch.ones(5, 2))))

    assert pool(2).run(case) == [5, 5]


def test_numbers_that_nobody_seeded_are_those_of_rank_0(pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(mw.rank())
        random.seed(mw.rank())
        numpy.random.seed(mw.rank())
        mw.distribute(nn.Linear(1, 1), view="rank")
        return float(torch.rand(())), random.random(), numpy.random.rand()

    first, second = pool(2).run(case)
    assert first == second


def test_a_model_that_is_split_for_can_be_copied_and_pickled() -> None:
    model = mw.distribute(nn.Sequential(nn.Dropout(0.5)), view="rank")
    mw.split(torch.ones(4, 3))
    state = torch.get_rng_state()
    model(torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), state)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(torch.ones(4, 3)).shape == (4, 3)


def test_one_device_gets_its_own_objects_back() -> None:
    x, y = torch.ones(4, 3), numpy.ones(4)
    assert mw.split(x) is x and mw.split(x, y)[1] is y


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.ones(4), torch.ones(3)), "that have the same number of rows"),
        ((torch.ones(0, 2),), "at least one"),
        ((torch.ones(4), ["a", "b"]), "str, str"),
        ((torch.ones(4), object()), "whole=True"),
        ((torch.tensor(1.0),), "that have the same number of rows"),
        ((nn.utils.rnn.pack_sequence([torch.ones(2)]),), "PackedSequence"),
        ((), "has none"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(mw.UsageError, match=said):
        mw.split(*batch)


def test_a_dimension_can_be_named(pool: Any) -> None:
    def case() -> Any:
        mw.distribute(nn.Linear(1, 1), view="rank")
        x, y, number = mw.split(torch.arange(6).view(2, 3), numpy.arange(3).reshape(1, 3), torch.tensor(7), dim=1)
        return x.tolist(), y.tolist(), int(number)

    assert pool(2).run(case) == [([[0, 1], [3, 4]], [[0, 1]], 7), ([[2], [5]], [[2]], 7)]
