"""Runs of the command line in processes of their own, and who is left over from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from meshwise.workers.fork_server import LISTENS

JOBS = Path(__file__).with_name("jobs_that_fail.py")
MARK = "MESHWISE_TEST_RUN"


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
