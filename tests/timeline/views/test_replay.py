"""One collective of a run as a script: it is what the run had, it runs alone, and what a run has not is refused."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwise.spec.errors import UsageError
from meshwise.timeline.analyse import report_of
from meshwise.timeline.run_report import CollectiveReport, Report
from meshwise.timeline.views.replay import CALLS, replay_script
from tests.timeline.schedules import Schedule, even, played


def of(name: str, bytes: int = 4096, dtype: str = "float32", ranks: int = 1) -> Report:
    """A report that has this collective."""
    found = CollectiveReport(name, "gradients", bytes, 40, 0.001, 0.0, 1.0, None, dtype)
    report = report_of(played(Schedule(ranks=2), even()))
    return dataclasses.replace(report, collectives=[found], ranks=report.ranks[:ranks], folder="runs/a")


@pytest.mark.parametrize("name", CALLS)
def test_each_kind_runs_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = replay_script(of(name), "collective:1")
    start = dist.init_process_group
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(
        dist, "init_process_group", lambda name: start(name, store=dist.HashStore(), rank=0, world_size=1)
    )
    shown = io.StringIO()
    with redirect_stdout(shown):
        exec(compile(script, "replay.py", "exec"), {"__name__": "__main__"})
    assert f"{name} of gradients, 4.0 KiB of float32, on 1 ranks" in shown.getvalue()
    assert "in the run  median 1.000 ms" in shown.getvalue() and not dist.is_initialized()


def test_sizes_and_dtype_are_those_of_the_run() -> None:
    script = replay_script(of("reduce-scatter", 4098, "bfloat16", ranks=2), "collective:1")
    assert "RANKS, ELEMENTS, DTYPE = 2, 2050, torch.bfloat16\n" in script  # of 2049, a multiple of the ranks
    assert "of uint8  # the run did not" not in script
    assert "torch.uint8  # the run did not record its dtype" in replay_script(
        of("all-reduce", dtype=""), "collective:1"
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "collective:2",
            "not a collective of this run. Use collective:1 all-reduce of gradients, 4.0 KiB of float32",
        ),
        ("collective", "not a collective of this run"),
        ("all-reduce", "not a collective of this run"),
        ("kernel:3", "kernels cannot be replayed, as their shapes are unknown"),
    ],
)
def test_what_the_run_has_not_is_refused(what: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replay_script(of("all-reduce"), what)


def test_a_collective_without_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the size of .* was not recorded"):
        replay_script(of("all-gather", bytes=0), "collective:1")


@pytest.mark.slow
def test_a_script_runs_under_torchrun(processes: None, tmp_path: Path) -> None:
    (tmp_path / "replay.py").write_text(replay_script(of("all-gather", ranks=2), "collective:1"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "replay.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0 and "on 2 ranks" in done.stdout and "GB/s" in done.stdout
