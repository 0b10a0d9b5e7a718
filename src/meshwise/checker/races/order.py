"""Order the events of streams with vector clocks.

A lane is a stream of a device, or the host. All threads of the host are one lane. The work on each lane is numbered.

A lane knows that another lane's work up to some number is done, once it has waited for that work. Either the lane waits
for an event, which stores what the recording lane knew at that time. Or the host waits: all work that is launched later
follows what the host has waited for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from meshwise.torch_compat.gpu_trace import HOST, Lane

Clock = dict[Lane, int]
"""Maps a lane (a stream, or the host) to a number. All work of the lane up to this number is known to be done."""


@dataclass(frozen=True)
class Recorded:
    """What was known when a CUDA event was recorded."""

    lane: Lane
    seen: Clock
    where: Any


class Order:
    """Tells which work is done before which other work begins, on the streams and the host. A stream, or the host, is
    called a lane."""

    def __init__(self) -> None:
        self._seen: dict[Lane, Clock] = {}
        self._host: Clock = {}
        self._recorded: dict[Hashable, Recorded] = {}
        self._waited: dict[tuple[Lane, Lane], Recorded] = {}

    def begin(self, lane: Lane) -> int:
        """Begin an operator on a lane (a stream, or the host). Return its number in the order of this lane."""
        own = self._clock(lane)
        own[lane] += 1
        return own[lane]

    def is_before(self, lane: Lane, number: int, other: Lane) -> bool:
        """Return whether work number `number` of `lane` is sure to be done before any work begins that is launched on
        `other` from now on."""
        if lane in (other, HOST) or number <= self._host.get(lane, 0):
            return True
        return other != HOST and number <= self._clock(other).get(lane, 0)

    def record(self, event: Hashable, lane: Lane, where: Any = None) -> None:
        """Record that the program records an event on the stream `lane`."""
        self._recorded[event] = Recorded(lane, dict(self._clock(lane)), where)

    def delete(self, event: Hashable) -> None:
        """Forget an event that was deleted, because a new event may get its handle."""
        self._recorded.pop(event, None)

    def wait(self, event: Hashable, lane: Lane) -> None:
        """Record that a lane, or the host, waits for an event. An event that was never recorded counts as complete."""
        recorded = self._recorded.get(event)
        if recorded is not None:
            self._waited[lane, recorded.lane] = recorded
            _join(self._clock(lane), recorded.seen)

    def await_stream(self, lane: Lane) -> None:
        """Record that the host has waited for all work of this stream."""
        _join(self._host, self._clock(lane))

    def await_device(self, device: int) -> None:
        """Record that the host has waited for all work of all streams of a device."""
        for lane in [lane for lane in self._seen if lane[0] == device]:
            self.await_stream(lane)

    def let_wait(self, lane: Lane, other: Lane) -> None:
        """Pretend that the stream `lane` now waits for all work of the stream `other` so far."""
        self._clock(lane)[other] = self._clock(other)[other]

    def event_waited_for(self, lane: Lane, other: Lane) -> Recorded | None:
        """Return the event for which the stream `lane` has waited most recently, among the events recorded on the
        stream `other`. Return None if `lane` has waited for none of them."""
        return self._waited.get((lane, other))

    def _clock(self, lane: Lane) -> Clock:
        return self._host if lane == HOST else self._seen.setdefault(lane, {lane: 0})


def _join(clock: Clock, other: Clock) -> None:
    for lane, number in other.items():
        if number > clock.get(lane, 0):
            clock[lane] = number
