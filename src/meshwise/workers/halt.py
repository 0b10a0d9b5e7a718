"""Hold a request to stop the run.

Tested in tests/faults and tests/workers/test_halt.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from meshwise.spec.exit_codes import JOINS, TIME_LIMIT, code_of_stop


class Halt:
    """The request to stop all ranks of a running launch after the same step. A signal handler or another thread makes
    it.

    The attributes are plain values, which the launcher polls, and not an Event. A signal handler that calls Event.set
    would deadlock if it interrupted a thread that holds the lock of the Event.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.at_once = False
        self.signal = 2
        """The signal that asked for the stop, or TIME_LIMIT, or JOINS if a machine waits to join the run."""

    def ask(self, number: int) -> None:
        """Ask for a stop. If there is a request already, it is kept, except that a request to end the run replaces a
        request to let a machine join.

        number: the signal, TIME_LIMIT or JOINS.
        """
        if not self.wanted or (self.signal == JOINS and number != JOINS):
            self.signal = number
            self.wanted = True

    @property
    def ends(self) -> bool:
        """Whether the run is asked to end, and not only to pause until a machine has joined."""
        return self.wanted and self.signal != JOINS

    def begin_anew(self) -> None:
        """Withdraw the request for a stop, if it was made only so that a machine can join."""
        if not self.ends:
            self.wanted = False

    @property
    def exit_code(self) -> int:
        """The exit code of the stopped run."""
        return code_of_stop(self.signal)

    @contextlib.contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """Ask for a stop if the `with` block takes longer than `seconds`. None sets no limit."""
        timer = threading.Timer(seconds or 0.0, self.ask, (TIME_LIMIT,))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
