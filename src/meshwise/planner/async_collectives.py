"""Track the asynchronous collectives of a rehearsed step.

A collective overlaps with the stream that launched it until the program waits for it or uses its tensors.

On a GPU, collectives run on a stream of their process group, on a CPU in threads of gloo. Both run one collective after
the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from meshwise.planner.work import CollectiveOperation


class AsyncCollectives:
    """Keeps track of the asynchronous collectives of a step, to find out which later launches must wait for a
    collective."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        """For each storage that a running collective uses, the index of that collective's launch."""
        self._works: dict[int, tuple[Any, int]] = {}  # by id(work), which stays unique since the tuple keeps `work`
        self._pending: dict[str, set[int]] = defaultdict(set)
        self._groups: dict[tuple[int, ...], int] = {}

    def stream_of(self, what: CollectiveOperation) -> str:
        """Return the name of the stream in which a collective, send or receive runs."""
        if what.kind in ("send", "receive"):
            return f"{what.kind}s"
        return f"collectives {self._groups.setdefault(what.ranks, len(self._groups))}"

    def begin(self, place: int, storages: Iterable[int], work: Any) -> None:
        """Record that an asynchronous collective has started."""
        self.running.update(dict.fromkeys(storages, place))
        if work is not None:
            self._works[id(work)] = work, place

    def wait(self, work: Any, stream: str, storages: Iterable[int]) -> None:
        """Make the next launch on `stream` wait for the collective with the handle `work`, and for each running
        collective that uses one of `storages`."""
        _, place = self._works.pop(id(work), (None, -1))
        self.wait_for(place, stream)
        for storage in storages:
            self.wait_for(self.running.get(storage, -1), stream)

    def wait_for(self, place: int, stream: str) -> None:
        """Make the next launch on `stream` wait until an earlier launch has ended."""
        if place >= 0:
            self._pending[stream].add(place)
            self.running = {storage: other for storage, other in self.running.items() if other != place}

    def after(self, stream: str, storages: Iterable[int]) -> set[int]:
        """Return the indices of the earlier launches that a new launch must wait for."""
        for storage in storages:
            self.wait_for(self.running.get(storage, -1), stream)
        return self._pending.pop(stream, set())
