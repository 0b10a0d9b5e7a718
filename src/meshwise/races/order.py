"""Order the events of streams with vector clocks.

A lane is a stream of a device, or the host. The work on each lane is numbered. A lane has seen the work of another lane
up to the point that it waited for: by an event, which keeps what its lane had seen when it was recorded, or by the
host, since work that is launched after a wait of the host follows that wait. All threads of the host are one lane.
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
"""Lane -> how many pieces of its work are known to be done."""


@dataclass(frozen=True)
class Recorded:
    """The last recording of an event. seen: the lane's clock then. where: the source lines."""

    lane: Lane
    seen: Clock
    where: Any


class Order:
    """The clocks of all lanes: what work each lane has seen."""

    def __init__(self) -> None:
        self._seen: dict[Lane, Clock] = {}
        self._host: Clock = {}
        self._recorded: dict[Hashable, Recorded] = {}
        self._waited: dict[tuple[Lane, Lane], Recorded] = {}

    def begin(self, lane: Lane) -> int:
        """Begin the next piece of work on the lane, and return its number."""
        own = self._clock(lane)
        own[lane] += 1
        return own[lane]

    def is_before(self, lane: Lane, number: int, other: Lane) -> bool:
        """Return whether piece `number` of the work of `lane` is done before the next piece of `other` begins."""
        if lane in (other, HOST) or number <= self._host.get(lane, 0):
            return True
        return other != HOST and number <= self._clock(other).get(lane, 0)

    def record(self, event: Hashable, lane: Lane, where: Any = None) -> None:
        """Record an event on a lane: keep with it what the lane has seen by now. where: the source lines."""
        self._recorded[event] = Recorded(lane, dict(self._clock(lane)), where)

    def delete(self, event: Hashable) -> None:
        """Forget the event: it was deleted, and a new one may get its handle."""
        self._recorded.pop(event, None)

    def wait(self, event: Hashable, lane: Lane) -> None:
        """Let the lane, or the host, wait for an event. An event that was never recorded counts as complete."""
        recorded = self._recorded.get(event)
        if recorded is not None:
            self._waited[lane, recorded.lane] = recorded
            _join(self._clock(lane), recorded.seen)

    def host_waits(self, seen: Clock) -> None:
        """Let the host wait for all work in the clock `seen`."""
        _join(self._host, seen)

    def seen_by(self, lane: Lane) -> Clock:
        """Return the lane's clock: what it has seen and done up to now."""
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
