"""Save the last step's state from surviving workers before ending them.

A rank that lost its connection has saved its state already. A rank that waits in a collective, or goes on, is asked
over the side channel, and a thread of it writes. A stopped rank does not hear. Tested in tests/workers/test_rescue.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshwise.workers.failure import Failure

RESCUES = ("rescues", "rescuing", "rescued")
"""The kinds of the messages by which ranks report on saving their last state."""
HEARD, WRITTEN = 1.0, 60.0  # seconds in which a rank that was asked says that it heard, and that it is done


class Rescue:
    """Asks the surviving ranks to save their state after a rank has failed, before the launcher ends them. Records
    their answers."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._asked: float | None = None
        self._heard: set[int] = set()
        self._over: set[int] = set()
        self._possible = False

    def hear(self, rank: int, kind: str) -> None:
        """Record a message of a rank about saving its state before it is ended.

        kind: `rescues` if the rank can save its state, `rescuing` if it has received the request to save, and `rescued`
            if it has finished, whether or not the state was saved.
        """
        self._possible = self._possible or kind == "rescues"
        if kind != "rescues":
            (self._heard if kind == "rescuing" else self._over).add(rank)

    def is_over(self, failure: Failure, running: Sequence[int]) -> bool:
        """Ask the surviving ranks to save their state after a failure. Return True once no rank is still saving, so
        that the ranks can be ended.

        Only the first call asks. A rank that takes too long is not waited for. Returns True at once, without asking, if
        no rank can save its state, if the user's program caused the failure, or if the state in memory is wrong. If the
        program ran out of memory, the state is saved if the run can continue with a plan that needs less memory.
        running: the surviving ranks.
        """
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
