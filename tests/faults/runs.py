"""Runs of the command line in processes of their own, and who is left over from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import psutil

from meshwise.workers.fork_server import LISTENS

JOBS = Path(__file__).with_name("jobs_that_fail.py")
MARK = "MESHWISE_TEST_RUN"
LOOP = """
import time, torch, meshwise as mw
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(40000, 4))
model, optimizer, loader = mw.distribute(model, optimizer, torch.utils.data.DataLoader(data, 8))
saved = mw.checkpoint("state", model=model, optimizer=optimizer, loader=loader)
steps = 0
try:
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 10:
            print("ten steps", flush=True)
        time.sleep(0.02)
finally:
    print(f"ended after {steps}", flush=True)
"""
"""A loop of one's own."""
LOOP_WITHOUT_STATE = LOOP.replace("saved = mw.checkpoint", "None and mw.checkpoint")


def as_at_a_limit(processes: Iterable[psutil.Process]) -> None:
    """SIGTERM, SIGCONT and SIGTERM again within a tenth of a second to each, as slurmd and srun send them."""
    each = list(processes)
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGTERM):
        for process in each:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


started: list[CommandRun] = []
"""Runs of the present test: those that it leaves, also where it fails, are killed after it (tests/conftest.py)."""


class CommandRun:
    """`meshwise run …` in a process of its own, started at once."""

    def __init__(self, *words: str, out: Path, fail_step: int = 5, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = out / "output.txt"
        out.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {MARK: self.mark, "FAIL_STEP": str(fail_step)} | variables
        environment.pop(LISTENS, None)  # the kept server's workers would not have the mark
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "meshwise", "run", *words]
            if "--resume" not in words and "--out" not in words:
                command += ["--out", str(out / "runs")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        started.append(self)

    def wait(self) -> int:
        return self.process.wait(timeout=90)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End whatever of this run still lives, also where its parent does not: tests/left_over.py finds the rest."""
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_over(self) -> list[int]:
        """Processes of this run that still live, ten seconds after it at most."""
        deadline = time.monotonic() + 10
        while (alive := _marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def run_folder(out: Path) -> Path:
    (folder,) = (out / "runs").iterdir()
    return folder
