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

from meshwise import launcher
from meshwise.records import folder as names
from meshwise.records.lock import FolderLock

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_job(*_: Any) -> None:
        raise AssertionError("a job was read")

    monkeypatch.setattr(launcher.run, "start_job", start_job)


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
        command("run", "mlp", "--folder", tmp_path, "--nnodes", 2, "--node-rank", 1, "--master-addr", "here")
    lock.close()


LOUD = """
import os, signal, subprocess, sys, threading, time
import torch
import meshwise as mw

def loud(file):
    while True:
        print("x" * 50, file=file)
        file.write("no end, ")
        time.sleep(0.005)

for file in (sys.stdout, sys.stderr):
    threading.Thread(target=loud, args=(file,), daemon=True).start()
where = os.environ["WHERE"]

def ends(at, how):
    if at == where:
        print("no end", end="", file=sys.stderr)
        how()

def fails():
    raise ValueError("a fault")

def refuses():
    raise mw.UsageError("refused")
"""
SCRIPT = (
    LOUD
    + """
ends("import", fails)
ends("exit", lambda: sys.exit(3))
if mw.rank() == 0:  # it outlives its rank, for a while
    subprocess.Popen(["timeout", "10", "bash", "-c", "while echo left; do sleep 0.001; done"], start_new_session=True)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        if at == 40:
            ends("row", fails)
            ends("loader worker", fails)
        return torch.full((4,), at / 64)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=where == "loader worker")
ends("distribute", lambda: mw.distribute(model, optimizer, 5, view="rank"))
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for step, x in enumerate(loader, 1):
    loss = model(x if where != "loader" else [x]).mean()
    mw.backward(loss.repeat(2) if where == f"backward {step}" else loss / 0 if where == f"nan {step}" else loss)
    optimizer.step("closure") if where == f"step {step}" else optimizer.step()
    optimizer.zero_grad()
    if mw.rank() == 1:
        ends(f"one rank {step}", fails)
        ends(f"killed {step}", lambda: os.kill(os.getpid(), signal.SIGKILL))
    if where == f"diverged {step}" and mw.rank() == 1:
        break
for x in loader:
    ends("evaluation", lambda: mw.mean(1.0, weight="all"))
    ends("evaluation fails", fails)
ends("end", fails)
"""
)
JOB = (
    LOUD
    + """
ends("import", fails)
ends("exit", lambda: sys.exit(3))
ends("os._exit", lambda: os._exit(3))
x, steps = torch.ones(64, 4), 0

def optimizer(params):
    ends("optimizer", refuses)
    return torch.optim.SGD(params, 0.1)

def loss(model, batch):
    global steps
    steps += 1
    if mw.rank() == 1:
        ends(f"one rank {steps}", fails)
        ends(f"killed {steps}", lambda: os.kill(os.getpid(), signal.SIGKILL))
    found = model(batch[0])
    return found if where == f"backward {steps}" else found.mean() / (where != f"nan {steps}")

def data():
    ends("data", fails)
    return (x,)

def metrics(model, batch):
    ends("evaluation fails", fails)
    return {"value": model(batch[0]) if where == "evaluation" else model(batch[0]).mean()}

job = mw.Job(name="loud", model=lambda: torch.nn.Linear(4, 1), loss=loss, data=data, test=lambda: (x,), metrics=metrics,
    batch_size=8, epochs=1, optimizer=optimizer)
"""
)
OF_JOB, OF_SCRIPT = "run loud.py:job --devices 2xcpu", "run --devices 2xcpu script.py"
SAID = {
    ("plan loud.py:job --machine 2xcpu", "optimizer"): "refused",
    ("check loud.py:job --set shard=7 --devices 2xcpu", ""): "7",
    ("check loud.py:job", "optimizer"): "refused",
    ("run loud.py:job --set shard=7 --devices 2xcpu", ""): "7",
    ("report nothing", ""): "there is no run nothing in runs/",
    (OF_JOB, "import"): "loud.py cannot be imported. Line 22: ValueError: a fault",
    (OF_JOB, "exit"): "loud.py exits while it is imported (exit code 3)",
    (OF_JOB, "os._exit"): "os._exit(3) ended the command too early",
    (OF_JOB, "optimizer"): "refused",
    (OF_JOB, "data"): "all 2 ranks failed: ValueError: a fault",
    (OF_JOB, "backward 1"): "the loss of job 'loud' returned",
    (OF_JOB, "backward 5"): "the loss of job 'loud' returned",
    (OF_JOB, "one rank 5"): "rank 1 of 2 failed: ValueError: a fault",
    (OF_JOB, "killed 1"): "rank 1 failed alike in step 1 of two attempts",
    (OF_JOB, "nan 8"): "Lower the learning rate",
    (OF_JOB, "evaluation"): "value",
    (OF_JOB, "evaluation fails"): "all 2 ranks failed: ValueError: a fault",
    (OF_SCRIPT, "import"): "all 2 ranks failed: ValueError: a fault",
    (OF_SCRIPT, "exit"): "left with exit code 3",
    (OF_SCRIPT, "distribute"): "mw.distribute takes models",
    (OF_SCRIPT, "row"): "failed: ValueError: a fault",
    (OF_SCRIPT, "loader worker"): "failed: ValueError: a fault",
    (OF_SCRIPT, "loader"): "all 2 ranks failed: ",
    (OF_SCRIPT, "backward 1"): "mw.backward",
    (OF_SCRIPT, "backward 5"): "mw.backward",
    (OF_SCRIPT, "step 5"): "all 2 ranks failed: TypeError: ",
    (OF_SCRIPT, "one rank 5"): "rank 1 of 2 failed: ValueError: a fault",
    (OF_SCRIPT, "killed 5"): "Call mw.checkpoint in the program",
    (OF_SCRIPT, "nan 8"): "not finite",
    (OF_SCRIPT, "diverged 5"): "Ranks diverged: ",
    (OF_SCRIPT, "evaluation"): "but it is 'all'",
    (OF_SCRIPT, "evaluation fails"): "all 2 ranks failed: ValueError: a fault",
    (OF_SCRIPT, "end"): "all 2 ranks failed: ValueError: a fault",
}
BEGINS = (
    "UsageError: ",
    "PlanError: ",
    "LossError: ",
    "script.py:",
    "all ",
    "rank ",
    "That was ",
    "The program itself fails",
    "Ranks diverged: ",
    "The run is not started again",
)


@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize(
    ("words", "where"), [pytest.param(*each, marks=[pytest.mark.slow] * (at > 0)) for at, each in enumerate(SAID)]
)
def test_nothing_follows_a_refusal_or_stands_before_it_on_its_line(words: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "WHERE": where}
    command = [sys.executable, "-m", "meshwise", *words.split()]
    done = subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment, timeout=120)
    text = done.stdout.decode()
    *_, before, last = ["", *text.splitlines()]
    last = before if last.startswith("more      docs/") else last
    assert done.returncode in (1, 2, 3) and text.endswith("\n"), text[-2000:]
    assert SAID[words, where] in last, text[-2000:]
    assert last.startswith(BEGINS), last
