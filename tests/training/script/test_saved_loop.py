"""What lies beside a loop of one's own in its state: other loaders' places, and the lines that it has logged.

Of engine/given.py too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.training.tracking import tracking
from meshwise.workers.environment import ATTEMPT, RUN_FOLDER


def begun(folder: Path, *, both: bool = True) -> tuple[Any, ...]:
    """A loop over one loader, and a shuffled one with a generator of its own that is read beside it."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), 2, shuffle=True)
    own = torch.Generator().manual_seed(5)
    second = DataLoader(TensorDataset(torch.arange(100.0, 110)[:, None]), 2, shuffle=True, generator=own)
    model, optimizer, first, second = mw.distribute(model, optimizer, first, second, view="rank")
    loaders = [first, second] if both else first
    return (
        model,
        optimizer,
        first,
        second,
        mw.checkpoint(folder, model=model, optimizer=optimizer, loader=loaders, every=3),
    )


def steps(begun: tuple[Any, ...], order: str, last: int) -> list[list[float]]:
    """What each step was trained on, up to the step `last`."""
    model, optimizer, first, second, saved = begun
    seen: list[list[float]] = []
    for _ in range(saved.epoch, 4):
        pairs = zip(first, second, strict=False) if order == "first" else zip(second, first, strict=False)
        for (a,), (b,) in pairs:
            mw.backward((model(a) + model(b)).mean() * 0.01)
            optimizer.step()
            seen.append([*a[:, 0].tolist(), *b[:, 0].tolist()])
            if saved.step + 1 == last:
                return seen
    return seen


@pytest.mark.parametrize("order", ["first", "second"])
def test_a_loader_that_is_zipped_with_the_first_goes_on_too(tmp_path: Path, order: str) -> None:
    whole = steps(begun(tmp_path / "whole"), order, 8)
    end_sessions()
    steps(begun(tmp_path / "cut"), order, 5)  # the state of step 3 is saved
    end_sessions()
    again = begun(tmp_path / "cut")
    assert again[4].step == 3 and steps(again, order, 8) == whole[3:]
    assert "a second loader" not in " ".join(default_engine().notes)


def test_a_loader_that_is_read_beside_and_not_given_is_said(tmp_path: Path) -> None:
    steps(begun(tmp_path, both=False), "first", 5)
    assert "Write mw.checkpoint(…, loader=[loader, other])" in " ".join(default_engine().notes)


def test_an_evaluation_in_the_step_is_no_loader_beside(tmp_path: Path) -> None:
    model, optimizer, first, second, _ = begun(tmp_path, both=False)
    for (x,) in first:
        mw.backward(model(x).mean() * 0.01)
        optimizer.step()
        with torch.no_grad():
            for number, (held_out,) in enumerate(second):
                model(held_out)
                if number:
                    break
    assert "a second loader" not in " ".join(default_engine().notes)


def test_a_state_without_the_second_place_is_said_and_other_things_are_refused(tmp_path: Path) -> None:
    steps(begun(tmp_path, both=False), "first", 5)
    end_sessions()
    begun(tmp_path)
    assert "has the positions of 1 of 2 loaders" in " ".join(default_engine().notes)
    end_sessions()
    model = mw.distribute(nn.Linear(1, 1), view="rank")
    with pytest.raises(UsageError, match="loader= is a list_iterator"):
        mw.checkpoint(tmp_path, model=model, loader=[iter([])])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script's run."""
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setattr(tracking, "_targets", [])
    return tmp_path / "run"


def logged(run: Path) -> list[tuple[str, int]]:
    """What metrics.jsonl has."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(name, value) for record in records for name, value in record.items() if name != "step"]


def attempt(number: int, run: Path, monkeypatch: pytest.MonkeyPatch, last: int, *, early: bool = False) -> None:
    """An attempt that logs each step and ends in one of them."""
    end_sessions()
    monkeypatch.setenv(ATTEMPT, str(number))
    tracking._targets.clear()
    if early:
        mw.log(attempt=number)
    model, optimizer, first, _, saved = begun(run.parent / "state")
    for (x,) in first:
        mw.backward(model(x).mean() * 0.01)
        optimizer.step()
        mw.log(seen=saved.step + 1)
        if saved.step + 1 == last:
            break


@pytest.mark.parametrize("early", [False, True])
def test_lines_of_steps_that_are_done_again_go(run: Path, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    attempt(1, run, monkeypatch, 5)  # the state is that of step 3
    attempt(2, run, monkeypatch, 6, early=early)
    kept = [("seen", number) for number in (1, 2, 3)]
    assert logged(run) == [*kept, *([("attempt", 2)] * early), *(("seen", number) for number in (4, 5, 6))]


def test_lines_of_another_run_stay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(1, run, monkeypatch, 5)
    (run.parent / "other").mkdir()
    (run / "metrics.jsonl").rename(run.parent / "other" / "metrics.jsonl")
    monkeypatch.setenv(RUN_FOLDER, str(run.parent / "other"))
    attempt(1, run, monkeypatch, 4)
    assert len(logged(run.parent / "other")) == 5 + 1
