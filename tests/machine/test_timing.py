"""Repeats: what is timed, what is not, and how many times."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwise.machine.measure.timing import LEAST, MOST, WARM_UP, repeat, sample_of

CPU = torch.device("cpu")


class Clock:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_median_and_the_percentiles_of_what_was_called() -> None:
    clock, times = Clock(), itertools.chain([9.0] * WARM_UP, itertools.cycle([1.0, 2.0, 3.0]))

    def call() -> None:
        clock.now += next(times)

    sample = repeat(call, CPU, 30.0, clock=clock)
    assert sample.seconds == 2.0 and sample.p95 == 3.0 and sample.count >= LEAST


def test_a_budget_that_is_spent_still_gives_the_least_number() -> None:
    clock = Clock()

    def call() -> None:
        clock.now += 100.0

    assert repeat(call, CPU, 1.0, clock=clock).count == LEAST


def test_what_is_done_between_is_not_timed() -> None:
    clock = Clock()

    def call() -> None:
        clock.now += 0.001

    def flush() -> None:
        clock.now += 5.0

    sample = repeat(call, CPU, 1e9, between=flush, clock=clock)
    assert sample.seconds == pytest.approx(0.001) and sample.count == MOST


def test_short_calls_are_timed_many_at_once() -> None:
    clock, calls = Clock(), 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.now += 1e-6

    sample = repeat(call, CPU, 1e9, clock=clock)
    assert sample.seconds == pytest.approx(1e-6) and calls > 10 * sample.count


def test_one_repeat_has_its_own_percentiles() -> None:
    assert sample_of([2.0]).p99 == 2.0
