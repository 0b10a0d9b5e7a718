"""The kernel's out-of-memory killer is called that where something says so, and only there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwise.workers.control_groups import evidence, kills
from meshwise.workers.failure import by_exit_status, sentence
from meshwise.workers.fork_server import LISTENS


@pytest.fixture
def counters(tmp_path: Path) -> dict[str, Path]:
    """Files as the kernel has them, of a process in the group `box`, of version 2."""
    (tmp_path / "box").mkdir()
    (tmp_path / "own").write_text("0::/box\n")
    (tmp_path / "box" / "memory.events").write_text("low 0\noom 0\noom_kill 3\n")
    (tmp_path / "vmstat").write_text("pgfault 5\noom_kill 7\n")
    return {"root": tmp_path, "own": tmp_path / "own", "statistics": tmp_path / "vmstat"}


def test_what_the_group_counts_is_said(counters: dict[str, Path], tmp_path: Path) -> None:
    before = kills(**counters)
    assert before == (3, 7)
    (tmp_path / "box" / "memory.events").write_text("oom_kill 4\n")
    said = evidence(before, kills(**counters))
    assert said == "1 killed in its control group since the run began"
    failure = by_exit_status(1, -9, lambda: said)
    assert sentence(failure, 2) == (
        "rank 1 of 2 was killed by the kernel's out-of-memory killer (SIGKILL; 1 killed in its control group "
        "since the run began). Reduce the memory that the ranks of this machine use, or give them more memory."
    )


def test_another_killer_is_not_called_that(counters: dict[str, Path]) -> None:
    before = kills(**counters)
    assert evidence(before, kills(**counters)) == ""
    assert by_exit_status(1, -9, lambda: "").message == "was killed by SIGKILL"
    assert "often" in by_exit_status(1, -9).message  # where nothing is known
    assert evidence((None, None), (None, None)) is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that allows 1.5 GB."""
    versions = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    for root, limit in versions.items():
        group = Path(root) / f"meshwise-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(1500 << 20))
                yield group
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group of memory can be made here")


def run_in(group: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`meshwise run` inside a control group."""
    text = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    alone = {name: value for name, value in os.environ.items() if name != LISTENS}  # the kept server is elsewhere
    command = ["sh", "-c", text, str(group), sys.executable, "-m", "meshwise", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)


HUNGRY = """
import os, signal, torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(400, 4)), batch_size=8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
kept = []
for step, (x,) in enumerate(loader):
    mw.backward(model(x).mean())
    optimizer.step(); optimizer.zero_grad()
    if mw.rank() == 1 and step > 5:
        KILL
"""


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("kill", "says"),
    [
        ("kept.append(torch.ones(100 << 18))", "rank 1 of 2 was killed by the kernel's out-of-memory killer (SIGKILL;"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL.\n"),
    ],
)
def test_a_run_says_who_killed_its_worker(kill: str, says: str, small_group: Path, tmp_path: Path) -> None:
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY.replace("KILL", kill))
    done = run_in(small_group, "--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(script))
    assert done.returncode != 0 and says in done.stdout + done.stderr, done.stdout + done.stderr


HUNGRY_JOB = """
import torch, meshwise as mw
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        wide = x.sum() * torch.ones(25 << 20 if mw.rank() == 1 else 1)  # 100 MB, which the backward needs
        return x + wide.sin().mean() * 0

x = torch.ones(160, 4)
job = mw.Job(name="hungry", model=lambda: nn.Sequential(*(Block() for _ in range(12)), nn.Linear(4, 1)),
             loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), batch_size=16, epochs=1,
             optimizer=lambda p: torch.optim.SGD(p, 0.1), data=lambda: (x, x.sum(1, keepdim=True)))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_job_goes_on_with_less_where_the_killer_ended_a_worker(small_group: Path, tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY_JOB)
    done = run_in(small_group, f"{tmp_path / 'hungry.py'}:job", "--devices", "2xcpu", "--out", str(tmp_path / "runs"))
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "killed by the kernel's out-of-memory killer" in said, said
    assert "with recompute=full: blocks run again in the backward, and the same numbers." in said, said
