"""Decide when to save, at one step for all ranks.

Saves are due after a number of steps, or after a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from meshwise.spec.saves import Saves
from meshwise.transfer import collectives


class SaveClock:
    """Decides after which steps the state is saved: every n steps, or when a given time has passed since the last save.

    The time is measured by the clock of rank 0. Asking rank 0 is a collective call, so it is made rarely: after each
    answer, the ranks estimate how many steps remain until the next save, and ask again after half of them.
    """

    def __init__(self, saves: Saves, clock: Callable[[], float] = time.monotonic) -> None:
        self._saves, self._clock = saves, clock
        self._since: tuple[float, int] | None = None
        self.look: float = math.inf if saves.seconds is None and saves.steps is None else 0
        """The next step at which `is_due` has to be called."""

    def is_due(self, step: int) -> bool:
        """Return True if the state should be saved after this step. Every rank must call this after each step, because
        some calls are collective.
        """
        if self._saves.seconds is None:
            every = self._saves.steps or 0
            self.look = step - step % every + every if every else math.inf
            return every > 0 and step % every == 0
        if self._since is None:
            self._since, self.look = (self._clock(), step), step + 1
        return step >= self.look and self._ask(step, *self._since)

    def _ask(self, step: int, began: float, first: int) -> bool:
        """Ask the clock of rank 0 whether a save is due. Collective."""
        assert self._saves.seconds is not None
        passed: float = collectives.broadcast_object(self._clock() - began, collectives.everyone())
        pace, due = max(passed / (step - first), 1e-9), passed >= self._saves.seconds
        if due:
            self._since = self._clock(), step
        left = self._saves.seconds - (0 if due else passed)
        self.look = step + max(1, int(left / pace / 2))
        return due
