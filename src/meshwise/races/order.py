"""Order the events of streams with vector clocks.

A lane is a stream of a device, or the host. Work on a lane is counted. A lane has seen the work of another one up to
the point that it has waited for: by an event, whose record keeps what its lane had seen then, or by the host, which
launches all that follows its wait. The host is one lane: its threads are taken in the order in which they were seen.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """A stream. device: `cuda:1`, or `host`. stream: its handle; 0 is the device's default stream."""

    device: str
    stream: int


HOST = Lane("host", 0)
Clock = dict[Lane, int]
"""For each lane, how many pieces of its work are done."""


@dataclass(frozen=True)
class Recorded:
    """The last recording of an event. where: the code that recorded it."""

    lane: Lane
    seen: Clock
    where: Any


class Order:
    """The clocks of all lanes."""

    def __init__(self) -> None:
        self._seen: dict[Lane, Clock] = {}
        self._host: Clock = {}
        self._recorded: dict[Hashable, Recorded] = {}
        self._waited: dict[tuple[Lane, Lane], Recorded] = {}

    def begin(self, lane: Lane) -> int:
        """Return the number of the next piece of work on the lane."""
        own = self._clock(lane)
        own[lane] += 1
        return own[lane]

    def is_before(self, lane: Lane, number: int, other: Lane) -> bool:
        """Return whether a piece of work of `lane` is done before the next one of `other`."""
        if lane in (other, HOST) or number <= self._host.get(lane, 0):
            return True
        return other != HOST and number <= self._clock(other).get(lane, 0)

    def record(self, event: Hashable, lane: Lane, where: Any = None) -> None:
        """Record an event on a lane."""
        self._recorded[event] = Recorded(lane, dict(self._clock(lane)), where)

    def delete(self, event: Hashable) -> None:
        """Delete the event; a new one may get its name."""
        self._recorded.pop(event, None)

    def wait(self, event: Hashable, lane: Lane) -> None:
        """Let the lane, or the host, wait for an event. One that was never recorded counts as complete."""
        recorded = self._recorded.get(event)
        if recorded is not None:
            self._waited[lane, recorded.lane] = recorded
            _join(self._clock(lane), recorded.seen)

    def host_waits(self, seen: Clock) -> None:
        """Let the host wait for everything that a lane had seen."""
        _join(self._host, seen)

    def seen_by(self, lane: Lane) -> Clock:
        """Return what the lane has seen and done up to now."""
        return dict(self._clock(lane))

    def lanes(self, device: str) -> list[Lane]:
        """Return the lanes of a device that were used."""
        return [lane for lane in self._seen if lane.device == device]

    def let_wait(self, lane: Lane, other: Lane) -> None:
        """Continue as if `lane` had waited for `other` here."""
        self._clock(lane)[other] = self._clock(other)[other]

    def event_waited_for(self, lane: Lane, other: Lane) -> Recorded | None:
        """Return the last event of `other` that `lane` has waited for."""
        return self._waited.get((lane, other))

    def _clock(self, lane: Lane) -> Clock:
        return self._host if lane == HOST else self._seen.setdefault(lane, {lane: 0})


def _join(clock: Clock, other: Clock) -> None:
    for lane, number in other.items():
        if number > clock.get(lane, 0):
            clock[lane] = number
