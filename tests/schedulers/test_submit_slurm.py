"""What `meshwise submit` sends, run as it was sent on a real Slurm: again after 85, and once; never after `stop`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwise.records import folder as names
from tests.slurm import Slurm, slurm, why_not

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

JOB = """
import time
import torch
from torch import nn
import meshwise as mw

x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

def loss(model, batch):
    time.sleep(0.02)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

job = mw.Job(
    name="small", data=lambda: (x, x.sum(1, keepdim=True)), batch_size=8, epochs=6, loss=loss,
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)).double(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
"""
STEPS = 300


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(JOB)
    (tmp_path / "site.toml").write_text(f'devices = "1xcpu"\ncommand = "{sys.executable} -m meshwise"\n')
    return tmp_path


def typed(cluster: Slurm, here: Path, *words: str) -> str:
    done = cluster.call(sys.executable, "-m", "meshwise", *words, folder=here)
    assert done.returncode == 0, done.stdout
    return done.stdout


def sent(cluster: Slurm, here: Path, *words: str) -> tuple[Path, str]:
    """Send the job; its run folder, and the number of its job."""
    before = set((here / "runs").glob("*"))
    typed(cluster, here, "submit", "small.py:job", *words)
    (run,) = set((here / "runs").glob("*")) - before
    (job,) = names.read_run(run)["submission"]["jobs"]
    return run, job


def until(true: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.3)


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for line in lines if "loss" in (record := json.loads(line))]


def trains(run: Path) -> bool:
    """Whether it has come a few steps further than where it began."""
    facts = names.read_run(run)
    return facts["status"] == "running" and "from_step" in facts["sessions"][-1] and len(steps_of(run)) > 20


def undisturbed(here: Path) -> dict[str, torch.Tensor]:
    words = ["run", "small.py:job", "--devices", "2xcpu", "--folder", "whole"]
    subprocess.run([sys.executable, "-m", "meshwise", *words], cwd=here, check=True, timeout=120, env=os.environ)
    return load_file(here / "whole" / "weights.safetensors")


def test_a_run_that_is_warned_starts_again_once_and_ends_with_the_same_numbers(here: Path) -> None:
    with slurm(2) as cluster:
        run, job = sent(cluster, here, "--nodes", "2", "--log-every", "10")
        until(lambda: trains(run), 90, "it never trained")
        cluster.call("scancel", "--signal=USR1", job)
        until(lambda: names.read_run(run)["status"] == "finished", 120, "it did not go on")
        until(lambda: job not in cluster.call("squeue", "-h", "-o", "%i").stdout.split(), 30, "it is still queued")
    facts = names.read_run(run)
    first, second = facts["sessions"]
    assert (first["status"], second["status"]) == ("stopped", "finished")
    assert (first["start"], second["start"], second["scheduler_job"]) == (1, 2, job)
    assert "SIGUSR1" in first["reason"] and second["from_step"] > 0
    assert steps_of(run) == list(range(1, STEPS + 1))
    after = load_file(run / "weights.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in undisturbed(here).items())


@pytest.mark.slow
def test_a_run_that_is_stopped_or_cancelled_is_never_started_again(here: Path) -> None:
    with slurm(2) as cluster:
        (stopped, _), (cancelled, job) = sent(cluster, here), sent(cluster, here)
        until(lambda: trains(stopped) and trains(cancelled), 120, "they never trained")
        assert "asked to save and to end" in typed(cluster, here, "stop", stopped.name)
        cluster.call("scancel", job)
        until(lambda: not cluster.call("squeue", "-h", "-o", "%i").stdout.split(), 60, "they are still queued")
        time.sleep(15)  # longer than Slurm needs to start a requeued job
        assert not cluster.call("squeue", "-h", "-o", "%i").stdout.split()
        for run in (stopped, cancelled):
            assert names.read_run(run)["status"] == "stopped" and len(names.read_run(run)["sessions"]) == 1
            assert (run / "checkpoint").is_dir()
        typed(cluster, here, "submit", str(stopped))
        until(lambda: names.read_run(stopped)["status"] == "finished", 120, "it did not go on")
    assert steps_of(stopped) == list(range(1, STEPS + 1))
