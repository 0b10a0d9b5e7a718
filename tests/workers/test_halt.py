"""The wish that a run stops."""

from __future__ import annotations

import signal
import time

from meshwise.spec.exit_codes import AGAIN, TIME_LIMIT
from meshwise.workers.gate import Halt


def test_the_first_signal_counts() -> None:
    halt = Halt()
    halt.ask(signal.SIGUSR1)
    halt.ask(signal.SIGTERM)
    assert halt.wanted and halt.signal == signal.SIGUSR1 and halt.exit_code == AGAIN


def test_the_time_limit_asks_for_it_once_it_is_over() -> None:
    halt = Halt()
    with halt.after(0.01):
        deadline = time.monotonic() + 20
        while not halt.wanted:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert halt.signal == TIME_LIMIT and halt.exit_code == AGAIN


def test_a_run_that_ends_before_its_limit_was_not_stopped() -> None:
    halt = Halt()
    with halt.after(3600), halt.after(None):
        pass
    assert not halt.wanted
