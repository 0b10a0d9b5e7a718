"""Save the last step's state from surviving workers before ending them.

A rank that lost its connection has done so already. One that waits in a collective, or goes on, is asked over the side
channel: a thread of it writes. One that is stopped does not hear it. Tested in tests/workers/test_rescue.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshwise.workers.failure import Failure

RESCUES = ("rescues", "rescuing", "rescued")
"""What ranks tell of it."""
HEARD, WRITTEN = 1.0, 60.0  # seconds in which a rank that was asked says that it heard, and that it is done


class Rescue:
    """Asks the ranks of a launch that are left."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._asked: float | None = None
        self._heard: set[int] = set()
        self._over: set[int] = set()
        self._possible = False

    def hear(self, rank: int, kind: str) -> None:
        """A rank tells that it keeps what it could write; that it was asked; that it has written, or cannot."""
        self._possible = self._possible or kind == "rescues"
        if kind != "rescues":
            (self._heard if kind == "rescuing" else self._over).add(rank)

    def is_over(self, failure: Failure, running: Sequence[int]) -> bool:
        """Whether nobody writes any more. running: the ranks that are left; they are asked once, where the failure has
        not spoiled the state."""
        wanted = (failure.of_machine and not failure.has_spoiled) or bool(failure.smaller)
        if not (self._possible and wanted):
            return True
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            for rank in running:
                self._ask(rank)
        passed = now - self._asked
        waited_for = [rank for rank in running if rank not in self._over]
        return all(passed > (WRITTEN if rank in self._heard else HEARD) for rank in waited_for)
