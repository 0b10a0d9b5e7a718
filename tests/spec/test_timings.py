"""The table of seconds by size, and the line through it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.timings import Timings, fitted, in_step, rate_at, seconds_at

SIZES = tuple(2**power for power in range(10, 31, 2))
latencies = st.floats(1e-7, 1e-2)
bandwidths = st.floats(1e6, 1e13)


@given(latencies, bandwidths)
def test_an_exact_line_is_found_again(latency: float, bandwidth: float) -> None:
    timings = fitted(SIZES, [latency + size / bandwidth for size in SIZES])
    largest = SIZES[-1] / bandwidth
    assert timings.residual < 1e-6
    assert timings.latency == pytest.approx(latency, rel=1e-5, abs=1e-6 * largest)
    if largest > 1e-3 * latency:  # else the sizes are too small to show a bandwidth
        assert timings.bandwidth == pytest.approx(bandwidth, rel=1e-2)


@given(latencies, st.floats(1e8, 1e12), st.integers(0, 1000))
def test_noise_moves_the_line_by_as_much_only(latency: float, bandwidth: float, seed: int) -> None:
    noise = random.Random(seed)
    seconds = [(latency + size / bandwidth) * noise.uniform(0.97, 1.03) for size in SIZES]
    timings = fitted(SIZES, seconds)
    assert timings.residual < 0.04
    for size in SIZES:
        assert timings.latency + size / timings.bandwidth == pytest.approx(latency + size / bandwidth, rel=0.15)


def test_a_few_outliers_do_not_move_the_line() -> None:
    seconds = [1e-5 + size / 1e10 for size in SIZES]
    seconds[2] *= 10
    seconds[7] *= 5
    timings = fitted(SIZES, seconds)
    assert timings.latency == pytest.approx(1e-5, rel=0.02) and timings.bandwidth == pytest.approx(1e10, rel=0.02)


@given(st.lists(st.floats(1e-9, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
def test_latency_and_bandwidth_are_never_negative(seconds: list[float]) -> None:
    timings = fitted(SIZES, seconds)
    assert timings.latency >= 0 and timings.bandwidth > 0 and timings.residual >= 0
    assert not math.isnan(timings.bandwidth)


def test_a_time_that_does_not_rise_is_all_latency() -> None:
    timings = fitted(SIZES, [1e-5] * len(SIZES))
    assert timings.latency == pytest.approx(1e-5) and timings.bandwidth > 1e18


def test_a_time_that_rises_faster_than_its_size_has_no_latency() -> None:
    assert fitted((1, 10, 100), (1e-6, 2e-5, 4e-4)).latency == 0


@given(st.integers(1, 2**40), st.floats(1e-9, 1e3))
def test_one_size_is_a_rate(size: int, seconds: float) -> None:
    timings = fitted([size], [seconds])
    assert timings.latency == 0 and timings.bandwidth == pytest.approx(size / seconds)


def test_percentiles_are_kept_as_they_are() -> None:
    timings = fitted([1, 2], [1.0, 2.0], [1.5, 2.5], [3.0, 4.0])
    assert (timings.p95, timings.p99) == ((1.5, 2.5), (3.0, 4.0))


TABLE = fitted(SIZES, [1e-5 + size / 1e10 for size in SIZES])


@pytest.mark.parametrize("at", range(len(SIZES)))
def test_a_size_of_the_table_has_its_own_seconds(at: int) -> None:
    assert seconds_at(TABLE, SIZES[at]) == pytest.approx(TABLE.seconds[at])


@given(st.integers(1, 2**34), st.integers(1, 2**34))
def test_a_larger_size_takes_no_less(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert seconds_at(TABLE, small) <= seconds_at(TABLE, large) * (1 + 1e-12)


def test_below_the_table_the_smallest_stands_and_above_the_rate_goes_on() -> None:
    assert seconds_at(TABLE, 1) == seconds_at(TABLE, 0) == TABLE.seconds[0]
    assert seconds_at(TABLE, 2**32) == pytest.approx(TABLE.seconds[-1] + (2**32 - SIZES[-1]) / TABLE.bandwidth)


def test_far_above_a_noisy_table_of_small_sizes_its_end_counts() -> None:
    """A slow network, measured up to 256 KiB: the line through its latencies said that it has no limit."""
    sizes, seconds = (1024, 4096, 16384, 65536, 262144), (7e-3, 9e-3, 6e-3, 7e-3, 15e-3)
    assert seconds_at(fitted(sizes, seconds), 10 << 20) == pytest.approx((10 << 20) / 25e6, rel=0.1)
    flat = fitted((1000, 2000), (1e-3, 1e-3))
    assert seconds_at(flat, 20_000) == pytest.approx(1e-2)


def test_between_two_sizes_the_table_is_straight_on_logarithmic_axes() -> None:
    timings = Timings((100, 10_000), (1e-6, 1e-4), 0.0, 1e8, 0.0)
    assert seconds_at(timings, 1000) == pytest.approx(1e-5)
    assert rate_at(timings, 1000) == pytest.approx(1e8)


def test_times_of_a_step_are_those_after_computing_and_never_shorter_over_a_network() -> None:
    assert in_step(fitted((1, 2), (3.0, 4.0))).seconds == (3.0, 4.0)
    both = fitted((1, 2), (3.0, 4.0), in_step=(5.0, 2.0))
    assert in_step(both).seconds == (5.0, 2.0) and in_step(both, network=True).seconds == (5.0, 4.0)
