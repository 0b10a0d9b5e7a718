"""The same command under torchrun, and on two machines that meet. Of launcher/joined.py,
training/recording/joined_run.py and workers/divergence.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.records.attempts import attempts_of
from meshwise.records.folder import read_run
from tests.hosts import free_port

pytestmark = pytest.mark.usefixtures("processes")

JOB = """
import torch
from torch import nn
import meshwise as mw

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
job = mw.Job(
    name="small", model=lambda: nn.Linear(4, 1), data=lambda: (x, x.sum(1, keepdim=True)), batch_size=8, epochs=2,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))

def failing():
    def loss(model, batch):
        if mw.rank() == 1:
            raise ValueError("the planted fault")
        return job.loss(model, batch)
    return mw.Job(**{**vars(job), "loss": loss})
"""
LOOP = """
import os, signal, sys, time, torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(8000, 4))
model, optimizer, loader = mw.distribute(model, optimizer, torch.utils.data.DataLoader(data, 8))
saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=loader)
if sys.argv[1] == "again":
    sys.exit(print("goes on" if saved.restored else "begins anew"))
for step, (x,) in enumerate(loader, 1):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5 and mw.rank() == 1:
        print("rank 1 is here", flush=True)
        if sys.argv[1] == "raises":
            raise ValueError("the planted fault")
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0.01)
"""
MESHWISE = [sys.executable, "-m", "meshwise", "run"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(JOB)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def losses(out: Path) -> list[float]:
    (folder,) = out.iterdir()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records]


def finished(command: list[str], here: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=here, env=os.environ | environment, capture_output=True, text=True, timeout=120)


ENDING = "from meshwise.workers.join import join\njoin()\n"


def test_ranks_of_another_launcher_end_well(here: Path) -> None:
    """A thread that waits in the store while Python ends would take the process with it, by SIGABRT."""
    (here / "ends.py").write_text(ENDING)
    assert ranks_by_hand(["ends.py"], here, 3) == [0, 0, 0]


def test_ranks_of_mpirun_meet_though_nothing_says_where(here: Path) -> None:
    (here / "ends.py").write_text(ENDING)
    where = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": str(here)}
    where |= {"MESHWISE_DEVICE": "cpu"}
    ranks = []
    for rank in map(str, range(3)):
        environment = os.environ | where | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        ranks.append(subprocess.Popen([sys.executable, "ends.py"], cwd=here, env=environment))
    assert [process.wait(timeout=120) for process in ranks] == [0, 0, 0]


def ranks_by_hand(words: list[str], here: Path, size: int, **environment: str) -> list[int]:
    """Exit codes of ranks that nobody looks at: RANK and the like are all that they get."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | environment
    where |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MESHWISE_DEVICE": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words], cwd=here, env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(size)
    ]
    return [process.wait(timeout=120) for process in ranks]


ENDS = {
    "SIGUSR1": ([85, 85], "stopped", r"SIGUSR1 after step \d+ \(epoch 1\)", "goes on"),
    "raises": ([1, 1], "failed", "rank 1 failed: ValueError: the planted fault", "begins anew"),
    "SIGKILL": (
        [85, -9],
        "failed",
        "rank 1 of 2 disappeared: killed, or lost with the machine.*",
        "begins anew",
    ),
}


@pytest.mark.parametrize(
    "ends", ["SIGUSR1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("raises", "SIGKILL"))]
)
def test_a_loop_whose_ranks_another_launcher_started_keeps_the_records_of_a_run(ends: str, here: Path) -> None:
    words = ["-m", "meshwise", "run", "--folder", "run", "loop.py"]
    codes, status, reason, then = ENDS[ends]
    assert ranks_by_hand([*words, ends], here, 2) == codes
    assert ranks_by_hand([*words, "again"], here, 2) == [0, 0]
    first, second = attempts_of(read_run(here / "run"))
    assert (first.status, second.status) == (status, "finished")
    assert re.fullmatch(reason, first.reason), first.reason
    log = "".join((here / "run" / "workers" / name).read_text() for name in ("rank1.log", "rank1.2.log"))
    assert re.findall("begins on|rank 1 is here|ValueError: the|goes on|begins anew", log) == [
        *("begins on", "rank 1 is here", *["ValueError: the"] * (ends == "raises")),
        *("begins on", then),
    ]
    assert {path.name for path in (here / "run" / "spans").iterdir()} >= {"rank0.jsonl", "rank1.2.jsonl"}


@pytest.mark.slow
def test_a_loop_without_our_command_keeps_records_where_a_folder_is_named(here: Path) -> None:
    for word, codes in (("SIGUSR1", [85, 85]), ("again", [0, 0])):
        assert ranks_by_hand(["loop.py", word], here, 2, MESHWISE_RUN=str(here / "run")) == codes
    assert [one.status for one in attempts_of(read_run(here / "run"))] == ["stopped", "finished"]
    assert "goes on" in (here / "run" / "workers" / "rank1.2.log").read_text()


@pytest.mark.slow
def test_torchrun_and_our_launcher_give_the_same_losses(here: Path) -> None:
    ours = finished([*MESHWISE, "small.py:job", "--devices", "2xcpu", "--out", "ours"], here)
    assert ours.returncode == 0, ours.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwise", "run"]
    theirs = finished([*torchrun, "small.py:job", "--out", "theirs"], here, GLOO_SOCKET_IFNAME="lo")
    assert theirs.returncode == 0, theirs.stderr
    assert losses(here / "ours") == losses(here / "theirs") != []
    assert theirs.stdout.count("finished after 2 epochs") == 1


def two_machines(job: str, here: Path) -> list[tuple[int, str]]:
    """Two launchers on this machine, as if each were a machine of its own: exit codes and what they showed."""
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--devices", "1xcpu"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [*MESHWISE, job, *meeting, "--node-rank", str(node), "--out", f"node{node}"],
            cwd=here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    shown = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, shown, strict=True)]


@pytest.mark.slow
def test_agents_of_torchrun_that_start_one_process_each_launch_the_workers_there(here: Path) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    run = ["-m", "meshwise", "run", "small.py:job", "--devices", "2xcpu", "--out", "runs"]
    agents = [
        subprocess.Popen([*agent, "--node-rank", str(node), *run], cwd=here, stdout=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    shown = [process.communicate(timeout=120)[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], shown
    assert "torchrun, 2 nodes × 2 devices, attempt 1" in shown[0] and "Plan(data=4)" in shown[0]
    assert [text.count("finished after 2 epochs") for text in shown] == [1, 0]


def test_two_machines_make_one_run(here: Path) -> None:
    ended = two_machines("small.py:job", here)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "Plan(data=2)" in ended[0][1] and len(losses(here / "node0")) == 16


@pytest.mark.slow
def test_a_failure_on_one_machine_ends_the_other_and_is_told_there(here: Path) -> None:
    ended = two_machines("small.py:failing", here)
    assert [code for code, _ in ended] == [1, 1]
    assert "rank 1 of 2 failed: ValueError: the planted fault" in ended[1][1]
    assert "on another machine:" in ended[0][1] and "the planted fault" in ended[0][1]
