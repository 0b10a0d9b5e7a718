"""Batches of two loaders: weighted right where the ranks' shares are alike, refused in one loss where they are not.

Of training/engine/loops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.process.session import end_sessions

F = nn.functional


def loader(samples: int, size: int, seed: int) -> Any:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=size)


def train(first: tuple[int, int], second: tuple[int, int], form: str) -> Any:
    """SGD on labelled and other batches. Gives the parameters, or what was said and after how many steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 3).double()
    model, optimizer, labelled, others = mw.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), loader(*first, 1), loader(*second, 2), view="rank"
    )
    steps, other = 0, iter(others)
    try:
        for x, y in labelled:
            if form == "each by itself":
                with mw.accumulate():
                    mw.backward(F.cross_entropy(model(x), y))
                u, v = next(other)
                mw.backward(F.mse_loss(model(u), u))
            elif form.startswith("each with its weight"):
                u, v = next(other)
                with mw.accumulate():
                    mw.backward(F.mse_loss(model(u), u), weight=len(u))
                mw.backward(F.cross_entropy(model(x), y), weight=None if form.endswith("but one") else len(x))
            else:
                u, v = next(other)
                if form == "sum":
                    mw.backward(
                        F.cross_entropy(model(x), y, reduction="sum") + (model(u) - u).square().sum(), None, "sum"
                    )
                elif form == "mean":
                    mw.mean(F.cross_entropy(model(x), y).item())
                else:
                    mw.backward(F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except UsageError as error:
        return steps, str(error)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def equal(pool: Any, *arguments: Any) -> None:
    end_sessions()
    want = train(*arguments)
    for ranks in (2, 3):
        for got in pool(ranks).run(train, *arguments):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_equal_shares_are_one_device(pool: Any) -> None:
    equal(pool, (14, 6), (14, 6), "one loss")  # the last batches have 2 samples each, which not all ranks have
    equal(pool, (24, 6), (48, 12), "one loss")


def test_each_loss_before_the_next_loader_gives_its_batch_is_one_device(pool: Any) -> None:
    equal(pool, (15, 5), (21, 7), "each by itself")


def test_each_loss_with_its_weight_is_one_device(pool: Any) -> None:
    equal(pool, (15, 5), (21, 7), "each with its weight")
    for steps, said in pool(2).run(train, (15, 5), (21, 7), "each with its weight, but one"):
        assert steps == 0 and "mw.backward: batches of 5 and 7 samples" in said


def test_batches_of_which_other_ranks_have_padding_are_refused_even_with_weights(pool: Any) -> None:
    for steps, said in pool(3).run(train, (1, 2), (2, 2), "each with its weight"):
        assert steps == 0 and "for each batch's own value, before the next one comes" in said


def test_sums_need_no_shares(pool: Any) -> None:
    equal(pool, (15, 5), (21, 7), "sum")


def test_unequal_shares_in_one_loss_or_mean_are_refused_with_the_line(pool: Any) -> None:
    for form, verb in (("one loss", "mw.backward"), ("mean", "mw.mean")):
        for steps, said in pool(2).run(train, (12, 4), (15, 5), form):
            assert steps == 0 and f"{verb}: batches of 4 and 5 samples" in said
            assert (
                "test_two_loaders.py:" in said and f"Call {verb} for each batch's" in said and "weight=len(x)" in said
            )
    for steps, _ in pool(2).run(train, (11, 4), (12, 4), "one loss"):  # the last batches alone differ
        assert steps == 2


def read_ahead(weighed: bool, samples: int, steps: int = 2) -> Any:
    """SGD over windows of two batches of 8 that are read before the first is trained on."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 3).double()
    model, optimizer, batches = mw.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), loader(samples, 8, 1), view="rank"
    )
    done = 0
    try:
        for _ in range(steps):
            loop = iter(batches)
            for _ in range(len(batches) // 2):
                window = [next(loop), next(loop)]
                for x, y in window:
                    with mw.accumulate():
                        mw.backward(F.cross_entropy(model(x), y) / 2, weight=len(x) if weighed else None)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    except UsageError as error:
        return done, str(error)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_batches_read_ahead_are_one_device_or_refused_where_their_shares_differ(pool: Any) -> None:
    for weighed, samples in ((True, 29), (False, 32)):
        end_sessions()
        want = read_ahead(weighed, samples)
        for got in pool(3 if weighed else 2).run(read_ahead, weighed, samples):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for done, said in pool(2).run(read_ahead, False, 29):
        assert done == 1 and "mw.backward: batches of 8 and 5 samples" in said
        assert "for each batch's own value" in said and "weight=len(x)" in said
    for done, said in pool(3).run(read_ahead, True, 26):  # of the last batch one rank has padding
        assert done == 1 and "before the next one comes" in said
