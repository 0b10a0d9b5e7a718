"""Clocks: skew and drift are removed to within half a round trip, and causes come before effects."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwise.records.folder import begin_session, end_session
from meshwise.reports.arrivals import arrival_table
from meshwise.reports.rank_log import causal_shifts, fit_clock
from meshwise.reports.read import read_timeline
from meshwise.spec.world import World
from meshwise.training.recording.recording import Recording
from meshwise.transfer import collectives
from meshwise.workers.clock import ClockProbe, ClockServer
from tests.pool import Pool

MS, SECOND = 1_000_000, 1_000_000_000


def round_trips(
    offset: int, drift: float, bursts: int, seed: int, every: int = 10 * SECOND, wander: float = 0.0
) -> list[tuple[int, int, int]]:
    """Samples of a clock that is `offset` behind rank 0's and slower by `drift`, over uneven ways there and back."""
    random = np.random.default_rng(seed)
    samples, sent = [], 10**15
    for burst in range(bursts):
        sent += every
        for _ in range(8):
            there, back = (int(way) for way in random.exponential(40_000, 2) + 10_000)
            ahead = offset + int(drift * (sent - 10**15)) + int(wander * np.sin(burst))
            samples.append((sent, sent + there + ahead, sent + there + back))
            sent += there + back + 1000
    return samples


@given(st.integers(-(10**12), 10**12), st.floats(-5e-5, 5e-5), st.integers(1, 30), st.integers(0, 10**6))
def test_offset_and_drift_are_found_to_within_half_a_round_trip(
    offset: int, drift: float, bursts: int, seed: int
) -> None:
    samples = round_trips(offset, drift, bursts, seed)
    fit = fit_clock(1, samples)
    shortest = min(received - sent for sent, _, received in samples)
    times = np.array([sent for sent, _, _ in samples])
    truth = times + offset + (drift * (times - 10**15)).astype(np.int64)
    worst = np.abs(fit.to_reference(times) - truth).max()
    longest_best = max(
        min(received - sent for sent, _, received in samples[at : at + 8]) for at in range(0, len(samples), 8)
    )
    assert worst <= longest_best / 2 + 2
    assert shortest / 2 <= fit.clock.error + 1 and fit.clock.samples == len(samples)
    if bursts > 10:
        assert fit.clock.drift == pytest.approx(drift, abs=1e-6)


@given(st.integers(-(10**12), 10**12), st.floats(-5e-5, 5e-5), st.lists(st.integers(0, 20 * MS), max_size=8))
def test_a_congested_link_errs_to_one_side_and_is_not_taken_for_a_drift(
    offset: int, drift: float, congestion: list[int]
) -> None:
    """Behind a full queue a question takes `congestion` ns longer than its answer."""
    samples, began = [], 10**15
    for burst, longer in enumerate([0, *congestion]):
        sent = began + burst * 10 * SECOND
        true = offset + int(drift * (sent - began))
        samples.append((sent, sent + 12_000 + longer + true, sent + 24_000 + longer))
    fit = fit_clock(1, samples)
    middle = np.array([(sent + received) // 2 for sent, _, received in samples])
    truth = np.array([offset + int(drift * (sent - began)) for sent, _, _ in samples])
    off = np.abs(fit.to_reference(middle) - middle - truth)
    assert off.max() <= fit.clock.error + 10
    if drift == 0:
        assert off.max() <= 12_010


def test_a_clock_that_wanders_is_followed() -> None:
    samples = round_trips(0, 0.0, 20, seed=1, wander=5 * MS)
    fit = fit_clock(1, samples)
    times = np.array([samples[at][0] for at in range(0, len(samples), 8)])
    truth = times + (5 * MS * np.sin(np.arange(20))).astype(np.int64)
    assert np.abs(fit.to_reference(times) - truth).max() < 0.2 * MS


def test_without_samples_clocks_are_taken_for_one() -> None:
    fit = fit_clock(2, [])
    assert fit.to_reference(np.array([5, 10**18])).tolist() == [5, 10**18] and fit.clock.error == 0


def test_collectives_mend_what_round_trips_leave() -> None:
    arrival = np.array([[0, 100], [1000, 900]]) + np.array([[0, 50_000]])
    end = np.array([[200, 200], [1100, 1100]]) + np.array([[0, 50_000]])
    shifts = causal_shifts(arrival, end)
    assert shifts is not None and shifts[0] == 0
    arrival, end = arrival + shifts, end + shifts
    assert (end.min(axis=1) >= arrival.max(axis=1)).all()
    assert -50_100 <= shifts[1] <= -49_800


@given(st.integers(2, 6), st.data())
def test_true_times_are_left_alone_and_skewed_ones_made_causal(ranks: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    arrival = np.sort(random.integers(0, 10**6, (count, ranks)), axis=0)
    end = arrival.max(axis=1, keepdims=True) + random.integers(0, 1000, (count, ranks))
    assert causal_shifts(arrival, end).tolist() == [0] * ranks  # type: ignore[union-attr]
    skew = random.integers(-(10**5), 10**5, ranks)
    shifts = causal_shifts(arrival + skew, end + skew)
    assert shifts is not None
    mended = (arrival + skew + shifts, end + skew + shifts)
    assert (mended[1].min(axis=1) >= mended[0].max(axis=1)).all()


def test_times_that_no_shift_can_mend_are_left_and_known() -> None:
    arrival, end = np.array([[0, 100], [1100, 1000]]), np.array([[50, 150], [1050, 1050]])
    assert causal_shifts(arrival, end) is None


def test_the_clock_of_another_process_is_asked_over_connections_of_its_own() -> None:
    ahead = 3 * SECOND
    server = ClockServer("127.0.0.1", lambda: time.perf_counter_ns() + ahead)
    probe = ClockProbe(("127.0.0.1", server.port), time.perf_counter_ns)
    samples = probe.sample(16)
    fit = fit_clock(1, samples)
    assert len(samples) == 16 and abs(fit.clock.offset - ahead) <= fit.clock.error
    server.close()


def test_a_server_that_is_gone_gives_no_samples() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = int(closed.getsockname()[1])
    assert ClockProbe(("127.0.0.1", port), time.perf_counter_ns).sample(4) == []


def skewed_run(folder: str, skews: list[int], steps: int) -> None:
    """Ranks whose clocks are off by `skews` ns each meet in all-reduces and barriers."""
    rank = dist.get_rank()
    world = World(rank, dist.get_world_size(), rank, dist.get_world_size())
    recording = Recording(world, Path(folder), clock=lambda: time.perf_counter_ns() + skews[rank])
    for step in range(1, steps + 1):
        recording.recorder.begin_step(step)
        with recording.recorder.span("forward"):
            time.sleep(0.001)
        collectives.all_reduce(torch.ones(1000))
    collectives.barrier()
    recording.close()


@pytest.mark.parametrize("skews", [[0, 50 * MS, -50 * MS], [50 * MS, 0, -50 * MS]])
def test_skew_between_ranks_is_removed_to_within_half_a_round_trip(
    pool: Callable[[int], Pool], tmp_path: Path, skews: list[int]
) -> None:
    begin_session(tmp_path, time.time(), job="skewed", devices=["cpu"] * 3)
    pool(3).run(skewed_run, str(tmp_path), skews, 40)
    end_session(tmp_path, "finished")
    timeline = read_timeline(tmp_path)
    for clock in timeline.clocks[1:]:
        assert abs(clock.offset - (skews[0] - skews[clock.rank])) <= clock.error  # which is half a round trip
        assert clock.error < 2 * MS
    table = arrival_table(timeline.spans, timeline.names)
    assert table.together.sum() >= 41
    arrival, end = table.arrival[table.together], table.end[table.together]
    assert (end.min(axis=1) >= arrival.max(axis=1)).all()
