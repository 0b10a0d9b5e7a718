"""Decide how a run on one machine continues after an attempt.

launcher/several.py does the same for several machines.
Tested in tests/faults/test_restarts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.launcher.restarts import Restarts, ended
from meshwise.records.lock import FolderLock
from meshwise.spec.errors import PlanError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.spec.units import plural
from meshwise.workers.gate import Halt


@dataclass
class Alone:
    """The machine of a run on a single machine. The launcher uses it in the same way as `Several`, which stands for
    several machines.

    size: the number of workers.
    lock: the lock on the run's folder.
    """

    size: int
    lock: FolderLock | None = None
    nodes = None
    keeps, node, first_rank = True, 0, 0

    @property
    def world(self) -> int:
        return self.size

    @property
    def late(self) -> Mapping[str, Any]:
        """Facts that another machine has announced; see `Several`. They are empty, because there is no other
        machine."""
        return {}

    def folder_told(self) -> Mapping[str, Any]:
        """Return an empty mapping, because there is no other machine that could announce a run folder."""
        return {}

    def finds(self, folder: Path, told: Mapping[str, Any]) -> None:
        """Do nothing, because there is no other machine whose run folder could differ from `folder`."""

    def tell_folder(self, folder: Path, attempt: int) -> None:
        """Do nothing, since there is no other machine to tell."""

    def has_more(self, restarts: Restarts) -> bool:
        return False

    def go_on(self, restarts: Restarts, error: WorkerFailed, size: int, halt: Halt) -> tuple[WorkerFailed, str]:
        """Begin the next attempt of the run. Return the error of the previous attempt, and a sentence on the step from
        which the run continues.

        size: the number of devices that are left. The plan may use fewer of them.

        Raises WorkerFailed if the run ends instead.
        """
        if (last := error if halt.ends else restarts.after(error)) is not None:
            raise last
        try:
            used = restarts.fit(size)
        except PlanError as refused:
            raise ended(error, str(refused), AGAIN) from None
        if used != self.size:
            restarts.moves_to(plural(used, "device"))
        self.size = used
        return error, restarts.next()

    def leave(self, code: int) -> None:
        """Do nothing. In `Several`, this method tells the other machines that this machine leaves the run."""
