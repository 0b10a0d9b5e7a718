"""Name a rank that falls silent, by counters in torch's store.

For ranks that no launcher of ours watches. In a thread, each rank writes a counter to the store twice a second. Rank 0,
which serves the store, reads all counters. If one stands still for some seconds, rank 0 writes which rank that is, for
the others to read. If the store itself stands still, the others blame rank 0. The steps of the training call nothing.

On a cut link, a call of the store hangs beyond its timeout. So a second thread watches the one that calls it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from meshwise.spec.durations import seconds_of
from meshwise.spec.units import seconds_text
from meshwise.spec.words import ranks_text
from meshwise.spec.world import World

SILENCE = "MESHWISE_SILENCE"
"""Environment variable: seconds after which a silent rank is given up. 0 turns the counters off."""
LIMIT, ROUND = 8.0, 0.5
FIRST = 60.0  # least limit before the first steps: what imports and compiles can hold Python for seconds
MOST = 1.0  # most seconds of silence to count between two looks: this process may have stood still itself
BEATS, LOST, DONE = "meshwise/beats", "meshwise/beats/lost", b"done"


def limit() -> float:
    """Return the seconds of silence after which a rank is given up, or 0 for never. Raises UsageError."""
    told = os.environ.get(SILENCE, f"{LIMIT}")
    return 0.0 if told == "0" else seconds_of(told, SILENCE)


class Silence:
    """Adds up for how long a value has not changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked = clock, clock()
        self._value: object = None
        self.seconds = 0.0

    def look(self, value: object) -> float:
        """Note the value. Return the seconds since its last change."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, MOST), now
        changed, self._value = value != self._value, value
        self.seconds = 0.0 if changed else self.seconds + passed
        return self.seconds


class StoreBeats:
    """Counts in the store that this rank lives, and notices another rank that does not."""

    def __init__(
        self,
        world: World,
        store: Any,
        place: str,
        lost: Callable[[str, list[int]], object],
        limit: Callable[[], float],
    ) -> None:
        """store: a connection of its own. place: where this rank is, such as its host. lost: called in a thread, once,
        with a sentence that names silent ranks, and with these ranks if this rank has found them itself. limit: returns
        how many seconds of silence are too many."""
        self._world, self._store, self._place = world, store, place
        self._lost, self._limit = lost, limit
        self._count, self._over = 0, threading.Event()
        self._silences = defaultdict[int, Silence](Silence)
        self._beats = dict[int, bytes]()  # what this rank has read of each rank

    def begin(self) -> None:
        """Start the threads."""
        first = self._world.rank == 0  # its own store cannot be cut off
        for work in (self._beat,) if first else (self._beat, self._watch):
            threading.Thread(target=work, name="meshwise-beats", daemon=True).start()

    def end(self) -> None:
        """Stop: this rank's program is over, and its silence is no fault."""
        self._over.set()

    def _beat(self) -> None:
        key = f"{BEATS}/{self._world.rank}"
        with contextlib.suppress(RuntimeError):  # the process that served the store has ended: everybody sees that
            while not self._over.wait(ROUND):
                self._store.set(key, f"{self._count} {self._place}")
                ranks = range(1, self._world.size) if self._world.rank == 0 else [0]
                lost = [rank for rank in ranks if self._read(rank) and rank != 0]
                if lost:
                    self._store.set(LOST, self._says(lost))
                self._count += 1
                if self._store.check([LOST]):
                    self._give_up(self._store.get(LOST).decode(), lost)
            self._store.set(key, DONE)

    def _read(self, rank: int) -> bool:
        """Read a rank's counter. Return whether it has stood still for too long."""
        if not self._store.check([f"{BEATS}/{rank}"]):
            return False
        beat = self._beats[rank] = self._store.get(f"{BEATS}/{rank}")
        return self._silences[rank].look(beat) > self._limit() and beat != DONE

    def _watch(self) -> None:
        silence = Silence()
        while not self._over.wait(ROUND):
            if silence.look(self._count) > self._limit():
                self._give_up(self._says([0]), [0])

    def _says(self, lost: list[int]) -> str:
        hosts = dict.fromkeys(self._beats.get(rank, b"").decode().partition(" ")[2] for rank in lost)
        who, where = ranks_text(lost), "; ".join(filter(None, hosts))
        silent = f"silent for {seconds_text(self._limit())}"
        return f"{who} ({where or 'host unknown'}): {silent}, frozen or cut off. This attempt ends."

    def _give_up(self, found: str, lost: list[int]) -> None:
        if not self._over.is_set():
            self._over.set()
            self._lost(found, lost)
