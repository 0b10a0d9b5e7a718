"""Time repeated calls by the device's clock, or by the host's.

On CUDA, a stream is held until many calls are enqueued, and two events time them, so that the host's pace does not
count. The first calls are left out. Calls are repeated, for a median and its percentiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshwise.spec.devices import has_streams
from meshwise.torch_compat.driver import hold_stream

WARM_UP = 5  # at most this many warm-up calls, until two in a row differ by at most the fraction STABLE
STABLE = 0.1
LEAST, MOST = 3, 200  # limits on the number of repeats
BATCH_SECONDS, MOST_CALLS = 2e-3, 20  # short calls are batched up to these limits, as in nccl-tests
HOST_SECONDS = 1e-5  # assumed time for the host to enqueue a call


def alone(*values: float) -> list[float]:
    """Return the values of this process, when no other ranks take part."""
    return list(values)


def repeat(
    timed: Callable[[int], float],
    budget: float,
    *,
    single: bool = False,
    agree: Callable[..., list[float]] = alone,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], float]:
    """Repeat a call for about `budget` seconds, at least LEAST and at most MOST times. Return the seconds of each
    repeat, and the time spent after the first LEAST repeats."""
    began, last, spent = clock(), 0.0, 0.0
    for number in range(WARM_UP):
        once, spent = agree(timed(1), clock() - began)
        stable = abs(once - last) <= STABLE * once
        last = once
        if number and (stable or spent > budget / 4):
            break
    batch = 1 if single else max(1, min(MOST_CALLS, int(BATCH_SECONDS / max(last, 1e-9))))
    seconds: list[float] = []
    at_least = 0.0
    while len(seconds) < LEAST or (len(seconds) < MOST and spent < budget):
        took, spent = agree(timed(batch), clock() - began)
        seconds.append(took)
        if len(seconds) == LEAST:
            at_least = spent
    return seconds, spent - at_least


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def held_seconds(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Return the mean seconds of `batch` calls in a row. A CUDA stream is held until all of them are enqueued."""
    if not has_streams(device):
        return host_seconds(call, device, batch)
    with torch.get_device_module(device).device(device):
        hold_stream(HOST_SECONDS * (batch + 2))
        return stream_seconds(call, device, batch)


def host_seconds(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Return the seconds of one call by the host's clock, as the mean of `batch` calls in a row."""
    wait(device)
    start = time.perf_counter()
    for _ in range(batch):
        call()
    wait(device)
    return (time.perf_counter() - start) / batch


def stream_seconds(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Return the seconds of one call by the device's clock, as the mean of `batch` calls in a row."""
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    start.record()
    for _ in range(batch):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / batch
