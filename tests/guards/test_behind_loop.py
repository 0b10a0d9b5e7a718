"""A model that draws behind its loop, on this rank's part of the last batch, is said; what is right is no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.process.session import default_engine, end_sessions

SAID = "the model runs here after its loop"
Use = Callable[[nn.Module, Any, Any], None]


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    end_sessions()
    yield
    end_sessions()


def notes_of(use: Use) -> tuple[list[str], int]:
    """What is said of a program that does this behind its loops: what, and hooks that it leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(11, 3))
    model, optimizer, loader = mw.distribute(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True), view="rank"
    )
    for _ in range(2):
        for (x,) in loader:
            mw.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        use(model, x, loader)
    notes = [note for note in default_engine().notes if SAID in note]
    end_sessions()
    return notes, len(torch_module._global_forward_hooks)


def for_a_log(model: nn.Module, x: Any, loader: Any) -> None:
    model(x)


def peeked(model: nn.Module, x: Any, loader: Any) -> None:
    (x,) = next(iter(loader))
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("use", [for_a_log, peeked])
def test_a_model_that_draws_for_a_part_behind_its_loop_is_said_once(use: Use, pool: Any) -> None:
    notes, hooks = pool(2).run(notes_of, use)[0]
    assert len(notes) == 1, notes
    assert notes[0].startswith("tests/guards/test_behind_loop.py:"), notes
    assert hooks == 0


def in_evaluation_mode(model: nn.Module, x: Any, loader: Any) -> None:
    model.eval()
    model(x)
    model.train()


def of_a_batch_that_all_ranks_hold(model: nn.Module, x: Any, loader: Any) -> None:
    model(torch.ones(4, 3))


def inside_a_loop(model: nn.Module, x: Any, loader: Any) -> None:
    for (x,) in loader:
        model(x)


@pytest.mark.parametrize("use", [in_evaluation_mode, of_a_batch_that_all_ranks_hold, inside_a_loop])
def test_what_draws_alike_on_every_rank_is_no_alarm(use: Use, pool: Any) -> None:
    for notes, hooks in pool(2).run(notes_of, use):
        assert notes == []
        assert hooks == 0
