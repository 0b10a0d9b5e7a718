"""What cannot be is refused at once, and the refusal is the last that a command says, on a line of its own."""

from __future__ import annotations

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
