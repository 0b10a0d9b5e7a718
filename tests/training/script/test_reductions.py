"""mw.sum, mw.mean and mw.gather_samples: inside a loop and after it, as on one device. Of training/engine/loops.py
too."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.process.session import end_sessions

F = nn.functional
SHAPES = {"ragged": (11, 4), "fewer samples than ranks": (9, 4), "one batch": (7, 16), "one sample": (1, 4)}
"""Samples, and batch size."""


def loader(samples: int, batch_size: int) -> Any:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, torch.arange(samples), x.argmax(1))
    return DataLoader(data, batch_size=batch_size, shuffle=False)


def inside(samples: int, batch_size: int) -> Any:
    """What a validation loop finds that joins values in it."""
    batches = mw.distribute(loader(samples, batch_size), view="rank")
    losses, tokens, rows, trees, counts = [], [], [], [], 0
    for x, number, y in batches:
        loss = F.cross_entropy(x, y)
        losses += [
            mw.mean(loss.item()),
            float(mw.mean(loss)),
            float(mw.mean(loss.float())),
            *mw.mean(x.mean(0)).tolist(),
        ]
        each = number + 1.0
        tokens.append(mw.mean(((each * x[:, 0]).sum() / each.sum()).item(), weight=each.sum()))
        rows.append(mw.gather_samples(number).tolist())
        tree = mw.gather_samples({"x": x, "right": (x.argmax(1) == y, [number.float()])})
        trees.append((tree["x"], *tree["right"][:1], *tree["right"][1]))
        counts += mw.sum(len(x))
    return losses, rows, trees, counts, tokens


def after(samples: int, batch_size: int) -> Any:
    """The same, joined when the loop is over."""
    batches = mw.distribute(loader(samples, batch_size), view="rank")
    total, count, kept = 0.0, 0, []
    for x, number, y in batches:
        total += F.cross_entropy(x, y, reduction="sum").item()
        count += len(x)
        kept.append((number, x))
    numbers, rows = (torch.cat(part) for part in zip(*kept, strict=True))
    mean = total / max(count, 1)
    return (
        mw.sum(total) / mw.sum(count), mw.mean(mean), mw.mean(mean, weight=count),
        mw.gather_samples(numbers).tolist(), mw.gather_samples((numbers, rows))[1],
    )  # fmt: skip


def everywhere(pool: Any, ranks: int, case: Any, *arguments: Any) -> list[Any]:
    end_sessions()
    return [case(*arguments)] if ranks == 1 else pool(ranks).run(case, *arguments)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_joined_inside_the_loop_are_those_of_plain_torch(shape: str, pool: Any) -> None:
    samples, size = SHAPES[shape]
    batches = list(loader(samples, size))
    losses: list[float] = []
    for x, _, y in batches:
        losses += [F.cross_entropy(x, y).item()] * 3 + x.mean(0).tolist()
    for ranks in (1, 2, 3):
        for got in everywhere(pool, ranks, inside, samples, size):
            assert got[0] == pytest.approx(losses, rel=1e-6), (ranks, shape)
            assert got[0][0::6] == pytest.approx(losses[0::6], rel=1e-12)
            assert got[1] == [number.tolist() for _, number, _ in batches]
            for (x, number, y), tree in zip(batches, got[2], strict=True):
                assert torch.equal(tree[0], x) and torch.equal(tree[1], x.argmax(1) == y)
                assert torch.equal(tree[2], number.float()) and tree[1].dtype == torch.bool
            assert got[3] == samples
            weighed = [((n + 1.0) * x[:, 0]).sum().item() / (n + 1.0).sum().item() for x, n, _ in batches]
            assert got[4] == pytest.approx(weighed, rel=1e-10)


@pytest.mark.parametrize("shape", ["ragged", "one batch"])
def test_values_joined_after_the_loop_are_those_of_plain_torch(shape: str, pool: Any) -> None:
    samples, size = SHAPES[shape]
    x, number, y = next(iter(loader(samples, samples)))
    want = F.cross_entropy(x, y).item()
    for ranks in (1, 2, 3):
        for got in everywhere(pool, ranks, after, samples, size):
            assert got[:3] == pytest.approx((want,) * 3, rel=1e-12), (ranks, shape)
            assert got[3] == number.tolist() and torch.equal(got[4], x)


def test_after_a_loop_with_padding_rows_are_gathered_and_values_are_refused(pool: Any) -> None:
    def case() -> Any:
        kept = [number for _, number, _ in mw.distribute(loader(9, 4), view="rank")]
        said = []
        for verb in (mw.mean, mw.sum):
            try:
                verb(1.0)
            except UsageError as error:
                said.append(str(error))
        return mw.gather_samples(torch.cat(kept)).tolist(), said

    for ranks in (2, 3):
        for rows, said in pool(ranks).run(case):
            assert rows == list(range(9))
            assert [text.split()[0] for text in said] == ["mw.mean", "mw.sum"]
            assert all("inside the loop, on each batch's value" in text for text in said)


def test_a_loop_that_was_left_early_gathers_what_was_kept(pool: Any) -> None:
    def case() -> Any:
        kept = []
        for at, (_, number, _) in enumerate(mw.distribute(loader(11, 4), view="rank")):
            if at == 1:
                break
            kept.append(number)
        return mw.gather_samples(torch.cat(kept)).tolist()

    assert pool(2).run(case) == [[0, 1, 2, 3]] * 2


def test_a_validation_inside_a_training_loop_has_its_own_values_and_training_goes_on(pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(3, 3).double()
        model, optimizer, train, held_out = mw.distribute(
            model, torch.optim.SGD(model.parameters(), 0.1), loader(11, 4), loader(8, 4), view="rank"
        )
        seen = []
        for x, _, y in train:
            with torch.no_grad():
                total = count = 0
                for rows, _, _labels in held_out:
                    total, count = total + float((model(rows) ** 2).sum()), count + 3 * len(rows)
                seen.append(mw.mean(total / count))
            loss = F.cross_entropy(model(x), y)
            seen += [mw.backward(loss).item(), mw.mean(loss.item())]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    want, *results = [*everywhere(pool, 1, case), *everywhere(pool, 2, case), *everywhere(pool, 3, case)]
    for got in results:
        assert got == pytest.approx(want, rel=1e-10)


def test_values_of_no_loop_are_joined_rank_by_rank(pool: Any) -> None:
    def case() -> Any:
        rows = torch.full((mw.rank() + 1,), mw.rank())
        return mw.mean(float(mw.rank())), mw.sum(1), mw.gather_samples(rows).tolist()

    assert pool(2).run(case) == [(0.5, 2, [0, 1, 1])] * 2


WRONG = {
    "numbers": (lambda x: x.flatten().tolist(), "but found float. Use torch.as_tensor(values)"),
    "nothing": (lambda x: [], "no tensor"),
    "another number of rows": (lambda x: x[:-1], "a rank's rows are not its samples"),
    "a scalar": (lambda x: x.sum(), "rows are not its samples"),
    "other columns": (lambda x: x[:, : 1 + mw.rank()], "do not fit together (rank 0: (2, 1); rank 1: (2, 2))"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_gathered_is_refused_on_every_rank(name: str, pool: Any) -> None:
    make, words = WRONG[name]

    def case() -> str:
        for x, _, _ in mw.distribute(loader(8, 4), view="rank"):
            try:
                mw.gather_samples(make(x))
            except UsageError as error:
                return str(error)
        return ""

    end_sessions()
    if name != "other columns":
        assert re.search(re.escape(words), case())
    assert all(words in said for said in pool(2).run(case))


def test_on_one_device_without_a_loop_values_are_themselves() -> None:
    assert (mw.mean(2.0), mw.sum(3), mw.gather_samples(torch.arange(2)).tolist()) == (2.0, 3, [0, 1])


def two_loops(first: int, second: int) -> list[Any]:
    """Loaders in a list, so that nothing is known where they are distributed; batches of 4, and of 3."""
    return list(mw.distribute(loader(first, 4), loader(second, 3), view="rank"))


def summed_of(batches: Any) -> tuple[float, int]:
    total, count = 0.0, 0
    for x, _, _ in batches:
        total += x.sum().item()
        count += len(x)
    return total, count


def joined_of(batches: Any) -> float:
    total = 0.0
    for x, _, _ in batches:
        total += x.sum().item()
    total = mw.sum(total)
    return total


def joined_in_time() -> list[float]:
    """What is joined in the padded loop, or of another one, is right."""
    loops = two_loops(9, 12)
    seen, total = 0, 0.0
    for x, _, _ in loops[0]:
        seen += mw.sum(len(x))
        total += x.sum().item()
    total, of_second = 0.0, 0.0
    for x, _, _ in loops[1]:
        of_second += x.sum().item()
        total += x.abs().sum().item()
    found = [seen, mw.sum(of_second), mw.sum(total), joined_of(loops[1])]
    again, count = summed_of(loops[1])
    return [*found, mw.sum(again) / mw.sum(count)]


def test_values_of_several_loops_are_those_of_one_device(pool: Any) -> None:
    want = joined_in_time()
    end_sessions()
    for got in pool(2).run(joined_in_time):
        assert got == pytest.approx(want, rel=1e-12)
