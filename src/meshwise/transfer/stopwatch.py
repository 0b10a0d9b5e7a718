"""How long a transfer took: by the host's clock, or by two events of a CUDA stream, so that nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Seconds = float | Callable[[], float]
"""A time, or what waits for it and gives it."""


class Stopwatch:
    """Starts when it is made. on_cuda: the time is taken on `stream`, else the current one, not on the host."""

    def __init__(self, on_cuda: bool, stream: torch.cuda.Stream | None = None) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        for event in self._events[:1]:
            event.record(stream)
        self._start = time.perf_counter()

    def stop(self, stream: torch.cuda.Stream | None = None) -> Seconds:
        """The seconds since the start; for a stream, what waits until it is here and then gives them."""
        if not self._events:
            return time.perf_counter() - self._start
        self._events[1].record(stream)
        return self._elapsed

    def _elapsed(self) -> float:
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
