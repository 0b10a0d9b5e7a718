"""Time repeated calls by the device's clock, else by the host's.

On CUDA many calls are enqueued behind a held stream and lie between two events, so that the host's pace does not count;
the first calls are left out. Every figure is a median with its percentiles, never a single call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from meshwise.compat.driver import hold_stream
from meshwise.spec.devices import has_streams

WARM_UP = 2
LEAST, MOST = 5, 200  # repeats of a call
BATCH_SECONDS = 2e-4  # of device work between two events: their own error is below 1 µs
HOST_SECONDS = 1e-5  # of the host for one enqueued call


@dataclass(frozen=True)
class Sample:
    """The median, 95th and 99th percentile of the seconds of one call, over `count` repeats.

    in_step: the mean seconds of a call that follows computing. None if not measured.
    """

    seconds: float
    p95: float
    p99: float
    count: int
    in_step: float | None = None


def sample_of(seconds: list[float]) -> Sample:
    """Compute the percentiles of the seconds of repeated calls."""
    if len(seconds) < 2:
        return Sample(seconds[0], seconds[0], seconds[0], 1)
    cuts = quantiles(seconds, n=100, method="inclusive")
    return Sample(median(seconds), cuts[94], cuts[98], len(seconds))


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def repeat(
    call: Callable[[], object],
    device: torch.device,
    budget: float,
    between: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Time `call` for about `budget` seconds on `device`, at least LEAST and at most MOST times.

    between: called before each repeat without being timed, such as a flush of the cache.
    """

    def timed(batch: int) -> float:
        if between:
            between()
        return _seconds(call, device, batch, clock)

    end = clock() + budget
    for _ in range(WARM_UP):
        once = timed(1)
    batch = 1 if between else max(1, min(50, round(BATCH_SECONDS / max(once, 1e-9))))
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and clock() < end):
        seconds.append(timed(batch))
    return sample_of(seconds)


def _seconds(call: Callable[[], object], device: torch.device, batch: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one call, as the mean of `batch` calls in a row. The device's events are used if it has
    streams, else the host's clock."""
    if has_streams(device):
        with torch.get_device_module(device).device(device):
            hold_stream(HOST_SECONDS * (batch + 2))
            return stream_seconds(call, device, batch)
    return host_seconds(call, device, batch, clock)


def host_seconds(
    call: Callable[[], object], device: torch.device, batch: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call by the host's clock, as the mean of `batch` calls in a row."""
    wait(device)
    start = clock()
    for _ in range(batch):
        call()
    wait(device)
    return (clock() - start) / batch


def stream_seconds(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Return the mean time in seconds of `batch` calls in a row. The time is measured on the device, by two events in
    its stream."""
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    start.record()
    for _ in range(batch):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / batch
