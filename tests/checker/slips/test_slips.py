"""Mistakes of the per-rank view that the source shows are said with their line; the right way to write it is not.

Of checker/per_rank.py, training/slips/user_source.py, and of batch sizes in training/slips/in_a_run.py. No case is run:
this file is read. The line that must be named is marked `# here`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.checker.per_rank import slips_in
from meshwise.training.slips.in_a_run import says_divided

Case = Callable[["Program"], Any]
MISTAKES: list[tuple[Case, str]] = []
RIGHT: list[Case] = []
DIVIDED = "batch_size is {} divided by the number of ranks"
OWN = "loss is the loss of this rank's own samples here. Write loss = mw.backward(loss)"


class Program:
    """What a small program has before its loops."""

    data: Any
    model: Any
    optimizer: Any
    loader: Any

    def right(self, x: Tensor, y: Tensor) -> int:
        return int((self.model(x).argmax(1) == y).sum())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def mistake(text: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        MISTAKES.append((case, text))
        return case

    return add


def right(case: Case) -> Case:
    RIGHT.append(case)
    return case


# The loss of this rank's samples, where that of the batch was given back and dropped.


@mistake(OWN)
def a_loss_that_is_printed(p: Program) -> None:
    for step, (x, y) in enumerate(p.loader):
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        if step % 2 == 0:
            print(f"step {step}, loss {loss.item():.4f}")  # here


@mistake(OWN)
def a_loss_that_ends_the_loop(p: Program) -> None:
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        if loss.item() < 0:  # here
            break


@mistake(OWN)
def a_loss_that_is_shown_by_a_bar(p: Program) -> None:
    bar = SimpleNamespace(set_postfix=lambda **values: None)
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        bar.set_postfix(loss=loss.item())  # here


@mistake("Write loss = mw.backward(loss / 2, weight=len(x)) * 2")
def a_loss_that_is_divided_and_has_a_weight(p: Program) -> None:
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss / 2, weight=len(x))
        p.step()
        print(f"loss {loss.item():.4f}")  # here


@right
def the_loss_that_is_given_back(p: Program) -> None:
    total = 0.0
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        loss = mw.backward(loss)
        p.step()
        total += loss.item()
        print(f"loss {loss.item():.4f}, so far {total}")
        if loss.item() < 0:
            break


@right
def the_loss_that_is_given_back_and_multiplied_again(p: Program) -> None:
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        loss = mw.backward(loss / 2, weight=len(x)) * 2
        p.step()
        print(f"loss {loss.item():.4f}")


@right
def a_loss_that_is_joined_over_the_ranks(p: Program) -> None:
    total, losses = 0.0, []
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        total += loss.item() * len(x)
        losses.append(loss.item())
        print(mw.mean(loss.item(), weight=len(x)))
    print(mw.sum(total) / len(p.data), mw.mean(sum(losses)))


@right
def a_loss_that_each_rank_prints_as_its_own(p: Program) -> None:
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        print(f"rank {mw.rank()}: {loss.item():.4f}")
        if not torch.isfinite(loss):
            raise ValueError("a loss that is not finite")


# Batches.


@mistake(DIVIDED.format(8))
def by_the_number_of_ranks(p: Program) -> None:
    mw.distribute(DataLoader(p.data, batch_size=8 // mw.world_size()), view="rank")  # here


@mistake(DIVIDED.format("batch"))
def by_a_variable_of_the_environment(p: Program) -> None:
    batch, ranks = 8, int(os.environ.get("WORLD_SIZE", "1"))
    each = max(1, int(batch / ranks))
    loader = DataLoader(p.data, each, shuffle=True)  # here
    mw.distribute(loader, view="rank")


def loaders(data: Any, ranks: int) -> tuple[Any, Any]:
    batch = 8
    return DataLoader(data, batch_size=batch // mw.world_size()), DataLoader(data, batch)  # here


@mistake(DIVIDED.format("batch"))
def in_a_function(p: Program) -> None:
    first, second = loaders(p.data, mw.world_size())
    mw.distribute(first, second, view="rank")


@right
def a_share_that_no_loader_gets(p: Program) -> None:
    batch = 8
    each = batch // mw.world_size()
    mw.distribute(DataLoader(p.data, batch_size=batch), view="rank")
    mw.distribute(DataLoader(p.data, batch_size=each * mw.world_size()), view="rank")
    print(each)


@right
def a_part_for_another_reason(p: Program) -> None:
    batch, chunks = 8, 2
    mw.distribute(DataLoader(p.data, batch_size=batch // chunks), view="rank")


SAID = [*slips_in([__file__]), *says_divided()]


def said_of(case: Case) -> list[str]:
    lines, first = inspect.getsourcelines(ELSEWHERE.get(case, case))
    places = {f"test_slips.py:{line}: " for line in range(first, first + len(lines))}
    return [text for text in SAID if any(place in text for place in places)]


ELSEWHERE: dict[Case, Any] = {in_a_function: loaders}


@pytest.mark.parametrize("case, text", MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_slip_is_said_with_its_line(case: Case, text: str) -> None:
    lines, first = inspect.getsourcelines(ELSEWHERE.get(case, case))
    line = first + next(number for number, each in enumerate(lines) if each.rstrip().endswith("# here"))
    (said,) = said_of(case)
    assert f"test_slips.py:{line}: " in said and text in said


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_no_alarm(case: Case) -> None:
    assert said_of(case) == []
