"""Time a transfer by the host's clock or stream events, without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshwise.spec.devices import has_streams

Seconds = float | Callable[[], float]
"""Seconds, or a function that waits until they are known and returns them."""


class Stopwatch:
    """A timer that starts when it is created.

    device: a device with streams, on which `stream` (by default the current stream) is timed. For None, or a device
        without streams, the host's clock is used.
    """

    def __init__(self, device: torch.device | None, stream: torch.Stream | None = None) -> None:
        timed = device is not None and has_streams(device)
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if timed else []
        for event in self._events[:1]:
            event.record(stream)
        self._start = time.perf_counter()

    def stop(self, stream: torch.Stream | None = None) -> Seconds:
        """Return the seconds since the start. On a device with streams, return a function that waits for `stream` and
        returns the seconds."""
        if not self._events:
            return time.perf_counter() - self._start
        self._events[1].record(stream)
        return self._elapsed

    def _elapsed(self) -> float:
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
