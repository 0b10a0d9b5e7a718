"""Interpolate measured seconds by message size, and fit a line.

Between two sizes, the table is interpolated on logarithmic axes, since a constant bandwidth is wrong by a factor of 100
at 32 KiB. The fitted line, t = latency + bytes / bandwidth, describes the table by two numbers, and its residual says
how well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

_ROUNDS = 60  # rounds of reweighting; after about 40, the fit moves by less than 1e-9


@dataclass(frozen=True)
class Timings:
    """The measured seconds of a transfer or collective at each size in bytes, from the smallest size to the largest.

    seconds: the median of repeated measurements.
    p95, p99: percentiles of the repeated measurements. They may be empty.
    in_step: the mean seconds of a call that follows computing, as in a training step. Empty if not measured.
    latency, bandwidth: the seconds and the bytes/s of the line that was fitted to the measured times: seconds = latency
        + size / bandwidth.
    residual: the median relative error of this line.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency: float
    bandwidth: float
    residual: float
    p95: tuple[float, ...] = ()
    p99: tuple[float, ...] = ()
    in_step: tuple[float, ...] = ()


def fitted(
    sizes: Sequence[int],
    seconds: Sequence[float],
    p95: Sequence[float] = (),
    p99: Sequence[float] = (),
    in_step: Sequence[float] = (),
) -> Timings:
    """Return the `Timings` of a table of measured times, with a line fitted to the table.

    The line has the least absolute relative error. Its latency and bandwidth are at least 0.
    """
    latency, per_byte = _line(sizes, seconds)
    errors = [abs(latency + per_byte * size - time) / time for size, time in zip(sizes, seconds, strict=True)]
    bandwidth = 1 / per_byte if per_byte > 0 else math.inf
    columns = map(tuple, (p95, p99, in_step))
    return Timings(tuple(sizes), tuple(seconds), latency, bandwidth, median(errors), *columns)


def in_step(timings: Timings, *, network: bool = False) -> Timings:
    """Return the times of calls in a training step: the times measured after computing, if there are any.

    network: whether the calls cross a network. After a pause, a network may be faster for a while (cloud providers sell
        such bursts), but the calls of a step follow each other and use the burst up. So the longer time is taken.
    """
    found = timings.in_step or timings.seconds
    if network:
        found = tuple(map(max, found, timings.seconds))
    return replace(timings, seconds=found)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit the line `time = latency + seconds per byte * size` to measurements.
    Return (latency, seconds per byte)."""
    if len(sizes) == 1 or max(sizes) == min(sizes):
        return 0.0, median(seconds) / max(sizes[0], 1)
    weights = [1 / time**2 for time in seconds]
    latency = per_byte = 0.0
    for _ in range(_ROUNDS):
        latency, per_byte = _weighted(sizes, seconds, weights)
        off = [abs(latency + per_byte * size - time) / time for size, time in zip(sizes, seconds, strict=True)]
        weights = [1 / (time**2 * max(error, 1e-6)) for time, error in zip(seconds, off, strict=True)]
    return latency, per_byte


def _weighted(sizes: Sequence[int], seconds: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    rows, total = [*zip(weights, sizes, seconds, strict=True)], sum(weights)
    mean_size = sum(w * s for w, s, _ in rows) / total
    mean_time = sum(w * t for w, _, t in rows) / total
    spread = sum(w * (s - mean_size) ** 2 for w, s, _ in rows)
    both = sum(w * (s - mean_size) * (t - mean_time) for w, s, t in rows)
    per_byte = max(both / spread, 0.0)
    latency = mean_time - per_byte * mean_size
    if latency >= 0:
        return latency, per_byte
    return 0.0, sum(w * s * t for w, s, t in rows) / sum(w * s * s for w, s, _ in rows)


def seconds_at(timings: Timings, size: int) -> float:
    """Return the seconds for a transfer of `size` bytes, according to the measured times.

    Between two measured sizes, the time is interpolated. Below the smallest size, it is the time of the smallest size.
    Above the largest size, every further byte takes the seconds that `_seconds_a_byte` returns. The fitted line is not
    used, because it may be far off at large sizes.
    """
    sizes, seconds = timings.sizes, timings.seconds
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] + (size - sizes[-1]) * _seconds_a_byte(sizes, seconds)
    at = bisect_left(sizes, size)
    share = math.log(size / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    return math.exp((1 - share) * math.log(seconds[at - 1]) + share * math.log(seconds[at]))


def _seconds_a_byte(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how many seconds each further byte takes above the largest measured size."""
    half = [at for at, time in enumerate(seconds) if time <= seconds[-1] / 2]
    if not half:
        return seconds[-1] / sizes[-1]
    return (seconds[-1] - seconds[half[-1]]) / (sizes[-1] - sizes[half[-1]])


def rate_at(timings: Timings, size: int) -> float:
    """Return the rate of a transfer of `size` bytes, in bytes/s."""
    return size / seconds_at(timings, size)
