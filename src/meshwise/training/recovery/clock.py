"""Decide after which steps all ranks save the state.

Saves are due after a number of steps, or after a time. By default, states are saved in the background, so rarely that
saving takes at most about 1 % of the time.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwise.hardware.memory import free_bytes
from meshwise.spec.saves import Saves
from meshwise.spec.units import bytes_text, seconds_text
from meshwise.training.recovery.saving import Saver
from meshwise.transfer import collectives

LEAST = 60.0  # shortest time in seconds between two background saves
STALLS, WRITINGS = 100, 10  # shortest interval, as multiples of a save's stall and of its write time
MOST_DISK, MOST_MEMORY = 0.1, 0.25  # the largest fractions of free disk and memory that background saves take


class SaveClock:
    """Decides after which steps the state is saved: every n steps, when a given time has passed since the last save,
    or in the background, which is the default."""

    def __init__(
        self,
        saves: Saves,
        saver: Saver | None = None,
        make: Callable[[], Any] = lambda: None,
        option: str = "--save-every",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """saver: saves the states. make: returns a state. option: the name of the option for the interval."""
        self._saves, self._saver, self._make, self._clock = saves, saver, make, clock
        self._since: tuple[float, int] | None = None
        self._told, self._option = LEAST, option
        self.look: float = math.inf if saves.in_background and saver is None else 0
        """The next step at which `is_due` has to be called."""

    def is_due(self, step: int) -> bool:
        """Return True if the state should be saved after this step."""
        if self._saves.steps is not None:
            self.look = step - step % self._saves.steps + self._saves.steps
            return step % self._saves.steps == 0
        if self._since is None and step >= self.look:
            off = self._saves.in_background and self._saver is not None and not self._begins(self._saver)
            self._since, self.look = (self._clock(), step), math.inf if off else step + 1
        return self._since is not None and step >= self.look and self._ask(step, *self._since)

    def _ask(self, step: int, began: float, first: int) -> bool:
        """Ask the clock of rank 0 whether a save is due. Collective."""
        passed: float
        wait: float
        passed, wait = collectives.tell_all((self._clock() - began, self._wait()))
        pace, due = max(passed / (step - first), 1e-9), passed >= wait
        if due:
            self._since = self._clock(), step
        left = wait - (0 if due else passed)
        self.look = step + max(1, int(left / pace / 2))
        return due

    def _wait(self) -> float:
        """Return how many seconds to wait between two saves."""
        if self._saves.seconds is not None or self._saver is None:
            return self._saves.seconds or math.inf
        wait = max(LEAST, STALLS * self._saver.stall_seconds, WRITINGS * self._saver.write_seconds)
        if wait > 2 * self._told:
            self._told = wait
            self._saver.tell(f"the state is saved every {seconds_text(wait)} from now on, as saving takes that long.")
        return wait

    def _begins(self, saver: Saver) -> bool:
        """Return whether states are saved in the background, and tell the user."""
        size = saver.size_of(self._make)
        short: str = collectives.tell_all(self._short_of(size, saver.folder))
        if short:
            saver.tell(f"no state is saved in the background: {short}. Set {self._option} to save it all the same.")
        else:
            saver.tell(
                f"the state ({bytes_text(size)}) is saved in the background every {seconds_text(LEAST)}, so a fault "
                f"costs at most the work since then. {self._option} sets how often."
            )
        return not short

    def _short_of(self, size: int, folder: Path) -> str:
        """Return which resource of this host is too small for background saves of `size` bytes, or ""."""
        count, memory = self._saves.keep + 1, free_bytes(torch.device("cpu"))
        with contextlib.suppress(OSError):  # the save itself reports the error
            disk = shutil.disk_usage(folder).free
            if count * size > MOST_DISK * disk:
                states = f"{count} states of {bytes_text(size)}"
                return f"{states} take more than a tenth of the {bytes_text(disk)} that are free on the disk"
        if size > MOST_MEMORY * memory:
            return f"a copy of {bytes_text(size)} takes more than a quarter of the {bytes_text(memory)} of free memory"
        return ""
