"""A key-value store between launchers, used from a thread of its own: a link that is dead holds that thread alone.

The thread does one round after the other: it writes what there is to write, this machine's beat among it, and reads
what somebody asked for into memory. Whoever asks never waits for the network, so Ctrl-C is answered at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ROUND = 0.5  # seconds between two rounds
SILENCE = 5.0  # seconds after which a machine that does not beat is lost


class Meeting:
    """The store of machine `node` of `count`, and which of the others beat."""

    def __init__(self, connect: Callable[[], Store], node: int, count: int) -> None:
        """connect: gives the store, or raises RuntimeError; called in the thread."""
        self._connect, self._node, self._count = connect, node, count
        self._out: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._written = self._asked = 0
        self._told: dict[str, str] = {}
        self._wanted: dict[str, bool] = {}  # key -> whether it changes
        self._known: dict[str, str] = {}
        self._beats: dict[int, tuple[str, float]] = {}
        self._wake, self._over = threading.Event(), threading.Event()
        self.error: RuntimeError | None = None
        """Why the store is not to be reached any more, or never was."""
        self.heard = 0.0
        """When the store answered last (monotonic); 0 before the first time."""
        threading.Thread(target=self._run, name="meshwise-meeting", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Tell the others, within a round; what was told already is not told again."""
        if self._told.get(key) == value:
            return
        self._told[key] = value
        self._asked += 1
        self._out.put((key, value))
        self._wake.set()

    def try_get(self, key: str, *, changes: bool = False) -> str | None:
        """What some machine has told, as of the last round; None where nothing is known yet."""
        if key not in self._wanted:
            self._wanted[key] = changes
            self._wake.set()
        return self._known.get(key)

    def flush(self, seconds: float) -> None:
        """Wait until the others can read what was set, at most so long."""
        until, asked = time.monotonic() + seconds, self._asked
        while self._written < asked and self.error is None and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Beat no more."""
        self._over.set()
        self._wake.set()

    def lost(self) -> dict[int, float]:
        """The machines that do not beat any more, and the seconds of their silence. The store is of the first one."""
        now = time.monotonic()
        if self._node and self.heard and (self.error is not None or now - self.heard > SILENCE):
            return {0: now - self.heard}
        silent = {node: now - at for node, (_, at) in list(self._beats.items()) if now - at > SILENCE}
        return {node: seconds for node, seconds in silent.items() if f"left/{node}" not in self._known}

    def _run(self) -> None:
        try:
            store = self._connect()
            beat = 0
            while not self._over.is_set():
                self._wake.clear()
                while not self._out.empty():
                    store.set(*self._out.get())
                    self._written += 1
                beat += 1
                store.set(f"beat/{self._node}", str(beat))
                for node in range(self._count):
                    self._read(store, f"left/{node}")
                    if node != self._node and self._read(store, f"beat/{node}", changes=True):
                        self._heard(node, self._known[f"beat/{node}"])
                for key, changes in list(self._wanted.items()):
                    self._read(store, key, changes=changes)
                self.heard = time.monotonic()
                self._wake.wait(ROUND)
        except RuntimeError as error:
            self.error = error

    def _read(self, store: Store, key: str, *, changes: bool = False) -> bool:
        if key in self._known and not changes:
            return True
        if not store.check([key]):
            return False
        self._known[key] = store.get(key).decode()
        return True

    def _heard(self, node: int, beat: str) -> None:
        if self._beats.get(node, ("", 0.0))[0] != beat:
            self._beats[node] = (beat, time.monotonic())
