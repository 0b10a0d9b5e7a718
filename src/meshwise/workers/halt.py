"""The wish that a run stops. Tested in tests/faults and tests/workers/test_halt.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from meshwise.spec.exit_codes import JOINS, TIME_LIMIT, code_of_stop


class Halt:
    """Asks a running launch to stop all ranks after the same step. Set from a signal handler or another thread."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self.at_once = threading.Event()
        self.signal = 2
        """The signal that asked for it, TIME_LIMIT or JOINS."""

    def ask(self, number: int) -> None:
        """Ask for it, unless somebody has; what ends the run goes before a machine that joins it."""
        if not self.wanted.is_set() or (self.signal == JOINS and number != JOINS):
            self.signal = number
            self.wanted.set()

    @property
    def ends(self) -> bool:
        """Whether the run is to end: not for a machine that joins."""
        return self.wanted.is_set() and self.signal != JOINS

    def begin_anew(self) -> None:
        """The machine has joined."""
        if not self.ends:
            self.wanted.clear()

    @property
    def exit_code(self) -> int:
        """Of a run that was stopped."""
        return code_of_stop(self.signal)

    @contextlib.contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """During the body: ask for it once these seconds are over."""
        timer = threading.Timer(seconds or 0.0, self.ask, (TIME_LIMIT,))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
