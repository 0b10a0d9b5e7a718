"""Whether a process computes: one that does is told from one that waits, and what it has started counts."""

from __future__ import annotations

import os
import time

import pytest

from meshwise.workers import stuck
from meshwise.workers.stuck import SHARE, WINDOW, Idleness


def test_a_process_computes_that_has_more_than_a_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {1: 10.0, 2: 0.0}
    monkeypatch.setattr(stuck, "_seconds", lambda pid: used[pid])
    monkeypatch.setattr(stuck, "children_of", lambda pid: [2])
    looks, now = Idleness(), 0.0

    def computes(seconds: float, rank: float, child: float) -> bool:
        nonlocal now
        now, used[1], used[2] = now + seconds, used[1] + rank, used[2] + child
        return looks.computes(1, now)

    assert not computes(0, 0, 0), "the first look tells nothing"
    assert not computes(WINDOW, 0.5 * SHARE * WINDOW, 0), "it polls"
    assert not computes(WINDOW / 2, 5, 0), "too early"
    assert computes(WINDOW / 2, 0, 0), "now it counts"
    assert computes(WINDOW, 0, 2 * SHARE * WINDOW), "a loader's worker"
    assert not computes(2 * WINDOW, 0, 1.5 * SHARE * WINDOW)
    assert not looks.computes(None, now)


def test_the_time_of_a_process_is_what_the_kernel_says() -> None:
    before = time.process_time()
    while time.process_time() < before + 0.2:
        pass
    assert before < stuck._seconds(os.getpid()) <= time.process_time() + 0.02
    assert stuck._seconds(2**30) == 0.0, "it has ended"
