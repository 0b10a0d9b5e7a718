"""Hold the folder of `mw.checkpoint` for one program at a time.

Each start of a program can be told apart from earlier ones.

Rank 0 locks `state.lock`, and claims a number for the states that this start saves (records/claims.py): the claim
records the program. Tested in tests/training/script/test_state_folder.py.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Checkpoint
from meshwise.records.claims import claim, claims_of, newest
from meshwise.records.lock import STATE_LOCK, FolderLock, Work
from meshwise.spec.errors import UsageError
from meshwise.spec.words import printable
from meshwise.training.process import once
from meshwise.transfer import collectives
from meshwise.workers.environment import ATTEMPT, RUN_FOLDER, attempt
from meshwise.workers.join import rank_context
from meshwise.workers.place import place_in


@dataclass(frozen=True)
class HeldFolder:
    """A folder that this program has locked, to save states in it."""

    path: Path
    number: int | None
    lock: FolderLock | None

    def tell_origin(self, saved: Checkpoint, say: Callable[[str], object]) -> None:
        """Print which saved state the program resumes from."""
        by, own = claims_of(self.path).get(saved.attempt, {}), _facts()
        if own["run"] and by.get("run") == own["run"]:
            return
        who = f"run {_short(by['run'])}" if by.get("run") else f"process {by.get('process')} on {by.get('host')}"
        told = f", which {printable(who)} saved ({printable(str(by.get('program')))})" if by else ""
        say(f"{_short(str(self.path))}: resumes from step {saved.step}{told}. Another folder starts from scratch.")

    def close(self) -> None:
        """Release the lock of the folder."""
        if self.lock is not None:
            self.lock.close()


def hold(folder: Path) -> HeldFolder:
    """Lock the folder for this program. Collective. Raise UsageError if another program holds the lock."""
    once.free(folder)
    lock, number, refusal = _held(folder) if rank_context().world.rank == 0 else (None, None, "")
    number, refusal = collectives.broadcast_object((number, refusal), collectives.everyone())
    if refusal:
        raise UsageError(f"mw.checkpoint: {refusal}")
    return HeldFolder(folder, number, lock)


def _held(folder: Path) -> tuple[FolderLock | None, int | None, str]:
    """Lock the folder, and claim a number for this start of the program."""
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, STATE_LOCK, work=_work())
        saved = files.checkpoints_in(folder)
        number = max([attempt(), newest(folder) + 1, *(each.attempt + 1 for each in saved)])
        if not claim(folder, number, {**_facts(), "checkpoints": [each.path.name for each in saved]}):
            return lock, None, f"{folder}: another program began to save there at the same time. Start this one again."
    except UsageError as error:
        return None, None, str(error)
    except OSError:
        return lock, None, ""
    return lock, number, ""


def _work() -> Work:
    """Return what the program's processes have in common over restarts: the run of meshwise's launcher, or the job of a
    scheduler. A later attempt of the same run or job may take over `state.lock`."""
    run = os.environ.get(RUN_FOLDER)
    if run is not None and ATTEMPT in os.environ:
        return Work(str(Path(run).resolve()), attempt())
    return place_in(os.environ).work()


def _facts() -> dict[str, Any]:
    run, program = os.environ.get(RUN_FOLDER), sys.argv[0] if sys.argv else ""
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "run": "" if run is None else str(Path(run).resolve()),
        "program": Path(program).name,
    }


def _short(path: str) -> str:
    """Return a path relative to the current folder if it is inside that folder; else the path itself."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
