"""Whoever is killed, by default little is lost: states are written in the background, and the numbers stay the same.

Of training/recovery/clock.py, training/recovery/saving.py and training/script/checkpoint.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwise.records import folder as names
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.files import read_lines
from tests.faults.runs import CommandRun, run_folder
from tests.faults.test_restarts import final

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="workers end with their launcher as on Linux"),
]
EVERY_STEP = """
from meshwise.training.recovery import clock

clock.LEAST = clock.STALLS = clock.WRITINGS = 0
"""
"""In a program: the interval between two states in the background is nothing, so that each step is saved."""
SLOW = """
import dataclasses, time

def slow(model, batch):
    time.sleep(0.03)
    return loss(model, batch)

job = dataclasses.replace(job, loss=slow)
"""
JOB = Path(__file__).with_name("job_with_state.py").read_text() + EVERY_STEP + SLOW
LOOP = f"""
import sys, time, torch, meshwise as mw
{EVERY_STEP}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(160, 4))
loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
saved = mw.checkpoint(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
step = saved.step
for epoch in range(saved.epoch, 2):
    for (x,) in loader:
        value = model(x).pow(2).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print("step", step, "loss", float(value), flush=True)
        time.sleep(0.03)
"""


def begun(out: Path, *words: str) -> CommandRun:
    out.mkdir()
    (out / "job.py").write_text(JOB)
    return CommandRun(f"{out / 'job.py'}:job", "--devices", "2xcpu", "--log-every", "1", *words, out=out)


def check(folder: Path, whole: Path, newest: int) -> None:
    """The run has gone on from the newest step, or from one whose successor was being written."""
    assert names.read_run(folder)["sessions"][-1]["from_step"] >= newest - 2 > 5
    assert final(folder) == final(whole)
    assert read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS)
    assert [saved.step for saved in checkpoints_in(folder / names.CHECKPOINTS)] == [20]


@pytest.mark.parametrize(("who", "plan"), [("launcher", "data=2"), ("all", "shard=2"), ("rank", "shard=2")])
def test_a_job_loses_at_most_the_steps_since_the_last_state(who: str, plan: str, tmp_path: Path) -> None:
    undisturbed = begun(tmp_path / "whole", "--set", plan)
    assert undisturbed.wait() == 0, undisturbed.output
    assert "is saved in the background every 0 s" in undisturbed.output
    fault = ("--fault", "kill:rank=1,step=12") if who == "rank" else ()
    run = begun(tmp_path / "killed", "--set", plan, *fault)
    newest = 11
    if who == "rank":
        assert run.wait() == 0, run.output
    else:
        run.wait_for("step  8/10")
        run.process.kill() if who == "launcher" else run.kill()
        run.process.wait()
        assert run.left_over() == []
        newest = max(line["step"] for line in read_lines(run_folder(tmp_path / "killed") / names.METRICS))
        again = CommandRun("--resume", str(run_folder(tmp_path / "killed")), out=tmp_path / "again")
        assert again.wait() == 0, again.output
    check(run_folder(tmp_path / "killed"), run_folder(tmp_path / "whole"), newest)


@pytest.mark.parametrize("who", [pytest.param("launcher", marks=pytest.mark.slow), "all"])
def test_a_script_goes_on_in_the_middle_of_an_epoch(who: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)

    def started(name: str, state: str) -> CommandRun:
        return CommandRun("--devices", "2xcpu", str(tmp_path / "train.py"), str(tmp_path / state), out=tmp_path / name)

    whole = started("whole", "a")
    assert whole.wait() == 0, whole.output
    run = started("killed", "b")
    run.wait_for("step 12 loss")
    run.process.kill() if who == "launcher" else run.kill()
    run.process.wait()
    assert run.left_over() == []
    again = started("again", "b")
    assert again.wait() == 0, again.output
    told, before, after = (losses(each.output) for each in (whole, run, again))
    assert min(after) >= max(before) - 1 > 5
    assert len(told) == 40 and before | after == told and all(before[step] == told[step] for step in before)


def losses(output: str) -> dict[int, str]:
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): line[3] for line in lines}
