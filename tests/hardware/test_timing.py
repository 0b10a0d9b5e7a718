"""Repeats: what is timed, and how many times."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwise.hardware.measure.timing import LEAST, MOST, host_seconds, repeat


class Clock:
    """A clock that only calls move. times: the seconds of each call."""

    def __init__(self, *times: float) -> None:
        self.now, self.batches, self._times = 0.0, list[int](), itertools.cycle(times)

    def __call__(self) -> float:
        return self.now

    def timed(self, batch: int) -> float:
        self.batches.append(batch)
        began = self.now
        for _ in range(batch):
            self.now += next(self._times)
        return (self.now - began) / batch


def test_calls_are_repeated_until_the_budget_is_spent() -> None:
    clock = Clock(1.0, 2.0, 3.0)
    seconds, more = repeat(clock.timed, 40.0, clock=clock)
    assert set(seconds) == {1.0, 2.0, 3.0} and 40 <= clock.now < 44
    assert more == pytest.approx(sum(seconds[LEAST:]))


def test_a_budget_that_is_spent_still_gives_the_least_number() -> None:
    clock = Clock(100.0)
    assert repeat(clock.timed, 1.0, clock=clock) == ([100.0] * LEAST, 0.0)


def test_the_first_calls_are_left_out_until_two_are_alike() -> None:
    clock = Clock(9.0, 5.0, 1.0, 1.0, *[1.0] * 1000)
    assert set(repeat(clock.timed, 60.0, clock=clock)[0]) == {1.0}


def test_short_calls_are_timed_many_at_once_but_not_single_ones() -> None:
    clock = Clock(1e-6)
    seconds, _ = repeat(clock.timed, 1e9, clock=clock)
    assert seconds == pytest.approx([1e-6] * MOST) and clock.batches[-1] > 10
    clock = Clock(1e-6)
    repeat(clock.timed, 1e9, single=True, clock=clock)
    assert set(clock.batches) == {1}


def test_what_ranks_agree_on_counts() -> None:
    clock = Clock(1.0)
    seconds, _ = repeat(clock.timed, 30.0, agree=lambda took, spent: [2 * took, 2 * spent], clock=clock)
    assert set(seconds) == {2.0} and clock.now < 18


def test_a_call_is_timed_by_the_host() -> None:
    assert 0 < host_seconds(lambda: None, torch.device("cpu"), 100) < 1e-3
