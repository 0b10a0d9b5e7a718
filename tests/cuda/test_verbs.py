"""Every command on fake GPUs: it does what it does on CPU workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = f"{Path(__file__).with_name('jobs.py')}:decoder"
Run = Callable[..., Any]


@pytest.fixture
def run_folder(meshwise: Run, tmp_path: Path) -> Path:
    meshwise("run", JOB, "--devices", "2xcuda", "--save-every", "3")
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_a_run_is_reported_listed_verified_resumed_on_fewer_devices_and_predicts(
    meshwise: Run, run_folder: Path
) -> None:
    report = json.loads(meshwise("report", run_folder, "--json").stdout)
    assert [rank["device"] for rank in report["ranks"]] == ["NVIDIA A100-SXM4-80GB"] * 2
    assert meshwise("report", run_folder, "--html").returncode == 0 and (run_folder / "report.html").exists()
    assert "whole" in meshwise("checkpoints", run_folder, "--verify").stdout
    assert "finished" in meshwise("runs").stdout
    meshwise("run", "--resume", run_folder, "--epochs", "2", "--devices", "1xcuda")


def test_a_check_on_gpus_says_equal(meshwise: Run) -> None:
    assert "equal" in meshwise("check", JOB, "--devices", "2xcuda", "--set", "shard=2").stdout


def test_devices_names_what_was_asked_for(meshwise: Run, fake: Run) -> None:
    fake(gpu="H100", devices=8)
    said = meshwise("devices").stdout
    assert "cuda:0-7" in said and "H100" in said and "80.0 GiB" in said, said


def test_a_plan_that_was_chosen_here_is_run_here(meshwise: Run) -> None:
    """The rehearsal's stand-in for a GPU hid the GPUs from the run that followed it."""
    assert "finished after" in meshwise("run", JOB, "--plan", "auto", timeout=400).stdout


def test_a_killed_rank_is_started_again_on_its_device(meshwise: Run, tmp_path: Path) -> None:
    """The system shows no fake GPU on its bus, as in some containers: none is taken for lost."""
    said = meshwise("run", JOB, "--devices", "2xcuda", "--fault", "kill:rank=1,step=4").stdout
    assert "was killed by SIGKILL" in said and "finished after" in said


def test_what_does_not_fit_is_said_with_the_remedy(meshwise: Run, fake: Run) -> None:
    fake(memory=24)
    done = meshwise("run", "gpt", "--devices", "1xcuda", "--restarts", "0", check=False)
    assert done.returncode == 1
    assert "out of memory" in (done.stdout + done.stderr).lower() and "Traceback" not in done.stdout


def test_arrays_and_copies_between_devices_are_right(program: Run) -> None:
    program("""
import numpy as np, torch, meshwise as mw
xp = mw.array_namespace("cuda")
a = np.arange(24.0).reshape(6, 4)
x = xp.asarray(a)
pairs = ((x + 1, a + 1), (x @ x.T, a @ a.T), (xp.sum(x, axis=0), a.sum(0)), (xp.sort(-x, axis=1), np.sort(-a, axis=1)))
for ours, theirs in pairs:
    np.testing.assert_allclose(np.asarray(ours.numpy()), theirs)
src = torch.arange(1e6, device="cuda:0")
dst = torch.empty(10**6, device="cuda:1")
mw.copy(dst, src, verify=True)
assert torch.equal(dst.cpu(), src.cpu())
parts = mw.scatter(src, ["cuda:0", "cuda:1"])
assert torch.equal(mw.gather(parts, "cuda:1").cpu(), src.cpu())
""", devices=2, schedule="random", seed=4)  # fmt: skip
