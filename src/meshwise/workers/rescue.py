"""Before workers are ended that have lost one of them: those that are left write the state after the last step.

A rank that lost its connection has done so already. One that waits in a collective, or goes on, is asked over the side
channel: a thread of it writes. One that is stopped does not hear it. Tested in tests/workers/test_rescue.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshwise.workers.failure import Failure

HEARD, WRITTEN = 1.0, 60.0  # seconds in which a rank that was asked says that it heard, and that it is done


class Rescue:
    """Asks the ranks of a launch that are left."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._asked: float | None = None
        self._heard: set[int] = set()
        self._over: set[int] = set()
        self.possible = False
        """Whether ranks keep what they could write."""

    def heard(self, rank: int) -> None:
        """The rank was asked."""
        self._heard.add(rank)

    def over(self, rank: int) -> None:
        """The rank has written, or cannot."""
        self._over.add(rank)

    def is_wanted(self, failure: Failure) -> bool:
        """Whether the state is to be had: not after what has spoiled it."""
        return self.possible and ((failure.of_machine and failure.kind != "corrupt") or bool(failure.smaller))

    def is_over(self, running: Sequence[int]) -> bool:
        """Whether nobody writes any more. running: the ranks that are left; they are asked once."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            for rank in running:
                self._ask(rank)
        passed = now - self._asked
        waited_for = [rank for rank in running if rank not in self._over]
        return all(passed > (WRITTEN if rank in self._heard else HEARD) for rank in waited_for)
