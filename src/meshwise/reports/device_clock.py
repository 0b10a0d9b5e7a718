"""Map CUDA events to the host's clock, without synchronizing.

The events are recorded in an accelerator's stream.

An event gives only the time since another event, in float32 milliseconds, whose resolution after an hour is 0.25 ms. So
times are measured from an event at most REBASE older, and summed as integers. The device's clock drifts against the
host's. Two bounds correct that: the device cannot have passed an event before the host recorded it, nor after the host
saw that it had passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REBASE = 1_000_000_000  # times are measured from an event that is at most this many ns older


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """An event recorded in a stream of the device, and the host's time when it was recorded (ns)."""

    event: Any
    host: int


def is_captured() -> bool:
    """Return whether the work of the accelerator's current stream is being captured, as for a CUDA graph. Captured work
    runs later, perhaps several times. Its results must not be read, waited for or timed during the capture."""
    if torch.accelerator.current_accelerator() is None:
        return False
    return bool(getattr(torch.accelerator.current_stream(), "is_capturing", bool)())


class DeviceClock:
    """Tells when a device reaches points in its current stream, in ns of the host's clock. `mark` sets such a point."""

    def __init__(self, clock: Callable[[], int], make_event: Callable[[], Any]) -> None:
        """clock: returns the host's time in ns. make_event: makes an event that can be timed."""
        self._clock = clock
        self._make_event = make_event
        self._base: tuple[Any, int] | None = None
        self._shift = 0

    def mark(self) -> DeviceMark | int:
        """Record an event in the current stream, after the work submitted so far. While the stream is captured, return
        the host's time instead."""
        if is_captured():
            return self._clock()
        event = self._make_event()
        event.record()
        return DeviceMark(event, self._clock())

    def time(self, mark: DeviceMark) -> int:
        """Return when the device reached the mark, in ns of the host's clock."""
        if self._base is None:
            self._base = (mark.event, mark.host)
        event, origin = self._base
        moment = origin + int(event.elapsed_time(mark.event) * 1e6)
        if moment - origin > REBASE:
            self._base = (mark.event, moment)
        earliest, latest = mark.host, self._clock()
        self._shift = min(max(self._shift, earliest - moment), latest - moment)
        return moment + self._shift
