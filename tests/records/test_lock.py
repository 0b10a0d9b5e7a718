"""Who works in a run folder: one at a time, and nobody once that process is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from meshwise.records.folder import KILLED, begin_session, end_session, read_run
from meshwise.records.lock import LOCK, FolderLock, is_abandoned
from meshwise.records.run_list import run_entry
from meshwise.spec.errors import UsageError


def test_a_folder_that_is_held_is_refused_with_its_holder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(UsageError, match=rf"still going on, in process {os.getpid()} on .* since 20"):
        FolderLock(tmp_path)
    assert not is_abandoned(tmp_path)
    lock.close()
    assert is_abandoned(tmp_path)
    FolderLock(tmp_path).close()


def test_a_damaged_note_of_the_holder_is_no_harm(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / LOCK).write_text('{"host": 7, "process": "x"')
    with pytest.raises(UsageError, match="in another process"):
        FolderLock(tmp_path)
    lock.close()


def test_a_run_that_was_killed_is_not_running_for_ever(tmp_path: Path) -> None:
    begin_session(tmp_path, 1e9, job="gpt")
    assert read_run(tmp_path)["status"] == "running"  # of an older version, without a lock: nobody knows
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = FolderLock(tmp_path)
        os.write(say, b"held")
        time.sleep(60)
        lock.close()
        os._exit(1)
    assert os.read(said, 4) == b"held"
    assert read_run(tmp_path)["status"] == "running"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(said)
    os.close(say)
    run = read_run(tmp_path)
    assert (run["status"], run["error"], run["sessions"][0]["status"]) == ("failed", KILLED, "failed")
    assert run_entry(tmp_path).status == "failed"
    end_session(tmp_path, "finished")
    assert read_run(tmp_path)["status"] == "finished"
