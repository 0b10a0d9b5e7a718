"""What cannot be is refused at once, and the refusal is the last that a command says, on a line of its own: of what its
process prints (terminal/last_words.py), and of what its workers print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwise import api
from meshwise.records import folder as names
from meshwise.records.lock import FolderLock

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_job(*_: Any) -> None:
        raise AssertionError("a job was read")

    monkeypatch.setattr(api.run, "start_job", start_job)


@pytest.mark.parametrize("words", ["--resume RUN", "--resume RUN/checkpoint/step-00000040.1", "mlp --folder RUN"])
def test_a_run_that_is_still_going_on_is_refused_before_its_job_is_read(
    words: str, nothing_starts: None, command: Command, tmp_path: Path
) -> None:
    names.begin_session(tmp_path, 1e9, job="mlp")
    lock = FolderLock(tmp_path)
    code, shown, said = command("run", *words.replace("RUN", str(tmp_path)).split())
    lock.close()
    assert code == 2 and not shown and "this run is still going on, in process" in said and "starting" not in said
    with pytest.raises(AssertionError, match="a job was read"):
        command("run", *words.replace("RUN", str(tmp_path)).split())


def test_machines_that_start_a_run_together_may_hold_its_folder(
    nothing_starts: None, command: Command, tmp_path: Path
) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(AssertionError, match="a job was read"):
        command("run", "mlp", "--folder", tmp_path, "--nnodes", 2, "--node-rank", 1, "--rdzv", "here:29500")
    lock.close()


LOUD = """
import subprocess, sys, threading, time
import torch
import meshwise as mw

def loud(file):
    while True:
        print("x" * 50, file=file)
        file.write("no end, ")
        time.sleep(0.002)

for file in (sys.stdout, sys.stderr):
    threading.Thread(target=loud, args=(file,), daemon=True).start()
"""
SCRIPT = f"""{LOUD}
if mw.rank() == 0:  # it outlives its rank, for a while
    subprocess.Popen(["timeout", "10", "bash", "-c", "while echo left; do sleep 0.001; done"], start_new_session=True)
where, data = sys.argv[1], torch.utils.data.TensorDataset(torch.ones(64, 4))
model = torch.nn.Linear(4, 1)
optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=8)
if where == "distribute":
    mw.distribute(model, optimizer, 5)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
for (x,) in loader:
    loss = model(x if where != "loader" else next(iter(loader))).mean()
    mw.backward(loss.repeat(2) if where == "backward" else loss)
    optimizer.step("closure") if where == "step" else optimizer.step()
"""
JOB = f"""{LOUD}
x = torch.ones(64, 4)

def optimizer(params):
    print("no end", end="", file=sys.stderr)
    raise mw.UsageError("no optimizer here")

job = mw.Job(name="loud", model=lambda: torch.nn.Linear(4, 1), loss=lambda model, batch: model(batch[0]).mean(),
    data=lambda: (x,), batch_size=8, optimizer=optimizer)
"""
SAID = {
    "plan loud.py:job --machine 2xcpu": "no optimizer here",
    "run --devices 2xcpu script.py distribute": "mw.distribute takes models",
    "check loud.py:job --set shard=7 --devices 2xcpu": "7",
    "check loud.py:job": "no optimizer here",
    "run loud.py:job --set shard=7 --devices 2xcpu": "7",
    "run loud.py:job --devices 2xcpu": "no optimizer here",
    "run --devices 2xcpu script.py loader": "all 2 ranks failed: ",
    "run --devices 2xcpu script.py backward": "mw.backward",
    "run --devices 2xcpu script.py step": "all 2 ranks failed: TypeError: ",
    "report nothing": "nothing: no run folder",
}


@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("words", [pytest.param(w, marks=[pytest.mark.slow] * (at > 0)) for at, w in enumerate(SAID)])
def test_nothing_follows_a_refusal_or_stands_before_it_on_its_line(words: str, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "meshwise", *words.split()]
    done = subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment, timeout=120)
    text = done.stdout.decode()
    last = text.splitlines()[-1]
    assert done.returncode in (1, 2) and text.endswith("\n"), text[-2000:]
    assert SAID[words] in last and last.startswith(("UsageError: ", "PlanError: ", "script.py:", "all ")), last
