"""A rank that does not go on, with real workers: told in one sentence, and the run ended."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from meshwise.records.folder import read_run
from tests.faults.runs import JOBS, CommandRun, run_folder

SCRIPT = Path(__file__).with_name("script_that_hangs.py")

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.slow]


def test_a_stopped_rank_is_named_and_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    run = CommandRun(f"{JOBS}:job_is_stopped", "--devices", "2xcpu", out=tmp_path, fail_step=60)
    run.wait_for("rank 1 is in its phase forward and is stopped (kill -CONT ")
    assert "rank 0 waits for it in all-reduce of gradients" in run.output and "in step 60" in run.output
    run.send(signal.SIGINT)
    time.sleep(1.0)  # two that come at once are one
    run.send(signal.SIGINT)
    assert run.wait() != 0
    assert run.left_over() == []


def test_a_hang_ends_the_run_at_its_limit_and_is_kept(tmp_path: Path) -> None:
    words = ("mnist-mlp", "--devices", "2xcpu", "--epochs", "1", "--restarts", "0", "--hang-limit", "4s")
    run = CommandRun(*words, "--fault", "hang:rank=1,step=50,phase=backward", out=tmp_path)
    assert run.wait() != 0
    assert "in step 50: rank 1 is in its phase backward and stands at" in run.output
    assert "Ended after 4 s without progress. To wait longer, use --hang-limit 10min." in run.output
    assert "No progress for" in read_run(run_folder(tmp_path))["error"]
    assert run.left_over() == []


def test_in_a_loop_of_ones_own_a_rank_that_is_late_is_named_and_goes_on(tmp_path: Path) -> None:
    run = CommandRun("--devices", "2xcpu", str(SCRIPT), "late", "6", out=tmp_path)
    assert run.wait() == 0, run.output
    assert "in step 20: rank 1 is in its phase forward and stands at" in run.output
    assert "script_that_hangs.py" in run.output and "in validate; rank 0 waits for it in " in run.output
    assert "rank 1 goes on after " in run.output and "the end" in run.output


def test_in_a_loop_of_ones_own_a_silence_of_all_ranks_is_no_hang(tmp_path: Path) -> None:
    run = CommandRun("--devices", "2xcpu", "--hang-limit", "3s", str(SCRIPT), "silent", "8", out=tmp_path)
    assert run.wait() == 0, run.output
    assert "No progress" not in run.output and "the end" in run.output


def test_a_forward_of_one_rank_alone_is_thought_of_where_it_meets_the_others(tmp_path: Path) -> None:
    """Its batch norm is joined with the next step's of the others; then both are in one collective at two lines."""
    run = CommandRun("--devices", "2xcpu", "--hang-limit", "4s", str(SCRIPT), "alone", "0", out=tmp_path)
    assert run.wait() == 1, run.output
    assert "and whether a rank makes a call that others do not. Rank 0 is in its phase" in run.output, run.output
    assert run.output.count("script_that_hangs.py:") >= 2, run.output


DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(9):
    if dist.get_rank() == 1 and step == 5:
        break
    model(torch.ones(2, 4)).mean().backward()
"""


def test_a_rank_of_ddp_that_leaves_its_loop_is_named_with_the_line_of_who_waits(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(script), out=tmp_path)
    assert run.wait() == 1, run.output
    said = re.search(r"Ranks diverged: rank 0 reached all-reduce at \S*ddp.py:8 \(call \d+\); rank 1 ended", run.output)
    assert said, run.output
