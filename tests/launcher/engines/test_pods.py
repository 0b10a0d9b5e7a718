"""What a pod does with what was printed: each template is executed by podman, `meshwise run` as its process 1. On one
pod; several wait for a stand-in for the controllers, whose rules tests/pods.py has."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise.launcher.engines.kubernetes import JOB, JOB_SET, TRAIN_JOB, PodJob
from meshwise.launcher.engines.manifest import manifest
from meshwise.launcher.engines.site import Site
from meshwise.records import folder as names
from meshwise.records.checkpoints import checkpoints_in
from tests.kubernetes import faults, read
from tests.pods import Pod, amount, expanded, pod, why_not

SOURCES = Path(__file__).parents[3] / "src"
KINDS = (JOB, JOB_SET, TRAIN_JOB)
TRAIN = """
import os, time
import torch
from torch import nn
import meshwise as mw

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, n):
        time.sleep(0.02)
        return torch.full((4,), n / 64), torch.full((1,), n / 16)

job = mw.Job(
    name="small", model=lambda: nn.Linear(4, 1), data=lambda: Slow(), batch_size=8, epochs=8,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
needs_podman = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "train.py").write_text(TRAIN)
    return tmp_path / "claim"


def things(kind: str, *words: str, **site: Any) -> list[dict[str, Any]]:
    """The printed manifest of a run in /claim of a pod, read back."""
    given = Site(image="this-machine", claim="data", mount="/claim", command="meshwise", shared_memory="256Mi", **site)
    job = PodJob(
        name="small-20261201-120000",
        kind=kind,
        nodes=1,
        workdir="/claim",
        folder="/claim/runs/small",
        words=["--devices", "2xcpu", *words],
        gpus=0,
        command=[sys.executable, "-m", "meshwise"],
        site=given,
        grace=90,
        why="a guess",
    )
    found = read(manifest(replace(job, words=list(words) if "--devices" in words else job.words)))
    assert faults(found) == []
    return found


def started(claim: Path, kind: str, *words: str, **site: Any) -> Any:
    variables = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return pod(things(kind, *words, **site), claim, variables)


@pytest.mark.slow
@pytest.mark.workers
@needs_podman
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_saves_on_term_and_the_next_one_goes_on(kind: str, claim: Path, processes: None) -> None:
    run = claim / "runs" / "small"
    with started(claim, kind, "--log-every", "1", "train.py:job") as one:
        one.until("step 3")
        assert one.stop() == 85
    assert names.read_run(run)["status"] == "stopped"
    saved = checkpoints_in(run / "checkpoint")[-1].step
    assert 3 <= saved < 64
    with started(claim, kind, "--log-every", "1", "train.py:job") as two:
        assert two.wait() == 0, two.shown
    facts = names.read_run(run)
    assert facts["status"] == "finished" and len(facts["sessions"]) == 2
    lines = (run / "metrics.jsonl").read_text().count('"step"')
    assert lines >= 64


@pytest.mark.slow
@pytest.mark.workers
@needs_podman
@pytest.mark.parametrize(
    ("program", "words", "code"),
    [
        ("raise RuntimeError('a mistake')", "--devices 1xcpu train.py", 1),
        ("print(1)", "--devices 3xnone train.py", 2),
        ("print(1)", "--devices 1xcpu gone.py", 2),
        ("print(1)", "--devices 1xcpu train.py", 0),
    ],
)
def test_exit_codes_reach_the_pod(program: str, words: str, code: int, claim: Path, processes: None) -> None:
    (claim / "train.py").write_text(program)
    with started(claim, JOB, *words.split()) as one:
        assert one.wait() == code, one.shown


@pytest.mark.slow
@pytest.mark.workers
@needs_podman
def test_a_run_that_comes_no_step_further_ends_with_93(claim: Path, processes: None) -> None:
    run = claim / "runs" / "small"
    run.mkdir(parents=True)
    sessions = [{"began": 1.0 + n, "ended": 2.0 + n, "status": "failed", "from_step": 0} for n in range(3)]
    facts = {"job": "train.py:job", "status": "failed", "sessions": sessions, "submission": {"sent": 0.5}}
    names.write_run(run, facts)
    with started(claim, JOB_SET, "train.py:job") as one:
        assert one.wait() == 93, one.shown


@pytest.mark.slow
@pytest.mark.workers
@needs_podman
def test_shared_memory_is_as_large_as_was_asked_for(claim: Path, processes: None) -> None:
    (claim / "train.py").write_text(
        "import shutil\nprint('shared', shutil.disk_usage('/dev/shm').total)\n"
        "open('/dev/shm/a', 'wb').write(b'1' * (200 << 20))\n"
    )
    with started(claim, JOB, "--devices", "1xcpu", "train.py") as one:
        assert one.wait() == 0, one.shown
        assert f"shared {amount('256Mi')}" in one.shown


@pytest.mark.slow
@pytest.mark.workers
@needs_podman
def test_a_pod_beyond_its_memory_says_so(claim: Path, processes: None) -> None:
    (claim / "train.py").write_text("x = bytearray(3 << 30)\nx[::4096] = b'1' * len(x[::4096])\nprint('no limit')\n")
    with started(claim, JOB, "--devices", "1xcpu", "--restarts", "0", "train.py", memory="1Gi") as one:
        code, shown = one.wait(), one.shown
    assert "no limit" not in shown
    if code != 137:  # the whole container was killed, as a kubelet has it on newer machines
        assert code == 1 and "was killed by the kernel's out-of-memory killer" in shown


def test_words_are_read_as_kubernetes_reads_them() -> None:
    env = {"A": "1"}
    assert [expanded(word, env) for word in ("$(A)", "$$(A)", "$(B)", "$$$(A)", "a$b")] == [
        "1",
        "$(A)",
        "$(B)",
        "$1",
        "a$b",
    ]


def test_quantities_are_read() -> None:
    assert (amount("8Gi"), amount("500M"), amount("1.5k"), amount("7")) == (8 << 30, 500_000_000, 1500, 7)


def test_why_no_pod_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "podman, crun, unshare not installed: apt-get install" in why_not()
    assert Pod.__doc__
