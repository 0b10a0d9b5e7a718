"""The process that forks workers: what a worker is given, how its end is told, and that nobody is left over."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import PlanError, UsageError, WorkerFailed
from meshwise.training.job.options import PRELOAD
from meshwise.workers.fork_server import LISTENS, Forks
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


def called(how: str, given: list[int]) -> dict[str, Any]:
    class Own(UsageError):
        """Nobody else knows it."""

    if how == "refused":
        raise PlanError("no plan of that kind. Use shard.")
    if how == "refused by an error of its own":
        raise Own("no.")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ended":
        os._exit(3)
    if how == "left":
        sys.exit("enough")
    if how == "failed":
        raise RuntimeError("odd")
    return {"given": given, "parent": os.getppid(), "torch": "torch" in sys.modules}


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


def test_a_function_is_called_in_a_process_that_has_what_workers_have(processes: None) -> None:
    with contextlib.closing(Forks(PRELOAD)) as forks:
        server = forks.server(os.environ | {"PYTHONUNBUFFERED": "1"})
        assert server is not None
        value = server.call(called, "", [1, 2])
        assert value["given"] == [1, 2] and value["torch"] and value["parent"] != os.getpid()
        for how, kind, text in [
            ("refused", PlanError, "no plan of that kind. Use shard."),
            ("refused by an error of its own", UsageError, "no."),
            ("killed", WorkerFailed, "the process that imports the job's file ended with SIGKILL."),
            ("ended", UsageError, "os._exit(3) ended the command too early."),
            ("left", UsageError, "sys.exit('enough') ended the command too early."),
            ("failed", WorkerFailed, "the program failed: RuntimeError: odd"),
        ]:
            with pytest.raises(kind) as refused:
                server.call(called, how, [])
            assert text in str(refused.value) and type(refused.value) is kind, how


def test_a_killed_worker_is_known_by_its_signal(processes: None) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 of 2 was killed by SIGABRT"):
        launch(end, (signal.SIGABRT,), SLOTS)


def test_a_launch_that_is_ended_leaves_no_worker(processes: None, tmp_path: Path) -> None:
    pids: list[int] = []

    def both_run() -> bool:  # each has written its number, not only made its file
        return sum(bool(file.read_text()) for file in tmp_path.glob("*")) == 2

    class EndWhenBothRun(Halt):
        at_once = property(lambda self: both_run(), lambda self, value: None)  # type: ignore

    with pytest.raises(WorkerFailed, match="stopped at once"):
        launch(wait_beside, (str(tmp_path),), SLOTS, halt=EndWhenBothRun())
    pids += [int(file.read_text()) for file in tmp_path.glob("*")]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_server_that_is_kept_hears_its_own_user_alone(processes: None) -> None:
    if address := os.environ.get(LISTENS):
        assert stat.S_IMODE(Path(address).stat().st_mode) == 0o600


def test_a_server_that_is_killed_ends_with_its_workers(own_fork_server: None, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank \d of 2 was killed by SIGKILL.*") as raised:
        launch(signal_my_parent, (str(tmp_path), signal.SIGKILL, None), SLOTS)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("*"))
    failure = raised.value.failure
    assert failure is not None and failure.of_machine


def test_a_launch_ends_and_the_next_one_starts_though_the_server_is_stopped(
    own_fork_server: None, tmp_path: Path
) -> None:
    def launches() -> list[Any]:
        forks = Forks([])
        try:
            first = launch(signal_my_parent, (str(tmp_path), signal.SIGSTOP, "a result"), SLOTS, preload=forks)
            return [*first, *launch(os.getppid, (), SLOTS, preload=forks)]
        finally:
            forks.close()

    first, second, server, same = in_time(launches)
    assert (first, second) == ("a result", "a result")
    assert server == same and gone(server)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("*"))


def signal_my_parent(folder: str, number: int, then: Any) -> Any:
    rank = os.environ["RANK"]
    Path(folder, rank).write_text(str(os.getpid()))
    while len(list(Path(folder).glob("*"))) < 2:
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getppid(), number)
        Path(folder, rank).rename(Path(folder, "sent"))
    while not Path(folder, "sent").exists():
        time.sleep(0.01)
    if then is not None:
        return then
    time.sleep(60)


def in_time(work: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it returns or raises; fails where it is still at work after so long."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)
