"""A script that nobody distributed stops before several workers train the same model N times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from meshwise.parallel import step_hooks
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.process.same_work import refuse_same_work
from meshwise.training.process.session import end_sessions


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    end_sessions()
    before = list(step_hooks._of_all)
    yield
    step_hooks._of_all[:] = before
    end_sessions()


def plain(prepare: Callable[[nn.Module], object] = lambda model: None) -> None:
    model = nn.Linear(2, 1)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()  # without gradients: to prepare state, as some programs do
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_a_plain_script_on_several_workers_stops_at_its_first_step() -> None:
    refuse_same_work("train.py", World(0, 3))
    says = "train.py does not use mw.distribute: 3 workers would do the same work. Use --devices 1xcpu"
    with pytest.raises(UsageError, match=says):
        plain()


def test_one_worker_trains_a_plain_script() -> None:
    refuse_same_work("train.py", World())
    plain()


def test_a_script_that_distributed_its_model_trains() -> None:
    refuse_same_work("train.py", World(0, 2))
    plain(mw.distribute)


def test_a_script_that_distributed_something_else_is_told_what_is_missing() -> None:
    refuse_same_work("train.py", World(0, 2))
    with pytest.raises(UsageError, match=r"passed no model to mw\.distribute: 2 workers would do the same"):
        plain(lambda model: mw.distribute(torch.optim.SGD(model.parameters(), 0.1), view="rank"))


def test_a_script_with_a_process_group_of_its_own_trains() -> None:
    refuse_same_work("train.py", World(0, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("file", ["lightning/pytorch/trainer/trainer.py", "pytorch_lightning/trainer/trainer.py"])
def test_a_script_of_lightning_is_told_its_one_line(file: str) -> None:
    found = dict[str, Any]()
    exec(compile("def fit(train):\n    train()\n", f"/lib/{file}", "exec"), found)
    refuse_same_work("train.py", World(0, 2))
    says = r"do the same work\. Use .* or write trainer = mw\.distribute\(trainer\) before trainer\.fit\(\)\.$"
    with pytest.raises(UsageError, match=says):
        found["fit"](plain)


def test_a_closure_makes_its_gradients_inside_the_step() -> None:
    refuse_same_work("train.py", World(0, 2))
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="does not use"):
        torch.optim.LBFGS(model.parameters()).step(lambda: model(torch.ones(1, 2)).sum())
