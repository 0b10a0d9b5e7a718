"""What a loop of one's own would lose in silence: it is refused, comes back, or is said.

Of training/recovery/finite_state.py, training/script/saved_loop.py and training/slips/in_a_run.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.records.checkpoints import checkpoints_in
from meshwise.spec.errors import CheckpointError, LossError
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.training.recovery.finite_state import not_finite_in


def begun(folder: Path, *more: Any, **given: Any) -> tuple[Any, Any, Any, Any]:
    """A loop of four steps an epoch that begins in this folder."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), 2, shuffle=True)
    model, optimizer, loader, *_ = mw.distribute(model, optimizer, loader, *more, view="rank")
    return model, optimizer, loader, mw.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, **given)


def train(model: Any, optimizer: Any, loader: Any, factors: dict[int, float] | None = None) -> None:
    """An epoch. factors: of the loss of these batches."""
    for number, (x,) in enumerate(loader):
        mw.backward(model(x).square().mean() * (factors or {}).get(number, 1.0))
        optimizer.step()
        optimizer.zero_grad()


def said() -> str:
    return "\n".join(default_engine().notes)


# What is not finite.


def test_a_state_that_is_not_finite_is_not_saved_and_ends_the_loop(tmp_path: Path) -> None:
    model, optimizer, loader, _ = begun(tmp_path, every=1)
    message = (
        r"step 3: the parameter weight is not finite on rank 0, so the state is not saved\. The newest saved state "
    )
    with pytest.raises(LossError, match=message + rf"is of step 2, in {tmp_path}\. The same command resumes it\."):
        train(model, optimizer, loader, {2: math.nan})
    end_sessions()
    assert [saved.step for saved in checkpoints_in(tmp_path)] == [1, 2]


def test_nor_is_one_at_the_end_of_the_program(tmp_path: Path) -> None:
    model, optimizer, loader, _ = begun(tmp_path)
    train(model, optimizer, loader, {3: math.nan})
    with pytest.raises(LossError, match=r"step 4: .* No state was saved before\."):
        default_engine().close()
    assert not checkpoints_in(tmp_path)


def test_nor_does_a_program_end_well_that_turned_so_after_its_last_save(tmp_path: Path) -> None:
    model, optimizer, loader, _ = begun(tmp_path, every=3)
    train(model, optimizer, loader, {3: math.nan})
    with pytest.raises(
        LossError, match=r"step 4: the parameter weight .* on rank 0, .* The newest saved state is of step 3"
    ):
        default_engine().close()


def test_what_an_optimizer_keeps_is_looked_at_too(tmp_path: Path) -> None:
    model, optimizer, loader, saved = begun(tmp_path, every=100)
    train(model, optimizer, loader)
    optimizer.state[model.bias]["exp_avg_sq"].fill_(math.inf)
    with pytest.raises(LossError, match="step 4: exp_avg_sq of Adam for bias is not finite on rank 0"):
        saved.save()


def test_a_sum_that_overflows_is_finite_and_what_never_was_stays_the_programs() -> None:
    model = nn.Linear(200, 1, dtype=torch.float16)
    model.weight.data.fill_(60000.0)
    wide = nn.Linear(200, 1)
    wide.weight.data.fill_(3e38)
    models = {"0": model, "1": wide}
    assert not_finite_in(models, {}, frozenset())[0] == ""
    wide.bias.data.fill_(-math.inf)
    assert not_finite_in(models, {}, frozenset()) == ("the parameter bias of model 1", "rank 0")
    assert not_finite_in(models, {}, frozenset({"the parameter bias of model 1"}))[0] == ""


def test_a_state_of_before_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("meshwise.training.script.checkpoint.not_finite_in", lambda *given: ("", ""))
        patch.setattr("meshwise.training.script.checkpoint.not_finite_here", lambda *given: "")
        model, optimizer, loader, _ = begun(tmp_path, every=1)
        train(model, optimizer, loader, {3: math.nan})
        end_sessions()
    with pytest.raises(
        CheckpointError, match=r"step-00000004\.1: the parameter weight is not finite in this saved state\. Remove"
    ):
        begun(tmp_path, every=1)


# What comes back.


def test_lists_and_dicts_of_extra_are_filled_where_the_loop_holds_them(tmp_path: Path) -> None:
    state: dict[str, Any] = {"best": 0.5, "losses": [1.0, 2.0], "by": {"old": 1}, "seen": torch.ones(2)}
    begun(tmp_path, extra=state)[3].save()
    end_sessions()
    losses: list[float] = []
    by: dict[str, int] = {"new": 2}
    seen = torch.zeros(2)
    again = {"best": 9.0, "losses": losses, "by": by, "seen": seen, "own": 3}
    begun(tmp_path, extra=again)
    assert (losses, by, seen.tolist()) == ([1.0, 2.0], {"old": 1}, [1.0, 1.0])
    assert again["best"] == 0.5 and again["own"] == 3
    assert again["losses"] is losses and again["by"] is by


# What is said.


def test_what_was_distributed_and_is_not_saved_is_said(tmp_path: Path) -> None:
    other = nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(second, 3)
    model, optimizer, loader, _ = begun(tmp_path / "a", other, second, schedule)
    train(model, optimizer, loader)
    assert "was passed Linear (model), SGD (optimizer), StepLR (scheduler), but mw.checkpoint was not" in said()
    end_sessions()
    frozen = nn.Linear(2, 1).requires_grad_(False)
    train(*begun(tmp_path / "b", other, frozen, second, schedule, extra={"a": other, "b": second, "c": schedule})[:3])
    assert said() == ""


def test_what_an_earlier_program_of_the_process_was_given_is_not_missed(tmp_path: Path) -> None:
    """A cell of a notebook has trained without a state; its model is there still."""
    earlier = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(earlier.parameters(), lr=0.1)
    _, _, loader = mw.distribute(earlier, optimizer, DataLoader(TensorDataset(torch.ones(8, 2)), 2), view="rank")
    train(earlier, optimizer, loader)
    model, optimizer, loader, saved = begun(tmp_path)
    train(model, optimizer, loader)
    assert said() == "" and saved is not None


@pytest.mark.parametrize("asks", [True, False])
def test_a_resumed_program_that_counts_its_epochs_anew_is_told(asks: bool, tmp_path: Path) -> None:
    model, optimizer, loader, _ = begun(tmp_path)
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    end_sessions()
    model, optimizer, loader, saved = begun(tmp_path)
    epochs = range(saved.epoch, 3) if asks else range(3)
    for _ in epochs:
        train(model, optimizer, loader)
    told = "the restored state has 2 finished epochs, but the program has not read saved.epoch"
    assert (told in said()) is not asks
    assert said().count("range(saved.epoch") == int(not asks)
