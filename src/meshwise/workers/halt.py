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
    the request.

    The attributes are plain values, which the launcher reads again and again. A threading.Event is not used, because a
    signal handler that calls Event.set can deadlock: it may have interrupted a thread that holds the lock of the Event.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.at_once = False
        self.signal = 2
        """The signal that asked for the stop, or TIME_LIMIT, or JOINS if a machine waits to join the run."""

    def ask(self, number: int) -> None:
        """Ask all ranks to stop after the same step. If there is already a request, the first request is kept. As an
        exception, a request to end the run replaces a request to pause until a machine has joined.

        number: who asks for the stop: the number of a signal, or TIME_LIMIT, or JOINS for a machine that wants to join.
        """
        if not self.wanted or (self.signal == JOINS and number != JOINS):
            self.signal = number
            self.wanted = True

    @property
    def ends(self) -> bool:
        """Whether the run is asked to end, and not only to pause until a machine has joined."""
        return self.wanted and self.signal != JOINS

    def begin_anew(self) -> None:
        """Withdraw a request to pause until a machine has joined the run. A request to end the run is kept."""
        if not self.ends:
            self.wanted = False

    @property
    def exit_code(self) -> int:
        """The exit code of the stopped run."""
        return code_of_stop(self.signal)

    @contextlib.contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """Ask all ranks to stop after the same step if the `with` block takes longer than `seconds`. None sets no
        limit."""
        timer = threading.Timer(seconds or 0.0, self.ask, (TIME_LIMIT,))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
