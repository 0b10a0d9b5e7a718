"""No step is lost: whoever is lost and wherever, the run goes on after the last step that all ranks have finished.

Of launcher/restarts.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from meshwise.records import folder as names
from meshwise.records.files import read_lines
from tests.faults.runs import CommandRun, run_folder
from tests.faults.test_restarts import JOB, final

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory that has no name, and signals as Linux has them"),
    pytest.mark.usefixtures("processes"),
]


def trained(out: Path, plan: str, *words: str) -> tuple[CommandRun, Path]:
    devices = 1
    for count in re.findall(r"(?:data|shard|tensor|pipeline)=(\d+)", plan):
        devices *= int(count)
    settings = [word for setting in plan.split() for word in ("--set", setting)]
    run = CommandRun(f"{JOB}:job", "--devices", f"{devices}xcpu", *settings, *words, out=out)
    run.wait()
    return run, run_folder(out)


def check(plan: str, fault: str, out: Path, whole: Path, *words: str) -> None:
    """With the fault the run loses no step, and ends with the same numbers."""
    run, folder = trained(out, plan, "--fault", fault, *words)
    assert run.process.returncode == 0 and "did not happen" not in run.output, run.output
    assert "attempt 2 of" in run.output and "begins from the state saved" in run.output, run.output
    assert "0 steps were done again" in run.output, run.output
    assert final(folder) == final(whole), run.output
    assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS), fault
    assert run.left_over() == []


def test_the_part_of_a_killed_rank_is_not_lost(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", "shard=2")
    check("shard=2", "kill:rank=1,step=15,phase=backward", tmp_path / "b", whole, "--redundancy", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["shard=3", "data=3 zero1=true", "data=2 shard=2", "tensor=2", "pipeline=2 accumulate=2"]
)
def test_no_step_is_lost_under_any_plan(plan: str, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", plan)
    for phase in ("forward", "optimizer", "evaluate"):
        check(plan, f"kill:rank=1,step=15,phase={phase}", tmp_path / phase, whole, "--redundancy", "1")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_rank_that_hangs_or_is_stopped_costs_no_step(kind: str, plan: str, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", plan)
    for phase in ("forward", "optimizer"):  # an evaluation is given a minute
        fault = f"{kind}:rank=1,step=15,phase={phase}"
        check(plan, fault, tmp_path / phase, whole, "--hang-limit", "2s", "--redundancy", "1")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_a_step_that_runs_out_of_memory_costs_no_step(plan: str, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", f"{plan} recompute=full")
    for phase in ("forward", "backward", "communication", "optimizer"):
        check(plan, f"oom:rank=1,step=15,phase={phase}", tmp_path / phase, whole)


@pytest.mark.slow
def test_the_only_worker_may_be_killed(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", "data=1")
    check("data=1", "kill:rank=0,step=15,phase=backward", tmp_path / "b", whole, "--redundancy", "1")
