"""A scheduler's signals: however often they come, and whether to one process or to all, every rank ends after the same
step with its state saved. Of workers/stopping.py and torch_compat/loaders.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from meshwise.launcher.supervise import Viewer, forwarded_signals
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.folder import read_run
from meshwise.reports.views.live_progress import LiveView
from meshwise.spec.exit_codes import AGAIN, INTERRUPTED, code_of_stop
from meshwise.workers.gate import Halt
from tests.faults.runs import JOBS, LOOP_WITHOUT_STATE, CommandRun, as_at_a_limit, run_folder
from tests.hosts import free_port

pytestmark = pytest.mark.usefixtures("processes")

LOOP = LOOP_WITHOUT_STATE.replace("data, 8)", "data, 8, num_workers=1)")


def test_a_time_limit_of_slurm_saves_a_job_and_every_process_lives_until_then(tmp_path: Path) -> None:
    job = f"{JOBS}:job_long_with_loader_workers"
    run = CommandRun(job, "--devices", "2xcpu", "--log-every", "20", out=tmp_path, SLURM_JOB_ID="7")
    run.wait_for("step  40/500")
    launcher = psutil.Process(run.process.pid)
    as_at_a_limit([launcher, *launcher.children(recursive=True)])
    assert run.wait() == AGAIN, run.output
    assert "stopped by SIGTERM after step" in run.output and "killed" not in run.output
    assert read_run(run_folder(tmp_path))["status"] == "stopped"
    assert run.left_over() == []


def test_two_hundred_signals_to_each_process_stop_a_run_once(tmp_path: Path) -> None:
    """A handler that takes a lock waits for itself where the next signal comes meanwhile: for ever."""
    run = CommandRun(f"{JOBS}:job_long_with_loader_workers", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    launcher = psutil.Process(run.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        for _ in range(200):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
    assert run.wait() == AGAIN, run.output
    assert "stopped by SIGUSR1 after step" in run.output and "killed" not in run.output
    assert read_run(run_folder(tmp_path))["status"] == "stopped"


def test_a_ctrl_c_that_goes_to_every_process_saves_as_one_that_goes_to_the_launcher(tmp_path: Path) -> None:
    """`scancel -s INT` sends it so."""
    run = CommandRun(f"{JOBS}:job_long_with_loader_workers", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    launcher = psutil.Process(run.process.pid)
    for process in (*reversed(launcher.children(recursive=True)), launcher):
        process.send_signal(signal.SIGINT)
    assert run.wait() == INTERRUPTED, run.output
    assert "stopped by Ctrl-C after step" in run.output
    assert read_run(run_folder(tmp_path))["status"] == "stopped"
    assert checkpoints_in(run_folder(tmp_path) / "checkpoint"), "nothing was saved"


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["SIGTERM", "two Ctrl-C"])
def test_a_run_whose_fork_server_is_stopped_ends_as_any_other(signals: list[signal.Signals], tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    (server,) = psutil.Process(run.process.pid).children()
    server.suspend()
    for number in signals:
        run.send(number)
        time.sleep(0.5)
    assert run.wait() == code_of_stop(signals[0]), run.output
    assert read_run(run_folder(tmp_path))["status"] == "stopped"
    assert run.left_over() == []


@pytest.mark.parametrize(("asked", "presses"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_ctrl_c_that_a_rank_has_passed_on_is_not_the_first_of_two(asked: signal.Signals, presses: int) -> None:
    halt = Halt()
    with forwarded_signals(halt, LiveView(Console())):
        halt.ask(asked)
        for press in range(presses):
            assert not halt.at_once, press
            signal.raise_signal(signal.SIGINT)
        assert halt.at_once


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_saves_and_asks_to_be_started_again(number: signal.Signals, tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    run.send(number)
    assert run.wait() == AGAIN, run.output
    assert f"stopped by {number.name} after step" in run.output


@pytest.mark.slow
def test_a_time_limit_of_our_own(tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", "--time-limit", "12s", out=tmp_path)
    assert run.wait() == AGAIN, run.output
    assert "stopped by its time limit" in run.output
    assert read_run(run_folder(tmp_path))["status"] == "stopped"


@pytest.mark.parametrize("to", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_a_loop_of_ones_own_that_srun_started_ends_on_all_ranks_after_the_same_step(to: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    common |= {"LOCAL_WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}
    ranks = []
    for rank in range(2):
        with (tmp_path / f"{rank}.log").open("wb") as log:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(psutil.Popen([sys.executable, str(script)], env=common | own, stdout=log, stderr=log))
    deadline = time.monotonic() + 60
    while "ten steps" not in (tmp_path / "1.log").read_text():
        assert time.monotonic() < deadline and ranks[1].poll() is None, (tmp_path / "1.log").read_text()
        time.sleep(0.02)
    if to == "all":
        each = [process for rank in ranks for process in (rank, *rank.children(recursive=True))]
        for _ in range(100):  # a burst
            as_at_a_limit(each)
    else:
        ranks[1].send_signal(signal.SIGUSR1)
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [AGAIN, AGAIN]
    finally:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess, subprocess.SubprocessError):
                rank.kill()
    outputs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    ends = [line for output in outputs for line in output.splitlines() if line.startswith("ended after")]
    assert len(ends) == 2 and len(set(ends)) == 1, outputs
    assert "Traceback" not in "".join(outputs)
    assert "ends after the same step; no state is saved\n" in "".join(outputs)


OWN_LOOP = """
import torch
import meshwise as mw

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = mw.distribute(model, optimizer)
saved = mw.checkpoint({folder!r}, model=model, optimizer=optimizer) if {saves} else None
for step in range(100_000):
    (x,) = mw.split(torch.randn(8, 4)),
    mw.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    if {tells}:
        saved.step_done()
    if step == 40:
        mw.print("far enough", flush=True)
"""


@pytest.mark.parametrize("saves", [False, True])
def test_a_stop_of_a_trainer_that_saves_is_not_told_that_no_state_is_saved(saves: bool) -> None:
    said, halt = list[str](), Halt()
    halt.ask(signal.SIGTERM)
    view: Any = SimpleNamespace(print=said.append)
    started: Any = SimpleNamespace(restarts=SimpleNamespace(resumable=False), slots=["cpu"])
    viewer = Viewer(view, started, halt, live=False)
    viewer.message(0, {"kind": "stopping", "step": 23, "epoch": 3, "saves": saves})
    assert said[0] == "stopped by SIGTERM after step 23 (epoch 3)"
    assert said[1:] == ([] if saves else ["no state is saved: the script has not called mw.checkpoint."])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "tells", "said"),
    [
        (False, False, "no state is saved: the script has not called mw.checkpoint."),
        (True, True, ""),
        (
            True,
            False,
            "stopped before saved.step_done(), which a loop without a loader calls after each step: no state",
        ),
    ],
)
def test_a_ctrl_c_ends_a_loop_without_a_loader(saves: bool, tells: bool, said: str, tmp_path: Path) -> None:
    script, state = tmp_path / "own.py", tmp_path / "state"
    script.write_text(OWN_LOOP.format(folder=str(state), saves=saves, tells=tells))
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(script), out=tmp_path)
    run.wait_for("far enough")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == INTERRUPTED, run.output
    assert "stopped by Ctrl-C after step" in run.output and said in run.output
    assert ("has not called mw.checkpoint" in run.output) is not saves
    assert bool(list(state.glob("step-*"))) is (saves and tells)
