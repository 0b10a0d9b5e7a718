"""Hold the folder of `mw.checkpoint` for one program at a time.

Rank 0 locks `state.lock`. Each time the program starts, rank 0 also claims a new number for the states that it will
save (records/claims.py). The number tells these states from earlier ones, and the claim records the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Checkpoint
from meshwise.records.claims import claim, claims_of, newest
from meshwise.records.lock import STATE_LOCK, FolderLock, Work
from meshwise.spec.errors import UsageError
from meshwise.training.process import once
from meshwise.transfer import collectives
from meshwise.workers.environment import ATTEMPT, RUN_FOLDER, STATES, attempt
from meshwise.workers.join import rank_context
from meshwise.workers.place import place_in


@dataclass(frozen=True)
class Home:
    """Where an engine such as Ray keeps the states of a program that it has started.

    find: returns the path of the folder that the program names. work: as for a `FolderLock`."""

    find: Callable[[Path], Path]
    work: Work


homes: list[Home] = []
"""The home of this program's states, if an engine has one for them."""


def home_of(folder: Path) -> Path:
    """Return the path of a folder that the program names in `mw.checkpoint`."""
    return homes[-1].find(folder) if homes else Path(os.environ.get(STATES, "")) / folder


@dataclass(frozen=True)
class HeldFolder:
    """A folder that this program has locked, to save states in it."""

    path: Path
    number: int | None
    lock: FolderLock | None

    def tell_origin(self, saved: Checkpoint, say: Callable[[str], object]) -> None:
        """Print which saved state the program resumes from, if another run or program has saved it."""
        if not _run() or claims_of(self.path).get(saved.attempt, {}).get("run") != _run():
            say(f"{self.path}: resumes from step {saved.step}. Another folder starts from scratch.")

    def close(self) -> None:
        """Release the lock of the folder."""
        if self.lock is not None:
            self.lock.close()


def hold(folder: Path) -> HeldFolder:
    """Lock the folder for this program. Collective. Raise UsageError if another program holds the lock."""
    once.free(folder)
    lock, number, refusal = _held(folder) if rank_context().world.rank == 0 else (None, None, "")
    number, refusal = collectives.tell_all((number, refusal))
    if refusal:
        raise UsageError(f"mw.checkpoint: {refusal}")
    return HeldFolder(folder, number, lock)


def _held(folder: Path) -> tuple[FolderLock | None, int | None, str]:
    """Lock the folder, and claim a number for its states. Return (lock, number, why the folder was refused)."""
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, STATE_LOCK, work=_work())
        saved = files.checkpoints_in(folder)
        number = max([attempt(), newest(folder) + 1, *(each.attempt + 1 for each in saved)])
        if not claim(folder, number, {"run": _run(), "checkpoints": [each.path.name for each in saved]}):
            return lock, None, f"{folder}: another program began to save there at the same time. Start this one again."
    except UsageError as error:
        return None, None, str(error)
    except OSError:
        return lock, None, ""
    return lock, number, ""


def _work() -> Work:
    """Return what the program's processes have in common over restarts: the run of meshwise's launcher, or the job of a
    scheduler. A later attempt of the same run or job may take over `state.lock`."""
    if homes:
        return homes[-1].work
    return Work(_run(), attempt()) if _run() and ATTEMPT in os.environ else place_in(os.environ).work()


def _run() -> str:
    run = os.environ.get(RUN_FOLDER)
    return "" if run is None else str(Path(run).resolve())
