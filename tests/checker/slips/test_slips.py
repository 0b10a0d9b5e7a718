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
RUNNING = "running adds up losses of this rank's part of each batch"
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


@mistake(RUNNING.replace("running", "total"))
def a_mean_of_losses_that_is_printed(p: Program) -> None:
    total = 0.0
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        total += loss.item()  # here
    print(f"mean loss {total / len(p.loader):.4f}")


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


# Running losses.


@mistake(RUNNING)
def the_whole_loss_times_a_part(p: Program) -> None:
    running, seen = 0.0, 0
    for x, y in p.loader:
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        running += loss.item() * len(x)  # here
        seen += len(x)
    print(running / seen)


@mistake(RUNNING)
def divided_by_all(p: Program) -> None:
    running = 0.0
    for batch in p.loader:
        x, y = batch
        n = x.size(0)
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        running += n * float(loss)  # here
    mean = running / len(p.data)
    print(f"{mean:.3f}")


@mistake(RUNNING)
def of_this_rank(p: Program) -> None:
    running = 0.0
    for _, (x, y) in enumerate(p.loader):
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        running += loss.item() * x.shape[0]  # here
    print(running)


@mistake(RUNNING.replace("running", "stats['loss']"))
def in_a_dict(p: Program) -> None:
    stats = {"loss": 0.0, "seen": 0}
    for x, y in p.loader:
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        stats["loss"] += loss.item() * len(x)  # here
        stats["seen"] += len(x)
    print(stats["loss"] / stats["seen"])


@mistake(RUNNING.replace("running", "stats['loss']"))
def in_a_dict_that_is_shown_whole(p: Program) -> None:
    stats = {"loss": 0.0}
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        stats["loss"] += loss.item() * len(x)  # here
    for name, value in stats.items():
        print(name, value)


class Meter:
    """Has a loop of its own, and sums over the ranks in a method where it does."""

    def __init__(self) -> None:
        self.total, self.seen, self.parts = 0.0, 0, {"loss": 0.0}

    def trains(self, p: Program) -> None:
        for x, y in p.loader:
            loss = mw.backward(F.cross_entropy(p.model(x), y))
            p.step()
            self.total += loss.item() * len(x)  # here
            self.seen += len(x)
        print(self.total / self.seen)

    def trains_with_parts(self, p: Program) -> None:
        for x, y in p.loader:
            loss = mw.backward(F.cross_entropy(p.model(x), y))
            p.step()
            self.parts["loss"] += x.size(0) * loss.item()  # here
        print(f"{self.parts['loss'] / len(p.data):.3f}")

    def trains_in_step(self, p: Program) -> None:
        for x, y in p.loader:
            loss = F.cross_entropy(p.model(x), y)
            mw.backward(loss)
            p.step()
            self.total += loss.item() * len(x)
        self.meet()
        print(self.total)

    def meet(self) -> None:
        self.total = mw.sum(self.total)


@mistake(RUNNING.replace("running", "self.total"))
def in_an_attribute(p: Program) -> None:
    Meter().trains(p)


@mistake(RUNNING.replace("running", "self.parts['loss']"))
def in_a_dict_of_an_attribute(p: Program) -> None:
    Meter().trains_with_parts(p)


@right
def in_an_attribute_that_a_method_sums(p: Program) -> None:
    Meter().trains_in_step(p)


@right
def in_a_dict_and_summed_in_the_loop(p: Program) -> None:
    stats = {"loss": 0.0, "seen": 0}
    for x, y in p.loader:
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        n = mw.sum(len(x))
        stats["loss"] += loss.item() * n
        stats["seen"] += n
    print(stats["loss"] / stats["seen"])


@right
def in_a_dict_and_summed_after_the_loop(p: Program) -> None:
    stats = {"loss": 0.0, "seen": 0}
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        stats["loss"] += loss.item() * len(x)
        stats["seen"] += len(x)
    stats["loss"] = mw.sum(stats["loss"]) / mw.sum(stats["seen"])
    print(stats["loss"])


@right
def in_a_dict_whose_values_are_summed(p: Program) -> None:
    stats = {"loss": 0.0}
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        stats["loss"] += loss.item() * len(x)
    for name, value in stats.items():
        print(name, mw.sum(value))


@right
def in_a_dict_whose_values_are_summed_in_a_comprehension(p: Program) -> None:
    stats = {"loss": 0.0}
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        stats["loss"] += loss.item() * len(x)
    print({name: mw.sum(value) for name, value in stats.items()})


@right
def summed_in_the_loop(p: Program) -> None:
    running = 0.0
    for x, y in p.loader:
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        n = mw.sum(len(x))
        running += loss.item() * n
    print(running / len(p.data))


@right
def summed_after_the_loop(p: Program) -> None:
    running, seen = 0.0, 0
    for x, y in p.loader:
        loss = F.cross_entropy(p.model(x), y)
        mw.backward(loss)
        p.step()
        running += loss.item() * len(x)
        seen += len(x)
    total = torch.tensor([running, seen])
    print(mw.sum(total))


@right
def returned_and_summed(p: Program) -> None:
    def epoch() -> float:
        running = 0.0
        for x, y in p.loader:
            loss = F.cross_entropy(p.model(x), y)
            mw.backward(loss)
            p.step()
            running += loss.item() * len(x)
        return running

    print(mw.sum(epoch()))


@right
def progress(p: Program) -> None:
    seen, total = 0, 0.0
    for x, y in p.loader:
        loss = mw.backward(F.cross_entropy(p.model(x), y))
        p.step()
        seen += len(x)
        total += loss.item()
        print(f"[{seen}/{len(p.data)}] {total}")


SAID = [*slips_in([__file__]), *says_divided()]


def said_of(case: Case) -> list[str]:
    lines, first = inspect.getsourcelines(ELSEWHERE.get(case, case))
    places = {f"test_slips.py:{line}: " for line in range(first, first + len(lines))}
    return [text for text in SAID if any(place in text for place in places)]


ELSEWHERE: dict[Case, Any] = {
    in_a_function: loaders,
    in_an_attribute: Meter.trains,
    in_a_dict_of_an_attribute: Meter.trains_with_parts,
    in_an_attribute_that_a_method_sums: Meter.trains_in_step,
}


@pytest.mark.parametrize("case, text", MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_slip_is_said_with_its_line(case: Case, text: str) -> None:
    lines, first = inspect.getsourcelines(ELSEWHERE.get(case, case))
    line = first + next(number for number, each in enumerate(lines) if each.rstrip().endswith("# here"))
    (said,) = said_of(case)
    assert f"test_slips.py:{line}: " in said and text in said


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_no_alarm(case: Case) -> None:
    assert said_of(case) == []
