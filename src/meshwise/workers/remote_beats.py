"""Exchange the states of silent ranks with the other machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwise.workers.heartbeat import Beat, CollectiveCall
from meshwise.workers.meeting import Meeting

EVERY = 1.0  # seconds between reports on the ranks of a machine


@dataclass(frozen=True)
class RemoteBeat:
    """The state of a rank on another machine, as that machine last reported it."""

    beat: Beat = field(default_factory=Beat)
    silent: bool = False
    stopped: bool = False


class RemoteBeats:
    """Tells the other machines which ranks of this machine are silent, and hears the same of theirs."""

    def __init__(self, meeting: Meeting | None) -> None:
        """meeting: None on one machine, where nothing needs to be exchanged."""
        self._meeting, self._told = meeting, 0.0
        self._heard: dict[int, tuple[Any, dict[int, RemoteBeat]]] = {}
        self._said: dict[int, Any] = {}

    def tell(self, here: Callable[[], Mapping[int, RemoteBeat]]) -> None:
        """Tell the other machines about the silent ranks of this machine, at most once per EVERY seconds. here: returns
        the states of all its ranks."""
        now = time.monotonic()
        if self._meeting is not None and now - self._told >= EVERY:
            self._told = now
            self._meeting.set("silent", {rank: _plain(each) for rank, each in here().items()})

    def heard(self) -> dict[int, RemoteBeat]:
        """Return the state of each rank on the other machines, as far as these machines have reported it."""
        found = dict[int, RemoteBeat]()
        for node, news in () if self._meeting is None else self._meeting.of_others("silent"):
            if node not in self._heard or self._heard[node][0] != news:
                self._heard[node] = news, {int(rank): _read(told) for rank, told in news.items()}
            found |= dict.fromkeys(self._meeting.ranks_of(node), RemoteBeat())  # type: ignore[union-attr]
            found |= self._heard[node][1]
        return found

    def say(self, text: str) -> None:
        """Make the launchers of the other machines show this text."""
        if self._meeting is not None:
            self._meeting.set("hang", text)

    def news(self) -> Iterator[str]:
        """Yield the texts that other machines have sent with `say` since the last call."""
        for node, text in () if self._meeting is None else self._meeting.of_others("hang"):
            if text != self._said.get(node):
                self._said[node] = text
                yield f"machine {node}: {text}"


def _plain(remote: RemoteBeat) -> dict[str, Any]:
    """Convert the state of a silent rank to values for JSON, with the time on this machine's clock."""
    last = replace(remote.beat, steps=(), recent=remote.beat.recent[-1:])
    return asdict(replace(remote, beat=last)) | {"sent": time.perf_counter_ns()}


def _read(told: Mapping[str, Any]) -> RemoteBeat:
    """Return the state of a rank that another machine has just reported, with times on this machine's clock."""
    ahead = time.perf_counter_ns() - told["sent"]
    calls = [
        one and CollectiveCall(**{**one, "at": one["at"] + ahead})
        for one in (*told["beat"]["recent"], told["beat"]["waits_in"])
    ]
    beat = Beat(**{**told["beat"], "recent": calls[:-1], "waits_in": calls[-1]})
    return RemoteBeat(beat, told["silent"], told["stopped"])
