"""A run that was stopped goes on with the losses that it would have had."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import meshwise as mw
from meshwise.launcher.supervise import summarise
from meshwise.records import folder as names
from meshwise.reports.views.run_text import summary_text
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions


def dropout_job(epochs: int = 3) -> mw.Job:
    """Everything that has state: Adam, a scheduler, dropout, clipping, a ragged last batch."""
    x = torch.randn(43, 6, generator=torch.Generator().manual_seed(1))
    return mw.Job(
        name="dropout",
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
        data=lambda: (x, x.sum(1, keepdim=True)),
        clip_norm=0.5,
        batch_size=8,
        epochs=epochs,
    )


def first_steps(folder: str, devices: int, steps: int) -> Any:
    """Train, saving every step, and stop as a crash would: in the middle of an epoch."""
    job = dropout_job()
    count = {"calls": 0}

    def loss(model: Any, batch: Any) -> Any:
        count["calls"] += 1
        if count["calls"] > steps:
            raise InterruptedError
        return job.loss(model, batch)

    try:
        run_job(replace(job, loss=loss), RunOptions(plan=Plan(data=devices), save_every=1, log_every=1), Path(folder))
    except InterruptedError:
        return True


def the_rest(folder: str, devices: int) -> Any:
    return run_job(dropout_job(), RunOptions(plan=Plan(data=devices), resume=folder, log_every=1), Path(folder))[
        "losses"
    ]


def whole(devices: int) -> Any:
    return run_job(dropout_job(), RunOptions(plan=Plan(data=devices), log_every=4), None)["losses"]


def on(pool: Any, devices: int, case: Any, *arguments: Any) -> Any:
    return case(*arguments) if devices == 1 else pool(devices).run(case, *arguments)[0]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(devices: int, pool: Any, tmp_path: Path) -> None:
    assert on(pool, devices, first_steps, str(tmp_path), devices, 8)
    rest = on(pool, devices, the_rest, str(tmp_path), devices)
    assert rest == on(pool, devices, whole, devices)[8:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 19))


def test_a_run_goes_on_with_another_number_of_devices(pool: Any, tmp_path: Path) -> None:
    plain = replace(dropout_job(), model=lambda: nn.Linear(6, 1))

    def begin(folder: str) -> Any:
        run_job(replace(plain, epochs=1), RunOptions(plan=Plan(data=2), log_every=1), Path(folder))

    def go_on(folder: str, devices: int) -> Any:
        return run_job(plain, RunOptions(plan=Plan(data=devices), resume=folder), Path(folder))["losses"]

    want = run_job(plain, RunOptions(plan=Plan(data=1)), None)["losses"][6:]
    pool(2).run(begin, str(tmp_path / "two"))
    for devices in (1, 2, 3):
        folder = tmp_path / str(devices)
        shutil.copytree(tmp_path / "two", folder)
        torch.testing.assert_close(on(pool, devices, go_on, str(folder), devices), want, rtol=1e-5, atol=1e-7)


def test_the_summary_of_a_resumed_run_is_of_this_session(tmp_path: Path) -> None:
    results = []
    for epochs, resume in ((1, None), (3, tmp_path)):
        names.begin_session(tmp_path, time.time(), job="dropout", world=1)
        results = [run_job(dropout_job(epochs), RunOptions(resume=resume, log_every=1), tmp_path)]
        names.end_session(tmp_path, "finished")
    summary = summarise(results, "Plan()", [WorkerSlot("cpu", None, (), 1)], tmp_path)
    assert (summary.epochs, summary.steps, summary.samples) == (2, 12, 86)
    assert summary.whole is not None and (summary.whole.epochs, summary.whole.steps) == (3, 18)
    assert summary.whole.sessions == 2 and summary.seconds < summary.whole.seconds
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_text(summary, None))
    text = console.export_text()
    assert "finished after 2 epochs and 12 steps more in" in text
    assert re.search(r"in all +3 epochs and 18 steps in 2 sessions, \d", text)
    assert json_value(summary)["whole"]["steps"] == 18
