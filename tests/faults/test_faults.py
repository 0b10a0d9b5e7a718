"""A worker's failure is everyone's answer: shown once, with the culprit, a non-zero exit code, and nobody left over."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import meshwise as mw
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.folder import read_run
from tests.faults.runs import JOBS, CommandRun, run_folder

pytestmark = pytest.mark.usefixtures("processes")

FAULTS = {
    "job_raises": ["rank 1 of 2 failed: ValueError: the planted fault", "rank 1, step 5, phase forward", "in raises"],
    "job_is_killed": ["rank 1 of 2 was killed by SIGKILL"],
    "job_exits": ["rank 1 of 2 left with exit code 0 in the middle of an epoch"],
    "job_exits_everywhere": ["failing called sys.exit(0) on every rank before its end: no weights were saved."],
    "job_exits_at_once": ["jobs_that_fail.py:57: os._exit(0) ended the process before its work was done. Return, or"],
    "job_exits_in_c": ["rank 1 of 2 left with exit code 0 without saying that its work is done"],
    "job_leaves_others": ["jobs_that_fail.py:82: os._exit(0) ended the process before its work was done. Return, or"],
    "job_out_of_memory": ["rank 1 of 2 failed: RuntimeError", "phase forward", "allocated ", "reserved ", "free "],
    "job_not_a_number": ["step 5: the loss is nan on rank 1"],
}


QUICK = {"job_raises", "job_is_killed"}


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[] if job in QUICK else pytest.mark.slow) for job in sorted(FAULTS)]
)
def test_the_culprit_is_named_once_and_nobody_is_left(job: str, tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:{job}", "--devices", "2xcpu", "--log-every", "10", "--restarts", "0", out=tmp_path)
    assert run.wait() == 1
    for text in FAULTS[job]:
        assert run.output.count(text) == 1, run.output
    assert run.output.count("Traceback") == (job in ("job_raises", "job_out_of_memory"))
    assert "Connection closed" not in run.output  # the victim's error is nobody's business
    assert run.left_over() == []
    assert read_run(run_folder(tmp_path))["status"] == "failed"


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_goes_on_from_its_last_saved_state(tmp_path: Path) -> None:
    words = ("--devices", "2xcpu", "--epochs", "1", "--save-every", "2", "--restarts", "0")
    run = CommandRun(f"{JOBS}:job_is_killed", *words, out=tmp_path)
    assert run.wait() == 1
    folder = run_folder(tmp_path)
    again = CommandRun("--resume", str(folder), out=tmp_path / "again", fail_step=-1)
    assert again.wait() == 0, again.output
    assert read_run(folder)["status"] == "finished"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_stop_saves_the_state_and_says_how_to_go_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    run.send(number)
    assert run.wait() == code, run.output
    folder = run_folder(tmp_path)
    assert f"meshwise run --resume {folder}" in run.output
    by = {130: "Ctrl-C", 143: "SIGTERM", 129: "a closed terminal"}[code]
    assert re.search(rf"^stopped by {by} after step \d+ \(epoch 1\)$", run.output, re.MULTILINE)
    assert read_run(folder)["status"] == "stopped"
    assert len(checkpoints_in(folder / "checkpoint")) == 1
    assert run.left_over() == []


LOOP = """
import time, torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD([model.weight], 0.1), torch.optim.SGD([model.bias], 0.1)]
data = torch.utils.data.TensorDataset(torch.ones(4000, 4))
model, first, second, loader = mw.distribute(
    model, *optimizers, torch.utils.data.DataLoader(data, batch_size=8)
)
for step, (x,) in enumerate(loader):
    mw.backward(model(x).mean())
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    if step == 10:
        print("ten steps", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_script_that_is_stopped_ends_on_all_ranks_and_keeps_its_records(tmp_path: Path) -> None:
    """Two optimizers on one model, too: each steps on the gradients of the same backward."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(script), out=tmp_path)
    run.wait_for("ten steps")
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert "Traceback" not in run.output and "meshwise report" in run.output
    folder = run_folder(tmp_path)
    report = mw.report(folder)
    assert report.status == "stopped" and report.missing == [] and report.steps > 10
    assert f"stopped by Ctrl-C after step {report.steps} (epoch 1)" in run.output
    assert len({rank.steps for rank in report.ranks}) == 1
    assert run.left_over() == []


PLAIN = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
print("no step yet", flush=True)
if "late" in FAULTS:
    time.sleep(100)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = DataLoader(TensorDataset(torch.ones(8000, 4)), batch_size=8)
for step, (x,) in enumerate(batches if "loader" in FAULTS else [(torch.ones(8, 4),)] * 1000):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 10:
        print("ten steps", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", "loader", "no loader"])
def test_a_script_that_knows_nothing_of_meshwise_is_stopped_too(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(f"FAULTS = {[kind]}{PLAIN}")
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(script), out=tmp_path)
    run.wait_for("no step yet" if kind == "late" else "ten steps")
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert "Traceback" not in run.output
    folder = run_folder(tmp_path)
    unfinished = kind == "no loader"  # it stops before the optimizer: that step's forward and backward are reported
    after = "" if kind == "late" else f" after step {mw.report(folder).steps - unfinished}"
    assert f"stopped by Ctrl-C{after}\n" in run.output
    assert read_run(folder)["status"] == "stopped"
    assert run.left_over() == []


PARTING = """
import torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(103, 4))
loader, held_out = (torch.utils.data.DataLoader(data, batch_size=16) for _ in range(2))
model, optimizer, loader, held_out = mw.distribute(model, optimizer, loader, held_out)
for epoch in range(2):
    for step, (x,) in enumerate(loader):
        mw.backward(model(x).mean())
        optimizer.step(); optimizer.zero_grad()
        if "break" in FAULTS and mw.rank() == 0 and step == 3:
            break
    if "sum" in FAULTS and mw.rank() == 0:
        print(mw.sum(1))
if "evaluation" in FAULTS and mw.rank() == 0:
    print(sum(len(x) for x, in held_out), "of 103")
"""
PARTED = {
    "evaluation": "rank 0 reached batch 1 of the loop at parting.py:17; rank 1 ended.",
    "break": "rank 0 left its loop at parting.py:13 after 4 batches and reached batch 1 of the loop at parting.py:9; "
    "rank 1 reached batch 5 of the loop at parting.py:9.",
    "sum": "rank 0 reached mw.sum at parting.py:15; rank 1 reached batch 1 of the loop at parting.py:9.",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault == "evaluation" else pytest.mark.slow) for fault in PARTED]
)
def test_ranks_that_part_end_in_one_sentence(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it: a silent `52 of 103`, batches of two epochs in one step, or gloo's abort."""
    monkeypatch.chdir(tmp_path)
    Path("parting.py").write_text(f"FAULTS = {[fault]}{PARTING}")
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), "parting.py", out=tmp_path)
    assert run.wait() == 1, run.output
    assert f"Ranks diverged: {PARTED[fault]} Every rank must make the same calls" in run.output
    assert not {"Traceback", "gloo", "SIGABRT"} & set(run.output.split())
    assert run.left_over() == []


@pytest.mark.slow
def test_a_stop_in_the_first_second_is_heard(tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", out=tmp_path)
    run.wait_for("Plan(data=2)")
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.left_over() == []


def test_a_killed_launcher_leaves_no_workers(tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_long", "--devices", "2xcpu", "--log-every", "20", out=tmp_path)
    run.wait_for("step  40/500")
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert run.left_over() == []


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_and_keeps_its_state(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "meshwise",
        "run",
        f"{JOBS}:job_long",
        "--devices",
        "2xcpu",
        "--out",
        str(tmp_path),
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    while not list(tmp_path.glob("*/metrics.jsonl")):
        os.read(terminal, 65536)
    os.close(terminal)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (folder,) = tmp_path.iterdir()
    assert read_run(folder)["status"] == "stopped"
    assert len(checkpoints_in(folder / "checkpoint")) == 1
