"""`mw.log` and trackers: what is kept where, what is refused, and that no tracker ends a training. Of
training/tracking/trackers.py too."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw
from meshwise.records.run_list import run_entry
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.tracking import tracking
from meshwise.training.tracking.tracking import Tracking, nowhere
from meshwise.workers.environment import LOG, RUN_FOLDER

FAKE_WANDB = """
import os
said = []
class Settings:
    def __init__(self, **given): said.append(("settings", given))
class Run:
    def define_metric(self, *names, **given): said.append(("define", names, given))
    def log(self, values): said.append(("log", values))
    def finish(self): said.append(("finish",))
def init(**given):
    said.append(("init", os.environ.get("WANDB_MODE"), {k: v for k, v in given.items() if k != "settings"}))
    return Run()
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of a script, which has not logged anything yet."""
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setattr(tracking, "_targets", [])
    monkeypatch.setattr(tracking, "_calls", type(tracking._calls)())
    return tmp_path / "run"


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that notes what is asked of it."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    import wandb  # type: ignore[import-not-found]

    return wandb


def job(**given: Any) -> mw.Job:
    return mw.Job(
        name="line",
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=lambda: (torch.ones(8, 1),),
        test=lambda: (torch.ones(3, 1),),
        batch_size=4,
        **given,
    )


def test_numbers_of_a_script_are_kept_with_their_step(folder: Path) -> None:
    mw.log(loss=torch.tensor(0.5), right=np.int64(3))
    mw.log({"val/accuracy": 0.9}, step=40)
    mw.log(loss=math.nan, good=True, step=41)
    assert lines(folder) == [
        {"loss": 0.5, "right": 3, "step": 1},
        {"val/accuracy": 0.9, "step": 40},
        {"loss": None, "good": 1.0, "step": 41},
    ]


def test_without_a_step_it_is_the_optimizer_step_that_is_worked_on(folder: Path) -> None:
    with mw.session():
        model = torch.nn.Linear(1, 1)
        loader = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
        for epoch in range(2):
            for x in loader:
                loss = mw.backward(model(x).sum())
                mw.log(loss=loss)
                optimizer.step()
                mw.log(lr=0.1)
            for _ in loader:
                mw.log(inside=epoch)
            mw.log(after=epoch)
    steps = {
        name: [line["step"] for line in lines(folder) if name in line] for name in ("loss", "lr", "inside", "after")
    }
    assert steps == {"loss": [1, 2, 3, 4, 5, 6], "lr": [1, 2, 3, 4, 5, 6], "inside": [3] * 3 + [6] * 3, "after": [3, 6]}


def test_without_a_folder_nothing_is_kept_and_nothing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER)
    monkeypatch.chdir(folder.parent)
    mw.log(loss=1.0)
    assert not list(Path().iterdir())


def test_a_script_may_have_a_tracker_of_its_own(folder: Path, wandb: Any) -> None:
    seen: list[Any] = []

    def track(values: Mapping[str, float], step: int) -> None:
        seen.append((dict(values), step))

    def fails(values: Mapping[str, float], step: int) -> None:
        raise OSError("full")

    mw.log(loss=3.0, step=1)
    mw.log_to(track, "wandb", fails)
    mw.log_to(track)  # once
    for step in (2, 3):
        mw.log(loss=float(step), step=step)
    assert seen == [({"loss": 2.0}, 2), ({"loss": 3.0}, 3)]
    assert ("log", {"loss": 3.0, "step": 3}) in wandb.said and wandb.said[1][:2] == ("init", "offline")
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]


@pytest.mark.parametrize(("wanted", "says"), [(3, "3 is not a tracker"), ("wandbb", "Did you mean 'wandb'")])
def test_what_is_no_tracker_is_refused(wanted: Any, says: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=says):
        mw.log_to(wanted)


def test_a_check_calls_no_tracker(folder: Path) -> None:
    with nowhere():
        mw.log_to(lambda values, step: pytest.fail("called"))
        mw.log(loss=1.0)


def test_what_is_checked_logs_nothing(folder: Path) -> None:
    with nowhere():
        mw.log(loss=1.0)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": torch.ones(3)}, r"loss has the shape \(3,\)\. Log one number, such as loss\.mean\(\)"),
        ({"loss": np.ones((2, 2))}, r"loss has the shape \(2, 2\)"),
        ({"name": "a"}, "name must be a number, but it is a str"),
        ({"loss": None}, "loss must be a number, but it is a NoneType"),
        ({"step": 3}, r"write mw\.log\(\.\.\., step=n\)"),
    ],
)
def test_what_is_no_number_is_refused(folder: Path, values: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mw.log(values)


def test_the_runs_show_what_a_script_logged(folder: Path) -> None:
    for step, accuracy in enumerate([0.5, 0.9, 0.8], 1):
        mw.log(lr=0.1, step=step)
        mw.log({"loss": 1 / step, "val/accuracy": accuracy, "epoch": step}, step=step)
    (folder / "run.json").write_text('{"job": "train.py", "status": "finished"}')
    entry = run_entry(folder)
    assert (entry.metric, entry.last, entry.best) == ("val/accuracy", 0.8, 0.9)


def test_a_job_gives_its_numbers_and_those_of_its_functions_to_a_function(tmp_path: Path) -> None:
    got: list[tuple[dict[str, float], int]] = []

    def track(values: Mapping[str, float], step: int) -> None:
        got.append((dict(values), step))

    def metrics(model: Any, batch: Any) -> Any:
        mw.log(seen=len(batch[0]))
        return {"accuracy": torch.tensor(1.0)}

    run_job(job(log=track, metrics=metrics), RunOptions(plan=Plan()), tmp_path)
    assert [(list(values), step) for values, step in got] == [
        (["train/loss"], 1),
        (["train/loss"], 2),
        (["seen"], 2),
        (["test/accuracy"], 2),
    ]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 2]


def test_a_tracker_that_fails_is_said_once_and_the_training_goes_on(tmp_path: Path) -> None:
    notes: list[str] = []

    def broken(values: Mapping[str, float], step: int) -> None:
        raise OSError("no space left")

    def send(kind: str, **facts: Any) -> None:
        notes.extend([facts["text"]] if kind == "note" else [])

    result = run_job(job(log=[broken], epochs=3), RunOptions(plan=Plan(), log_every=1), tmp_path, send)
    assert result["steps"] == 6 and len(lines(tmp_path)) == 9
    failed = [note for note in notes if note.startswith("log=")]
    assert failed == ["log=broken failed and gets no more values. The run continues. OSError: no space left"]


def test_wandb_is_offline_and_knows_what_was_run(wandb: Any, tmp_path: Path) -> None:
    run = tmp_path / "20261121-line"
    run.mkdir()
    request = {"epochs": 2, "seed": None, "args": ["lr=0.1"]}
    (run / "run.json").write_text(json.dumps({"job": "line", "request": request}))
    tracked = Tracking(run, ["wandb"], pytest.fail)
    tracked.open(0)
    tracked.write([], [({"train/loss": 0.5}, 7), ({"test/loss": 0.4}, 3)])
    tracked.close()
    facts = {"job": "line", "epochs": 2, "args": "lr=0.1"}
    (_, settings), (_, mode, given), define, *logged = wandb.said
    assert mode == "offline" and settings["console"] == "off"
    assert given["config"] == facts and given["id"] == given["name"] == "20261121-line" and given["dir"] == run
    assert define == ("define", ("*",), {"step_metric": "step"})
    assert logged == [("log", {"train/loss": 0.5, "step": 7}), ("log", {"test/loss": 0.4, "step": 3}), ("finish",)]


def test_tensorboard_goes_on_where_a_resumed_run_does(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begun, end in ((0, 4), (2, 5)):  # the second takes back steps 3 and 4
        tracked = Tracking(tmp_path, ["tensorboard"], pytest.fail)
        tracked.open(begun)
        tracked.write([], [({"loss": 10.0 * begun + step}, step) for step in range(begun + 1, end + 1)])
        tracked.close()
        time.sleep(1.1)  # files are read in the order of their names, which have the second
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 23.0),
        (4, 24.0),
        (5, 25.0),
    ]


def test_a_tracker_that_is_not_known_or_not_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"log='wand' is not known\. Did you mean 'wandb'"):
        RunOptions(log=("wand",))
    monkeypatch.setattr("meshwise.training.tracking.trackers.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"log=wandb: wandb is not installed\. Use pip install wandb"):
        RunOptions(log=("wandb",))
    with pytest.raises(UsageError, match=r"Use pip install 'meshwise\[tensorboard\]'"):
        job(log="tensorboard")


def test_a_script_that_torchrun_started_names_its_trackers_in_the_environment(
    wandb: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG, "wandb")
    mw.log(loss=2.0, step=9)
    assert wandb.said[-1] == ("log", {"loss": 2.0, "step": 9})


def test_two_workers_write_once(
    processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import meshwise as mw\nmw.log(loss=0.5, step=3)\nmw.log(part=mw.rank(), step=4)\n")
    monkeypatch.chdir(tmp_path)
    assert command("run", "--devices", "2xcpu", "--log", "tensorboard", "train.py")[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert lines(run) == [{"loss": 0.5, "step": 3}, {"part": 0, "step": 4}]
    assert len(list((run / "tensorboard").iterdir())) == 1
