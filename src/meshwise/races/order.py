"""Order the events of streams with vector clocks.

A lane is a stream of a device, or the host. All threads of the host are one lane. The work on each lane is numbered.

A lane knows that the work of another lane is done, up to a number, once it has waited for it. It can wait for an event,
which stores what its own lane knew when the event was recorded. Or the host waits, because work that is launched after
a wait of the host also follows what the host has waited for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """A stream of a device, or the host.

    device: for example `cuda:1`, or `host`.
    stream: the handle of the stream. 0 is the default stream of the device.
    """

    device: str
    stream: int


HOST = Lane("host", 0)
Clock = dict[Lane, int]
"""Maps a lane to the number of its latest piece of work that is known to be done, as in a vector clock."""


@dataclass(frozen=True)
class Recorded:
    """The last recording of an event.

    seen: the clock of the lane at the time of the recording.
    where: the source lines that recorded it.
    """

    lane: Lane
    seen: Clock
    where: Any


class Order:
    """The vector clocks of all lanes. The clock of a lane says which work of the other lanes is done before the next
    work of this lane begins."""

    def __init__(self) -> None:
        self._seen: dict[Lane, Clock] = {}
        self._host: Clock = {}
        self._recorded: dict[Hashable, Recorded] = {}
        self._waited: dict[tuple[Lane, Lane], Recorded] = {}

    def begin(self, lane: Lane) -> int:
        """Begin the next piece of work on a lane. Returns its number."""
        own = self._clock(lane)
        own[lane] += 1
        return own[lane]

    def is_before(self, lane: Lane, number: int, other: Lane) -> bool:
        """Return whether work number `number` of `lane` is done before the next work on the lane `other` begins."""
        if lane in (other, HOST) or number <= self._host.get(lane, 0):
            return True
        return other != HOST and number <= self._clock(other).get(lane, 0)

    def record(self, event: Hashable, lane: Lane, where: Any = None) -> None:
        """Record an event on a lane, with the lane's present clock. where: the source lines."""
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

    def host_waits(self, seen: Clock) -> None:
        """Record that the host waits for all work in the clock `seen`."""
        _join(self._host, seen)

    def seen_by(self, lane: Lane) -> Clock:
        """Return the lane's clock, which includes its own work up to now."""
        return dict(self._clock(lane))

    def lanes(self, device: str) -> list[Lane]:
        """Return the streams of a device that were used."""
        return [lane for lane in self._seen if lane.device == device]

    def let_wait(self, lane: Lane, other: Lane) -> None:
        """Continue as if `lane` had waited for all work of `other` up to now."""
        self._clock(lane)[other] = self._clock(other)[other]

    def event_waited_for(self, lane: Lane, other: Lane) -> Recorded | None:
        """Return the last event of the lane `other` for which `lane` has waited, or None."""
        return self._waited.get((lane, other))

    def _clock(self, lane: Lane) -> Clock:
        return self._host if lane == HOST else self._seen.setdefault(lane, {lane: 0})


def _join(clock: Clock, other: Clock) -> None:
    for lane, number in other.items():
        if number > clock.get(lane, 0):
            clock[lane] = number
