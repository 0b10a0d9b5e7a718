"""Several programs or loops in one process (folds, a notebook, a sweep): each is told what it is told alone.

Ten small programs, most with a mistake, after each other in every order. Each trains longer than anything is looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import MeshwiseError
from meshwise.training.process import session
from meshwise.training.process.session import default_engine, end_sessions, program_ends

F = nn.functional


class Setting:
    """A model, its optimizer and a loader of 24 batches, distributed."""

    def __init__(self, model: nn.Module | None = None, collate: Any = None, width: int = 4) -> None:
        torch.manual_seed(0)
        x = torch.randn(96, width)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        self.model: Any = model or nn.Linear(width, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader: Any = DataLoader(self.data, batch_size=4, collate_fn=collate)
        self.model, self.optimizer, self.loader = mw.distribute(self.model, self.optimizer, self.loader, view="rank")

    def steps(self, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> Iterator[Tensor]:
        for x, y in self.loader:
            yield loss(self.model(x), y)
            self.optimizer.step()
            self.optimizer.zero_grad()


def right() -> None:
    for loss in Setting().steps():
        mw.backward(loss)


def a_sum() -> None:
    for loss in Setting().steps(lambda out, y: F.cross_entropy(out, y, reduction="sum")):
        mw.backward(loss)


def a_coupled_loss() -> None:
    for loss in Setting().steps(lambda out, y: out.square().sum().sqrt()):
        mw.backward(loss)


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    return torch.stack([x, x], 1)[:, : 1 + int(x[0, 0] > 0)], y


def batches_padded_apart() -> None:
    setting = Setting(collate=padded)
    for x, y in setting.loader:
        mw.backward(F.cross_entropy(setting.model(x).mean(1), y))
        setting.optimizer.step()
        setting.optimizer.zero_grad()


def an_evaluation_that_nobody_adds_up() -> None:
    setting = Setting()
    for loss in setting.steps():
        mw.backward(loss)
    correct = 0
    for x, y in setting.loader:
        correct += int((setting.model(x).argmax(1) == y).sum())


def an_evaluation_of_all_on_every_rank() -> None:
    setting = Setting()
    for loss in setting.steps():
        mw.backward(loss)
    correct = 0
    for x, y in DataLoader(setting.data, batch_size=8):
        correct += mw.sum(int((setting.model(x).argmax(1) == y).sum()))


def an_update_by_hand() -> None:
    setting = Setting()
    for x, y in setting.loader:
        F.cross_entropy(setting.model(x), y).backward()
        with torch.no_grad():
            for p in setting.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


def a_backward_of_torch() -> None:
    for loss in Setting().steps():
        loss.backward()


def no_backward_at_all() -> None:
    for _ in Setting().steps():
        pass


def dropout() -> None:
    for loss in Setting(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1))).steps():
        mw.backward(loss)


def noise_on_gradients() -> None:
    setting = Setting()
    for loss in setting.steps():
        mw.backward(loss)
        for p in setting.model.parameters():
            p.grad += torch.randn_like(p)


def a_loss_that_is_not_finite_once() -> None:
    for number, loss in enumerate(Setting().steps()):
        mw.backward(loss * float("nan") if number == 7 else loss)
        if number == 7:
            default_engine().program.optimizers.popitem()[0].zero_grad()


def features_that_are_kept() -> None:
    """A right twin: what is kept of a loop is trained on afterwards."""
    setting = Setting()
    kept = [setting.model(x).detach() for x, _ in setting.loader]
    for loss in setting.steps():
        mw.backward(loss + 0 * kept[0].sum())


def a_running_loss_of_one_rank() -> None:
    setting, running, seen = Setting(), 0.0, 0
    for x, y in setting.loader:
        loss = F.cross_entropy(setting.model(x), y)
        mw.backward(loss)
        running += loss.item() * len(x)
        seen += len(x)
    print(running / seen)


PROGRAMS: tuple[Callable[[], None], ...] = (
    right,
    a_sum,
    a_coupled_loss,
    batches_padded_apart,
    an_evaluation_that_nobody_adds_up,
    an_evaluation_of_all_on_every_rank,
    an_update_by_hand,
    a_backward_of_torch,
    no_backward_at_all,
    dropout,
    noise_on_gradients,
    a_loss_that_is_not_finite_once,
    a_running_loss_of_one_rank,
    features_that_are_kept,
)
BY_NAME = {program.__name__: program for program in PROGRAMS}


def said_by(names: list[str]) -> list[str]:
    """What these programs, after each other in one process, are told on this rank, and what is refused. Steps are of
    the run, and go on."""
    end_sessions()
    said: list[str] = []
    with patch.object(session, "tell", lambda text: said.append(re.sub(r"step \d+", "step N", text))):
        for name in names:
            try:
                BY_NAME[name]()
            except MeshwiseError as error:
                said.append(f"{name} is refused: {error}")
        try:
            program_ends()
        except MeshwiseError as error:
            said.append(f"at the end: {error}")
        end_sessions()
    return said


def told(orders: list[list[str]]) -> list[list[str]]:
    return [said_by(names) for names in orders]


@pytest.fixture(scope="module")
def alone(pool: Any) -> dict[str, list[str]]:
    return dict(zip(BY_NAME, pool(2).run(told, [[name] for name in BY_NAME])[0], strict=True))


BY_CHECK = {
    *("batches_padded_apart", "a_running_loss_of_one_rank", "an_evaluation_of_all_on_every_rank"),
    "an_evaluation_that_nobody_adds_up",
}
"""Mistakes of the view by rank that `meshwise check` alone names."""
WITHOUT_BACKWARD = {"no_backward_at_all", "an_update_by_hand"}
"""Behind these no other program begins: what is said of their loops waits for the end of the process."""


def test_a_mistake_is_told_and_a_right_program_is_not(alone: dict[str, list[str]]) -> None:
    untold = {"right", "features_that_are_kept", "no_backward_at_all", *BY_CHECK}
    assert {name for name, said in alone.items() if not said} == untold


@pytest.mark.parametrize("backwards", [pytest.param(False, marks=pytest.mark.slow), True])
def test_programs_in_one_process_are_told_what_they_are_told_alone(
    alone: dict[str, list[str]], backwards: bool, pool: Any
) -> None:
    names = [name for name in BY_NAME if name not in WITHOUT_BACKWARD]
    names = names[::-1] if backwards else names
    order = [*names, *names]  # each once more
    want = Counter(line for name in order for line in alone[name])
    assert Counter(pool(2).run(told, [order])[0][0]) == want


@pytest.mark.slow
def test_any_two_programs_in_both_orders_are_told_what_they_are_told_alone(
    alone: dict[str, list[str]], pool: Any
) -> None:
    names = [name for name in BY_NAME if name not in WITHOUT_BACKWARD]
    pairs = [list(pair) for pair in permutations(names, 2)]
    for pair, said in zip(pairs, pool(2).run(told, pairs, timeout=900)[0], strict=True):
        assert Counter(said) == Counter(line for name in pair for line in alone[name]), pair


def second_loop(kind: str) -> list[str]:
    """The same model and loader, in a second loop with another loss."""
    end_sessions()
    said: list[str] = []
    with patch.object(session, "tell", said.append):
        setting = Setting()
        for _ in range(2):
            for loss in setting.steps():
                mw.backward(loss)
        try:
            for loss in setting.steps(
                lambda out, y: out.square().sum() if kind == "sum" else out.square().sum().sqrt()
            ):
                mw.backward(loss)
        except MeshwiseError as error:
            said.append(str(error))
        end_sessions()
    return said


def test_a_second_loop_over_the_same_loader_is_looked_at_anew(pool: Any) -> None:
    assert "this loss is a sum over samples" in " ".join(pool(2).run(second_loop, "sum")[0])
    assert "this loss couples the samples of a batch" in " ".join(pool(2).run(second_loop, "coupled")[0])
