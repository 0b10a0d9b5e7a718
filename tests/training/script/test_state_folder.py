"""The folder of `mw.checkpoint` is one program's: who else comes is refused, or told what it goes on with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.claims import claim, claims_of
from meshwise.records.lock import STATE_LOCK, FolderLock, Work
from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.training.process.session import end_sessions


@pytest.fixture(autouse=True)
def own_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MESHWISE_RUN", "MESHWISE_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    end_sessions()
    yield
    end_sessions()


def as_attempt(patch: pytest.MonkeyPatch, run: Path, number: int) -> None:
    """This process is of an attempt of a run, as our launcher begins it."""
    patch.setenv("MESHWISE_ATTEMPT", str(number))
    patch.setattr("meshwise.training.script.state_folder.RUN_FOLDER", "THE_RUN")  # no records are kept here
    patch.setenv("THE_RUN", str(run))


def trained(
    folder: Path, steps: int = 3, *, lr: float = 0.1, samples: int = 40, batch: int = 4, schedule: bool = False
) -> torch.optim.Optimizer:
    """Train for so many steps of an epoch of ten, saving after each."""
    end_sessions()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100) if schedule else None
    model, optimizer, loader = mw.distribute(
        model, optimizer, DataLoader(TensorDataset(torch.ones(samples, 2)), batch, shuffle=True), view="rank"
    )
    mw.checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every=1)
    batches = iter(loader)  # counted in this process on purpose
    for number, (x,) in enumerate(batches):
        if number == steps:
            break
        mw.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    end_sessions()
    return optimizer


def test_a_folder_that_another_program_holds_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = FolderLock(tmp_path, STATE_LOCK, work=Work("/runs/first", 2))
    who = rf"another program saves its state in this folder, in process {os.getpid()} on .* \(run /runs/first\)"
    with pytest.raises(UsageError, match=rf"mw.checkpoint: {tmp_path}: {who}\. Give mw.checkpoint another folder"):
        trained(tmp_path)
    for run, number in (("/runs/first", 2), ("/runs/other", 3)):
        as_attempt(monkeypatch, Path(run), number)
        with pytest.raises(UsageError, match=who):
            trained(tmp_path)
    assert not checkpoints_in(tmp_path)
    as_attempt(monkeypatch, Path("/runs/first"), 3)
    trained(tmp_path)
    assert [saved.attempt for saved in checkpoints_in(tmp_path)] == [3, 3]
    holder.close()


def test_a_folder_is_let_go_of_at_the_end_and_where_the_state_does_not_fit(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(CheckpointError, match="was now passed 0"):
        mw.checkpoint(tmp_path, model=nn.Linear(5, 5))
    trained(tmp_path)


def test_the_worker_of_a_loader_holds_nothing(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, STATE_LOCK)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(told, 1)
        os._exit(0)
    lock.close()
    FolderLock(tmp_path, STATE_LOCK).close()
    os.write(tell, b"x")
    os.waitpid(pid, 0)


def test_a_state_of_another_run_is_said_and_one_of_this_run_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state"
    as_attempt(monkeypatch, tmp_path / "first", 1)
    trained(folder)
    as_attempt(monkeypatch, tmp_path / "first", 2)
    trained(folder)
    assert "resumes from" not in capsys.readouterr().err
    as_attempt(monkeypatch, tmp_path / "second", 1)
    trained(folder)
    assert "state: resumes from step 6. Another folder starts from scratch.\n" in capsys.readouterr().err


def test_other_settings_are_honoured_and_said_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "a")
    assert trained(tmp_path / "a", lr=0.01, batch=8).param_groups[0]["lr"] == 0.01
    said = capsys.readouterr().err
    assert "lr is 0.01 from now on. Before, it was 0.1." in said
    assert "batch_size is 8 from now on. Before, it was 4." in said
    with pytest.raises(UsageError, match="the data set has 48 samples, but it had 40 when this epoch began"):
        trained(tmp_path / "a", samples=48)
    trained(tmp_path / "b", schedule=True)
    with pytest.raises(
        UsageError, match=r"lr is 0\.01 in the program, but the run began with 0\.1\. The scheduler continues"
    ):
        trained(tmp_path / "b", lr=0.01, schedule=True)


def test_what_a_start_saves_that_was_overtaken_is_not_read(tmp_path: Path) -> None:
    trained(tmp_path)
    before = checkpoints_in(tmp_path)
    (number,) = claims_of(tmp_path)
    facts: dict[str, Any] = {"checkpoints": [saved.path.name for saved in before]}
    assert claim(tmp_path, number + 1, facts)
    (tmp_path / f"step-00000099.{number}").mkdir()
    assert checkpoints_in(tmp_path) == before


def test_a_relative_folder_lies_in_the_run_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWISE_STATES", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    trained(Path("state"))
    trained(tmp_path / "mine")
    assert checkpoints_in(tmp_path / "run" / "state") and checkpoints_in(tmp_path / "mine")
    assert not (tmp_path / "state").exists()
