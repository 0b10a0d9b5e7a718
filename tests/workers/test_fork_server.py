"""The process that forks workers: what a worker is given, how its end is told, and that nobody is left over."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import WorkerFailed
from meshwise.workers.fork_server import LISTENS
from meshwise.workers.launch import Halt, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")

SLOTS = [WorkerSlot("cpu", None, (), 1)] * 2


def about_me(folder: str) -> dict[str, Any]:
    return {
        "rank": os.environ["RANK"],
        "mine": os.environ.get("MINE"),
        "folder": str(Path.cwd()),
        "leads": os.getsid(0) == os.getpid(),
        "modules": "torch._dynamo" in sys.modules,
        "number": float(np.random.random()),
        "parent": os.getppid(),
        "argument": folder,
    }


def end(how: int) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), how)
    time.sleep(60)


def wait_beside(file: str) -> None:
    Path(file, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "of its own"])
def test_a_worker_has_its_own_environment_folder_session_and_random_numbers(
    kept: bool, processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not kept:
        monkeypatch.delenv(LISTENS, raising=False)
    monkeypatch.setenv("MINE", "x" * 100_000)  # longer than a packet
    monkeypatch.chdir(tmp_path)
    first, second = launch(about_me, ("here",), SLOTS, preload=["torch._dynamo"])
    assert (first["rank"], second["rank"]) == ("0", "1")
    for found in (first, second):
        assert found["mine"] == "x" * 100_000
        assert Path(found["folder"]) == tmp_path
        assert found["leads"]
        assert found["modules"]
        assert found["argument"] == "here"
        assert found["parent"] != os.getpid()
    assert first["parent"] == second["parent"]
    assert first["number"] != second["number"]
    assert gone(first["parent"])


def test_a_killed_worker_is_known_by_its_signal(processes: None) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 of 2 was killed by SIGABRT"):
        launch(end, (signal.SIGABRT,), SLOTS)


def test_a_launch_that_is_ended_leaves_no_worker(processes: None, tmp_path: Path) -> None:
    pids: list[int] = []

    class EndWhenBothRun(Halt):
        at_once = property(lambda self: len(list(tmp_path.glob("*"))) == 2, lambda self, value: None)  # type: ignore

    with pytest.raises(WorkerFailed, match="stopped at once"):
        launch(wait_beside, (str(tmp_path),), SLOTS, halt=EndWhenBothRun())
    pids += [int(file.read_text()) for file in tmp_path.glob("*")]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_workers_end_with_a_server_that_is_killed(
    processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(LISTENS, raising=False)
    with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
        launch(kill_my_parent, (str(tmp_path),), SLOTS)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("*"))


def kill_my_parent(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        while len(list(Path(folder).glob("*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
