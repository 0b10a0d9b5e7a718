"""Exchange news of silent ranks between launchers, to explain hangs.

A rank is silent while it makes no progress. With this news, the launcher of every machine can explain a hang.

Nothing goes over the network while all ranks make progress. Clocks of machines are not compared: a message says how
long ago something happened, and its receiver adds the time since the message came.

Tested in tests/workers/test_far_beats.py and tests/faults/test_far_hangs.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwise.workers.heartbeat import Beat, CollectiveCall
from meshwise.workers.nodes import Nodes

EVERY = 1.0  # seconds between two words on the ranks of a machine


@dataclass(frozen=True)
class Far:
    """The state of a rank on another machine, as that machine last reported it.

    beat: what the rank last reported.
    silence: for how many seconds the rank has reported no progress. If the rank makes progress, this is 0, and the
        machine does not report `beat` and `stopped`. They have their default values then.
    stopped: whether the rank's process is stopped.
    """

    beat: Beat = field(default_factory=Beat)
    silence: float = 0.0
    stopped: bool = False


class FarBeats:
    """Exchanges the states of ranks with the other machines of an attempt, to find the ranks that cause a hang."""

    def __init__(self, nodes: Nodes | None) -> None:
        """nodes: the machines of the attempt. None on one machine, where nothing needs to be exchanged."""
        self._nodes, self._told = nodes, 0.0
        self._heard: dict[int, tuple[Any, float]] = {}
        self._said: dict[int, Any] = {}

    def tell(self, here: Callable[[], Mapping[int, Far]]) -> None:
        """Tell the other machines about the ranks of this machine, at most once per EVERY seconds. here: returns their
        states."""
        now = time.monotonic()
        if self._nodes is not None and now - self._told >= EVERY:
            self._told = now
            self._nodes.set(f"beats/{self._nodes.node_rank}", {rank: _plain(far) for rank, far in here().items()})

    def heard(self) -> dict[int, Far]:
        """Return the state of each rank on the other machines, as far as these machines have reported it."""
        found, now = dict[int, Far](), time.monotonic()
        for node in self._others():
            told, at = self._heard.get(node, (None, now))
            if self._nodes is not None and (news := self._nodes.try_get(f"beats/{node}")) != told:
                told, at = self._heard[node] = news, now
            for rank, one in (told or {}).items():
                found[int(rank)] = _read(one, now - at)
        return found

    def say(self, text: str) -> None:
        """Make the launchers of the other machines show this text."""
        if self._nodes is not None:
            self._nodes.set(f"hang/{self._nodes.node_rank}", text)

    def news(self) -> Iterator[str]:
        """Yield the texts that other machines have sent with `say` since the last call."""
        for node in self._others():
            assert self._nodes is not None
            text = self._nodes.try_get(f"hang/{node}")
            if text is not None and text != self._said.get(node):
                self._said[node] = text
                yield f"machine {node}: {text}"

    def _others(self) -> list[int]:
        return [] if self._nodes is None else [member.node for member in self._nodes.others]


def _plain(far: Far) -> dict[str, Any]:
    """Convert the state of a rank to values for JSON."""
    if not far.silence:
        return {}
    now, beat = time.perf_counter_ns(), replace(far.beat, steps=(), recent=tuple(far.beat.recent[-1:]))
    values = asdict(beat) | {"silence": round(far.silence, 2), "stopped": far.stopped}
    for one in (*values["recent"], *filter(None, [values["waits_in"]])):
        one["at"] = now - one["at"]
    return values


def _read(told: Mapping[str, Any], since: float) -> Far:
    if not told:
        return Far()
    values, now = dict(told), time.perf_counter_ns() - round(since * 1e9)
    silence, stopped = values.pop("silence") + since, values.pop("stopped")
    recent = [CollectiveCall(**{**one, "at": now - one["at"]}) for one in values.pop("recent")]
    wait = values.pop("waits_in")
    waits_in = None if wait is None else CollectiveCall(**{**wait, "at": now - wait["at"]})
    return Far(Beat(**values, recent=recent, waits_in=waits_in), silence, stopped)
