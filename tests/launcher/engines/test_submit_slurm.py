"""What `meshwise submit` sends, run as it was sent on a real Slurm: again after 85, and once; never after `stop`."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
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


def prepare(folder: Path) -> Path:
    (folder / "small.py").write_text(JOB)
    (folder / "site.toml").write_text(f'devices = "1xcpu"\ncommand = "{sys.executable} -m meshwise"\n')
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return prepare(tmp_path)


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


def begin_undisturbed(here: Path) -> subprocess.Popen[bytes]:
    words = ["run", "small.py:job", "--devices", "2xcpu", "--folder", "whole"]
    return subprocess.Popen([sys.executable, "-m", "meshwise", *words], cwd=here, stdout=subprocess.DEVNULL)


def test_a_run_that_is_warned_starts_again_once_and_ends_with_the_same_numbers(here: Path) -> None:
    with slurm(2) as cluster:
        run, job = sent(cluster, here, "--nodes", "2", "--log-every", "10")
        until(lambda: trains(run), 90, "it never trained")
        cluster.call("scancel", "--signal=USR1", job)
        whole = begin_undisturbed(here)  # while Slurm lets it wait
        until(lambda: names.read_run(run)["status"] == "finished", 120, "it did not go on")
        until(lambda: job not in cluster.call("squeue", "-h", "-o", "%i").stdout.split(), 30, "it is still queued")
    facts = names.read_run(run)
    first, second = facts["sessions"]
    assert (first["status"], second["status"]) == ("stopped", "finished")
    assert (first["start"], second["start"], second["scheduler_job"]) == (1, 2, job)
    assert "SIGUSR1" in first["reason"] and second["from_step"] > 0
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert whole.wait(timeout=120) == 0
    after, undisturbed = (load_file(folder / "weights.safetensors") for folder in (run, here / "whole"))
    assert all(torch.equal(value, after[name]) for name, value in undisturbed.items())


@pytest.mark.slow
def test_a_run_that_is_stopped_or_cancelled_is_never_started_again(here: Path) -> None:
    (here / "small.py").write_text(JOB.replace("0.02", "0.1"))  # both last until they are stopped
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


def lose_a_node(cluster: Slurm, here: Path, lost: str) -> tuple[Path, str, dict[str, float]]:
    """A run that goes on without one of three nodes: its folder, what its job shows, seconds from the loss."""
    run, job = sent(cluster, here, "--nodes", "2-3", "--exact-random")
    until(lambda: trains(run), 90, "it never trained")
    output, metrics, seconds = run / f"slurm-{job}.out", run / "metrics.jsonl", dict[str, float]()
    kill = "ip netns pids n3 | xargs kill -9" if lost == "killed" else "ip link set v3 down"
    began = time.monotonic()

    def took(what: str, true: Callable[[], Any]) -> None:
        until(true, 90, f"no {what}")
        seconds[what] = round(time.monotonic() - began, 1)

    cluster.call("bash", "-c", kill)
    took("lost", lambda: "is lost" in output.read_text())
    took("second srun", lambda: "only n1 n2 answer" in output.read_text())
    before = set(metrics.read_text().splitlines())
    took("first step", lambda: set(metrics.read_text().splitlines()) - before)
    until(lambda: names.read_run(run)["status"] == "finished", 150, "it did not end")
    cluster.wait(job, "COMPLETING", "COMPLETED")  # what runs on the lost node cannot be ended
    return run, output.read_text(), seconds


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["killed", "cut off"])
def test_a_range_of_nodes_goes_on_without_a_lost_one_before_slurm_knows_of_it(lost: str, here: Path) -> None:
    with slurm(3, timeout=300) as cluster:
        run, shown, seconds = lose_a_node(cluster, here, lost)
    print(f"seconds from the loss: {seconds}")
    assert "nodes n1 n2 n3: only n1 n2 answer" in shown, shown
    first, second = names.read_run(run)["sessions"]
    assert first["reason"].startswith("machine 2 of 3 (rank 2) is lost") and second["status"] == "finished"
    assert steps_of(run) == list(range(1, STEPS + 1))
    words = ["run", "small.py:job", "--devices", "1xcpu", "--exact-random", "--folder", "whole"]
    subprocess.run([sys.executable, "-m", "meshwise", *words], cwd=here, check=True, stdout=subprocess.DEVNULL)
    after, undisturbed = (load_file(folder / "weights.safetensors") for folder in (run, here / "whole"))
    assert all(torch.allclose(value, after[name], rtol=0, atol=1e-9) for name, value in undisturbed.items())


LOOP = """
import os, torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), 8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (x,) in loader:
    mw.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
print("done by", os.getuid(), "on", mw.world_size(), "ranks,", os.environ["SITE"])
"""
PRINTED = {
    "a job on two nodes": ((), ("--nodes", "2", "--epochs", "1", "small.py:job"), "gpu:h100:2"),
    "a loop": (('gpus = "gres"',), ("loop.py", "--lr", "it's 0.1"), "gpu:h100:2"),
    "a range of nodes": (('gpus = "none"',), ("--nodes", "1-2", "--time", "5min", "loop.py"), ""),
}


@pytest.mark.slow
def test_scripts_run_as_they_were_printed_for_a_plain_user_who_asks_for_gpus(here: Path) -> None:
    """The GPUs are such to Slurm alone; the home is one that no other user can enter, as a site's should be."""
    nobody = pwd.getpwnam("nobody").pw_uid
    with tempfile.TemporaryDirectory() as made, slurm(2, gpus="h100:2") as cluster:
        home = Path(made)
        os.chown(home, nobody, -1)
        jobs = {}
        for number, (name, (more, words, _)) in enumerate(PRINTED.items()):
            folder = home / f"job {number}"
            folder.mkdir()
            for file, text in (("small.py", JOB), ("loop.py", LOOP)):
                (folder / file).write_text(text)
            site = [f'command = "{sys.executable} -m meshwise"', 'gpu_type = "h100"', "gpus_per_node = 2"]
            site += ['partition = "main"', 'setup = ["export SITE=here"]', *more]
            (folder / "site.toml").write_text("\n".join(site))
            os.chown(folder, nobody, -1)
            command = [sys.executable, "-m", "meshwise", "submit", "--dry-run", *words]
            done = cluster.call(*command, folder=folder, user="nobody", HOME=str(home))
            script = done.stdout[done.stdout.index("#!/bin/bash") :]
            (folder / "printed.sh").write_text(script)
            sent = cluster.call("sbatch", "--parsable", "printed.sh", folder=folder, user="nobody", HOME=str(home))
            jobs[name] = sent.stdout.strip(), folder
        for name, (job, folder) in jobs.items():
            facts = cluster.wait(job, limit=150)
            output = (folder / f"slurm-{job}.out").read_text()
            assert facts["JobState"] == "COMPLETED" and facts["UserId"].startswith("nobody"), output
            tres = facts.get("TresPerNode", "").removeprefix("gres")  # gres:gpu:…, from Slurm 23.11 on gres/gpu:…
            assert tres[1:] == PRINTED[name][2]
            (run,) = (folder / "runs").glob("*/")
            assert names.read_run(run)["status"] == "finished" and run.stat().st_uid == nobody
            if "loop.py" in PRINTED[name][1]:
                assert f"done by {nobody} on {1 if name == 'a loop' else 2} ranks, here" in output, output
        words = ["submit", "--devices", "9xcuda", "--out", "others", "small.py:job"]
        refused = cluster.call(
            sys.executable, "-m", "meshwise", *words, folder=home / "job 0", user="nobody", HOME=str(home)
        )
    assert refused.returncode == 1 and refused.stdout.count("Requested node configuration is not available") == 1
    assert "Traceback" not in refused.stdout
