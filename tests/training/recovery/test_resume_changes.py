"""A run is resumed with another seed, data set, batch or learning rate: honoured and said, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions


def job(samples: int = 40, lr: float = 0.1, **given: Any) -> mw.Job:
    schedule = given.pop("schedule", False)
    facts: dict[str, Any] = {"name": "net", "batch_size": 4, "epochs": 1} | given
    return mw.Job(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        scheduler=(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4)) if schedule else None,
        data=lambda: (torch.randn(samples, 3, generator=torch.Generator().manual_seed(1)),),
        **facts,
    )


def stopped_in_the_epoch(folder: Path, **given: Any) -> None:
    made, count = job(**given), [0]

    def loss(model: Any, batch: Any) -> Any:
        count[0] += 1
        if count[0] == 6:
            raise InterruptedError
        return made.loss(model, batch)

    with pytest.raises(InterruptedError):
        ran(mw.Job(**{**vars(made), "loss": loss}), folder, save_every=5)


def ran(job: mw.Job, folder: Path, **options: Any) -> dict[str, Any]:
    return run_job(job, RunOptions(plan=Plan(), **options), folder)


def resumed(folder: Path, capsys: pytest.CaptureFixture[str], **given: Any) -> str:
    said: list[str] = []
    run_job(
        job(**given), RunOptions(plan=Plan(), resume=folder), folder, send=lambda kind, **facts: said.append(str(facts))
    )
    return "\n".join(said) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr": 0.01}, "lr is 0.01 from now on. Before, it was 0.1"),
        ({"batch_size": 8}, "batch_size is 8 from now on. Before, it was 4"),
    ],
)
def test_what_can_be_honoured_is_and_is_said(
    given: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_in_the_epoch(tmp_path)
    assert says in resumed(tmp_path, capsys, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": 5}, "the seed is 5, but the run began with seed 0"),
        ({"samples": 48}, "the data set has 48 samples, but it had 40 when this epoch began.* after the first 20"),
        (
            {"lr": 0.01, "schedule": True},
            "lr is 0.01 in the program, but the run began with 0.1. The scheduler continues from the saved lr",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    stopped_in_the_epoch(tmp_path, schedule=given.get("schedule", False))
    with pytest.raises(UsageError, match=says):
        ran(job(**given), tmp_path, resume=tmp_path)


def test_a_new_learning_rate_counts(tmp_path: Path) -> None:
    """A rate of 0 changes no weight any more."""
    stopped_in_the_epoch(tmp_path)
    ran(job(lr=0.0), tmp_path, resume=tmp_path)
    after = load_file(tmp_path / "weights.safetensors")
    stopped_in_the_epoch(tmp_path / "other")
    ran(job(epochs=2, lr=0.0), tmp_path / "other", resume=tmp_path / "other")
    assert all(
        torch.equal(value, after[name]) for name, value in load_file(tmp_path / "other/weights.safetensors").items()
    )


def test_between_epochs_the_data_set_may_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(job(), tmp_path)
    assert "samples is 48 from now on. Before, it was 40." in resumed(tmp_path, capsys, samples=48, epochs=2)


def test_what_is_as_it_was_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_in_the_epoch(tmp_path, schedule=True)
    assert "from now on" not in resumed(tmp_path, capsys, schedule=True)
