"""`mw.split`: a program without a loader is that of one device, and ranks that pass different batches stop.

engine/model_stream.py is tested here too.
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

import meshwise as mw
from meshwise.process.session import default_engine, end_sessions


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
    """What dropout leaves of ones: of a batch, of it again, of the next; of a full batch that nothing is drawn for."""
    torch.manual_seed(1)
    model = mw.distribute(Doubled(), view="rank")
    return [model(mw.split(torch.ones(8, 64))) for _ in range(2)] + [model(mw.split(torch.ones(8, 64), whole=True))]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5).detach()


def test_dropout_is_keyed_by_batch_and_rank_and_by_batch_alone_where_all_run_the_whole(pool: Any) -> None:
    want, (first, second) = both(masks, 2, pool)
    assert torch.equal(first[0], want[0][:4]) and not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[2], second[2]) and torch.equal(first[2], want[2])


def test_a_whole_batch_has_the_gradients_and_sums_of_one_device_and_says_that_nothing_is_faster(pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(1)
        x, model = torch.randn(7, 6, dtype=torch.float64), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mw.distribute(model, optimizer, view="rank")
        losses = []
        for _ in range(2):
            graph = mw.split({"x": x, "edges": [(0, 1)], "name": "a"}, whole=True)
            losses.append(mw.backward(nn.functional.cross_entropy(model(graph["x"]), torch.arange(7) % 2)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, mw.sum(7), model.state_dict(), len(default_engine().notes)

    want, results = both(case, 2, pool)
    for got in results:
        same(got[:3], want[:3])
        assert got[3] == want[3] + 1


def refused(case: Any, *given: Any) -> str:
    """What every rank is told that runs `case`, where all are stopped alike."""
    try:
        case(*given)
    except mw.UsageError as error:
        return str(error)
    raise AssertionError("was not stopped")


def different(verb: str) -> None:
    """One element of the third batch differs."""
    model = mw.distribute(nn.Linear(6, 1), view="rank")
    for number in range(3):
        x = torch.ones(8, 6)
        x[5, 3] += 0.001 * mw.rank() * (number == 2)
        part = mw.split(x)
        if verb == "sum":
            mw.sum(len(part))
        else:
            mw.backward(model(part).mean(), weight=None if verb == "backward" else len(part))


def other_shapes() -> None:
    model = mw.distribute(nn.Linear(6, 1), view="rank")
    mw.backward(model(mw.split(torch.ones(8 - mw.rank(), 6))).mean())


def two_batches() -> None:
    model = mw.distribute(nn.Linear(2, 1), view="rank")
    x, z = mw.split(torch.ones(7, 2)), mw.split(torch.ones(5, 2))
    mw.backward(model(x).mean(), weight=len(x))
    x, z = mw.split(torch.ones(8, 2)), mw.split(torch.ones(4, 2))
    mw.backward(model(x).mean() + model(z).mean())
    x, z = mw.split(torch.ones(7, 2)), mw.split(torch.ones(5, 2))
    mw.backward(model(x).mean() + model(z).mean())


def sums_of_several() -> None:
    mw.distribute(nn.Linear(2, 1), view="rank")
    total = 0
    for size in (4, 1):
        total += len(mw.split(torch.ones(size, 2)))
    mw.sum(total)


@pytest.mark.parametrize("verb", ["backward", "weighed", "sum"])
def test_ranks_that_hold_different_batches_stop_with_the_line(verb: str, pool: Any) -> None:
    first, second = pool(2).run(refused, different, verb)
    assert first == second
    assert "test_split_batch.py:" in first and "pass different batches" in first


def test_batches_of_other_shapes_are_told(pool: Any) -> None:
    assert "rank 0: float32 (8, 6); rank 1: float32 (7, 6)" in pool(2).run(refused, other_shapes)[0]


def test_a_loss_of_two_batches_with_other_shares_is_refused_unless_it_says_its_weight(pool: Any) -> None:
    assert all("batches of 7 and 5 samples" in text for text in pool(2).run(refused, two_batches))


def test_a_sum_of_several_batches_of_which_one_was_padding_is_refused(pool: Any) -> None:
    assert all("after each mw.split" in text for text in pool(2).run(refused, sums_of_several))


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
        ((torch.ones(4), torch.ones(3)), "must have the same number of rows"),
        ((torch.ones(0, 2),), "at least one"),
        ((torch.ones(4), ["a", "b"]), "contains a str"),
        ((torch.ones(4), object()), "whole=True"),
        ((torch.tensor(1.0),), "must have the same number of rows"),
        ((nn.utils.rnn.pack_sequence([torch.ones(2)]),), "PackedSequence"),
        ((), "without a batch"),
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
