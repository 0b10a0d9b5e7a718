"""A loop that reads other loaders inside its batches, and one that goes on inside an epoch, counting its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.records.checkpoints import checkpoints_in
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.workers.gate import StepGate

BATCHES = 6  # of 43 samples in batches of 8


def trained(
    folder: Path,
    *,
    fails_after: int = -1,
    stops_in: int = -1,
    evaluates: str = "after",
    window: int = 1,
    most: int = BATCHES,
) -> Any:
    """Two epochs: losses, steps as `mw.log` counts them, and the checkpoint. evaluates: where in a batch. fails_after:
    batches. stops_in: the batch whose validation is asked to stop. window: batches of a step. most: of an epoch."""
    end_sessions()
    torch.manual_seed(1)
    x = torch.randn(43, 6, dtype=torch.float64)
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader, held_out = DataLoader(TensorDataset(x), 8, shuffle=True), DataLoader(TensorDataset(x[:9]), 4)
    model, optimizer, loader, held_out = mw.distribute(model, optimizer, loader, held_out, view="rank")
    extra: dict[str, Any] = {"losses": [], "steps": []}
    default_engine().phases.steps = 0  # other loops of this process have steps
    saved = mw.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, extra=extra, every=1)
    engine, batches = default_engine(), 0
    gate = engine.gate = StepGate()

    def evaluate() -> None:
        for number, (a,) in enumerate(held_out):
            if batches == stops_in and number == 0:
                gate.set_last(gate.freeze())
            extra["losses"].append(float(model(a).detach().sum()))

    for _ in range(saved.epoch, 2):
        for number, (a,) in enumerate(loader, loader.start):
            if number >= most:
                break
            if batches == fails_after:
                raise InterruptedError
            batches += 1
            extra["losses"].append(float(mw.backward(model(a).square().mean())))
            if evaluates == "before":
                evaluate()
            if (number + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
            if evaluates == "after" and batches % 2:
                evaluate()
            extra["steps"].append(engine.phases.step)
    return extra["losses"], extra["steps"], saved.step


def cut(folder: Path, **given: Any) -> list[int]:
    """The steps that were saved of a loop that ends too early."""
    with pytest.raises((InterruptedError, SystemExit)):
        trained(folder, **given)
    end_sessions()
    return [saved.step for saved in checkpoints_in(folder)]


@pytest.mark.parametrize("evaluates", ["before", "after", "never"])
def test_a_step_with_an_evaluation_in_its_body_counts_once(evaluates: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", evaluates=evaluates)
    assert whole[1:] == (list(range(1, 2 * BATCHES + 1)), 2 * BATCHES)
    assert cut(tmp_path / "cut", evaluates=evaluates, fails_after=8)[-1] == 8
    assert trained(tmp_path / "cut", evaluates=evaluates)[1:] == whole[1:]


def test_a_stop_in_an_evaluation_waits_for_the_end_of_its_batch(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    assert cut(tmp_path / "cut", stops_in=3)[-1] == 3
    assert trained(tmp_path / "cut")[1:] == whole[1:]


def test_where_nothing_is_saved_a_stop_says_so(tmp_path: Path) -> None:
    assert cut(tmp_path, stops_in=1, window=4) == []


def test_a_loop_that_counts_on_from_loader_start_keeps_its_windows_and_breaks(tmp_path: Path) -> None:
    for name, given in {"window": {"window": 3}, "most": {"most": 4}}.items():
        whole = trained(tmp_path / name / "whole", evaluates="never", **given)
        cut(tmp_path / name / "cut", evaluates="never", fails_after=5, **given)
        assert trained(tmp_path / name / "cut", evaluates="never", **given) == whole
        end_sessions()


def test_a_loop_that_goes_on_inside_an_epoch_is_told_once(tmp_path: Path) -> None:
    cut(tmp_path, evaluates="never", fails_after=3)
    end_sessions()
    model, loader = nn.Linear(6, 1).double(), DataLoader(TensorDataset(torch.randn(43, 6).double()), 8, shuffle=True)
    model, optimizer, loader = mw.distribute(model, torch.optim.AdamW(model.parameters()), loader, view="rank")
    mw.checkpoint(tmp_path, model=model, optimizer=optimizer, loader=loader, extra={"losses": [], "steps": []})
    for _, (_a,) in enumerate(loader):
        break
    (said,) = (note for note in default_engine().notes if "enumerate(" in note)
    assert "resumes with batch 4 of its epoch" in said and "enumerate(loader, loader.start)" in said


def test_a_loop_from_loader_start_is_told_nothing(tmp_path: Path) -> None:
    cut(tmp_path, evaluates="never", fails_after=3)
    trained(tmp_path, evaluates="never")
    assert not [note for note in default_engine().notes if "enumerate(" in note]
