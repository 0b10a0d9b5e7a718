"""What is told of torch's loader workers: with torch's own errors."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import WorkerFailed
from meshwise.workers import failure
from meshwise.workers.failure import await_loader_end, loader_end
from meshwise.workers.launch import launch

pytestmark = pytest.mark.usefixtures("processes")


class Damaged:
    """how: what is done where record 5 is read: a signal, an exit code, or an error."""

    def __init__(self, how: Any) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and isinstance(self.how, signal.Signals):
            os.kill(os.getpid(), self.how)
        elif index == 5 and isinstance(self.how, int):
            os._exit(self.how)
        elif index == 5:
            raise self.how
        return index


def error_of(how: Any) -> Exception:
    """What a rank raises, whether it is the first to find its loader worker gone or torch's handler of SIGCHLD is."""
    try:
        try:
            list(DataLoader(Damaged(how), batch_size=2, num_workers=1))
        except Exception:
            time.sleep(2.0)  # ended by the handler, which raises; a core dump may take its time
            raise
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("how", "text", "remedy"),
    [
        (signal.SIGKILL, "was killed by signal: Killed (often the system's out-of-memory killer)", "need less memory"),
        (signal.SIGBUS, "was killed by signal: Bus error", "/dev/shm"),
        (signal.SIGSEGV, "was killed by signal: Segmentation fault", "num_workers=0"),
        (3, "exited", "num_workers=0"),
    ],
)
def test_a_loader_worker_that_ended_is_no_fault_of_the_program_and_has_a_remedy(
    how: Any, text: str, remedy: str
) -> None:
    found = failure.by_error(1, error_of(how))
    assert found.kind == "loader" and found.of_machine
    assert found.message.startswith("lost its loader worker (process ") and found.message.endswith(f", which {text}")
    assert remedy in failure.sentence(found, 2)


class Sockets(Damaged):
    """Its rows are where a loader worker makes the sockets by which it hands on tensors."""

    def __getitem__(self, index: int) -> str:  # type: ignore
        return get_temp_dir()


def read_and_be_killed(told: str) -> None:
    for places in DataLoader(Sockets(None), batch_size=2, num_workers=1):
        Path(told).write_text(places[0])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_leaves_no_folder_of_its_loader_workers(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
        launch(read_and_be_killed, (str(tmp_path / "told"),), [WorkerSlot("cpu", None, (), 1)])
    assert not Path((tmp_path / "told").read_text()).exists()


def test_an_error_of_a_loader_worker_keeps_its_own_text_and_the_lines_of_the_user() -> None:
    found = failure.by_error(1, error_of(ValueError("record 5 is damaged:\nno such class")))
    assert (found.kind, found.of_machine) == ("raised", False)
    assert found.message == "ValueError: record 5 is damaged:\nno such class"
    assert found.traceback.splitlines()[-1] == "in DataLoader worker process 0"
    assert "raise self.how" in found.traceback
    assert failure.recorded(found)["reason"] == "rank 1 failed: ValueError: record 5 is damaged:"


def test_an_error_that_was_raised_from_another_is_told_by_the_last() -> None:
    error = KeyError("label")
    error.__cause__ = ValueError("no number")
    assert failure.by_error(1, error_of(error)).message == "KeyError: 'label'"


def test_a_connection_that_broke_is_told_as_the_end_of_its_loader_worker() -> None:
    def _try_get_data() -> None:
        raise ConnectionResetError

    def handler(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    before = {number: signal.signal(number, handler) for number in (signal.SIGALRM, signal.SIGCHLD)}
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        _try_get_data()
    except ConnectionResetError as error:
        with pytest.raises(RuntimeError) as told:
            await_loader_end(error)
        assert failure.by_error(0, told.value).kind == "loader"
        await_loader_end(ConnectionResetError("of the program itself"))
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def test_an_error_of_the_rank_itself_is_none_of_a_loader_worker() -> None:
    assert get_worker_info() is None
    for error in (ValueError("DataLoader worker"), RuntimeError("Caught ValueError in DataLoader worker process 0.")):
        assert loader_end(error) is None and not failure.by_error(0, error).traceback.endswith(
            "in DataLoader worker process 0"
        )
