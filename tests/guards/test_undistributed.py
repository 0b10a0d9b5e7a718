"""A loader that was not given to mw.distribute and is counted with mw.sum is said, with its line; what a program shares
out itself, or every rank may read whole, is left alone.

Each case is a small program on two devices. Of a mistake, the loop that must be named is marked `# here`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

import meshwise as mw
from meshwise.process.session import default_engine, end_sessions
from meshwise.spec.errors import UsageError

Case = Callable[["Program"], object]
MISTAKES: list[Case] = []
RIGHT: list[Case] = []


class Program:
    """What a small program has before its loops: `held_out` was forgotten."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(24, 6)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        self.model: Any = nn.Linear(6, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.1)
        self.loader: Any = DataLoader(self.data, batch_size=8, shuffle=True)
        self.held_out = DataLoader(self.data, batch_size=6)
        self.model, self.optimizer, self.loader = mw.distribute(self.model, self.optimizer, self.loader, view="rank")

    def right(self, x: Tensor, y: Tensor) -> int:
        return int((self.model(x).argmax(1) == y).sum())

    def train(self) -> int:
        right = 0
        for x, y in self.loader:
            right += self.right(x, y)
            mw.backward(F.cross_entropy(self.model(x), y))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return right


def mistake(case: Case) -> Case:
    MISTAKES.append(case)
    return case


def right(case: Case) -> Case:
    RIGHT.append(case)
    return case


@mistake
def correct_answers_of_the_data_set(p: Program) -> None:
    for _ in range(2):
        p.train()
        correct = 0
        for x, y in p.held_out:  # here
            correct += p.right(x, y)
        print(mw.sum(correct) / len(p.data))


@mistake
def a_loss_that_is_added_up_in_the_loop(p: Program) -> None:
    p.train()
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in p.held_out:  # here
            total += mw.sum(F.cross_entropy(p.model(x), y, reduction="sum"))


@mistake
def predictions_that_are_gathered(p: Program) -> None:
    mw.gather_samples(torch.cat([p.model(x) for x, _ in p.held_out]))  # here


@mistake
def before_the_first_training(p: Program) -> None:
    def evaluate(loader: Any) -> int:
        return sum(p.right(x, y) for x, y in loader)  # here

    mw.sum(torch.tensor([evaluate(p.held_out), len(p.data)]))
    p.train()


@mistake
def shuffled_in_an_epoch_of_the_training(p: Program) -> None:
    shuffled = DataLoader(p.data, batch_size=4, shuffle=True)
    for x, y in p.loader:
        mw.backward(F.cross_entropy(p.model(x), y))
        correct = sum(p.right(v, w) for v, w in shuffled)  # here
        mw.sum(correct)


@right
def a_mean_of_what_is_the_same_on_every_rank(p: Program) -> None:
    p.train()
    losses = [F.cross_entropy(p.model(x), y).item() for x, y in p.held_out]
    assert mw.mean(sum(losses) / len(losses)) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@right
def read_by_every_rank_and_not_added_up(p: Program) -> None:
    correct = mw.sum(p.train())
    print(correct, sum(p.right(x, y) for x, y in p.held_out))


@right
def a_figure_of_training_is_added_up_after_it(p: Program) -> None:
    correct = p.train()
    whole = sum(p.right(x, y) for x, y in p.held_out)
    print(mw.sum(correct + mw.rank()), whole)


@right
def seconds_are_added_up_after_it(p: Program) -> None:
    began = time.perf_counter()
    for x, _ in p.held_out:
        p.model(x)
    mw.sum(time.perf_counter() - began + mw.rank())


@right
def shared_out_by_a_sampler(p: Program) -> None:
    p.train()
    sampler = DistributedSampler(p.data, 2, mw.rank(), shuffle=False)
    total = sum(len(x) for x, _ in DataLoader(p.data, batch_size=6, sampler=sampler))
    assert mw.sum(total) == 24


@right
def shared_out_by_its_indices(p: Program) -> None:
    mine = Subset(p.data, range(mw.rank(), 24, 2))
    total = sum(len(x) for x, _ in DataLoader(mine, batch_size=6))
    assert mw.sum(total) == 24


@right
def a_stream_that_splits_itself(p: Program) -> None:
    class Mine(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([p.data[i] for i in range(mw.rank(), 24, 2)])

    assert mw.sum(sum(len(x) for x, _ in DataLoader(Mine(), batch_size=4))) == 24


@right
def read_ahead_by_a_thread(p: Program) -> None:
    total = 0
    for x, _ in p.loader:
        total += len(x)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: [len(x) for x, _ in p.held_out]).result()
    assert mw.sum(total) == 24


@right
def split_by_the_program(p: Program) -> None:
    total = 0
    for x, y in p.held_out:
        x, y = mw.split(x, y)
        mw.backward(F.cross_entropy(p.model(x), y))
        p.optimizer.step()
        p.optimizer.zero_grad()
        total += len(x)
    assert mw.sum(total) == 24


@right
def the_same_loader_distributed(p: Program) -> None:
    p.held_out = mw.distribute(p.held_out, view="rank")
    assert mw.sum(sum(len(x) for x, _ in p.held_out)) == 24


def said(case: Case, folder: Path) -> list[str]:
    """What is said of the loops of a program, to its end."""
    end_sessions()
    program = Program()
    engine = default_engine()
    with contextlib.chdir(folder):
        case(program)
    end_sessions()
    return [text for text in engine.notify.all if "not passed to mw.distribute" in text]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.__name__)
def test_is_said_once_with_its_line(case: Case, pool: Any, tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(case)
    line = first + next(number for number, text in enumerate(lines) if text.endswith("# here\n"))
    for notes in pool(2).run(said, case, tmp_path):
        (text,) = notes
        assert f"test_undistributed.py:{line}: this loop reads a DataLoader that was not passed to mw." in text
        assert 'counts the data 2 times. Write loader = mw.distribute(loader)' in text


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_is_not_said(case: Case, pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(said, case, tmp_path) == [[], []]


def test_after_training_with_padding_the_refusal_names_the_loop(pool: Any) -> None:
    def case() -> Any:
        p = Program()
        p.loader = mw.distribute(DataLoader(p.data, batch_size=23), view="rank")
        found = []
        for verb in (mw.sum, lambda value: mw.gather_samples(torch.zeros(value))):
            p.train()
            total = sum(len(x) for x, _ in p.held_out)
            with pytest.raises(UsageError, match=r"of the loop at .*test_undistributed.py:\d+, pass its loader to mw"):
                verb(total)
            found.append(total)
        return found

    assert pool(2).run(case) == [[24, 24]] * 2


def test_on_one_device_every_loader_is_read_once(tmp_path: Path) -> None:
    assert said(correct_answers_of_the_data_set, tmp_path) == []
