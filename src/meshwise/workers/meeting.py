"""Exchange messages between launchers in a thread.

So a dead link blocks nothing else.

The thread makes one exchange with the store after another; these are also this machine's heartbeat. Callers read what
has come and never wait for the network, so that Ctrl-C takes effect at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from meshwise.workers.store import Exchanges, Link

ROUND = 0.25  # seconds between two exchanges
SILENCE = 5.0  # seconds after which a machine that is not heard of is lost


class Meeting:
    """The connection of one machine, which is identified by its name, to the store in which the launchers meet."""

    def __init__(self, connect: Callable[[], Exchanges], name: str) -> None:
        """connect: a function that returns the store by which the machines of a run exchange values, or raises
        OSError."""
        self._connect, self._name = connect, name
        self._out: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._written = self._asked = 0
        self._told: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._silent: dict[str, float] = {}
        self._wake, self._over = threading.Event(), threading.Event()
        self.store: Exchanges | None = None
        """The store. None until it is reached."""
        self.error: Exception | None = None
        """What went wrong when the store could not be reached, or was lost. None as long as nothing went wrong."""
        self.heard = 0.0
        """When the store last answered (monotonic). 0 before the first answer."""
        threading.Thread(target=self._run, name="meshwise-meeting", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Send a value to the other machines, within ROUND seconds. A value that has not changed is not sent again."""
        if self._told.get(key) == value:
            return
        self._told[key] = value
        self._asked += 1
        self._out.put((key, value))
        self._wake.set()

    def try_get(self, key: str) -> str | None:
        """Return the value of a key that any machine has set, or None if there is no value."""
        return self._known.get(key)

    def flush(self, seconds: float) -> None:
        """Wait until everything that was set has reached the store, for at most `seconds`."""
        until, asked = time.monotonic() + seconds, self._asked
        while self._written < asked and self.error is None and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the exchanges with the store, and close the connection."""
        self._over.set()
        self._wake.set()
        if isinstance(self.store, Link):
            self.store.close()

    @property
    def is_over(self) -> bool:
        """Whether the connection was closed, or its store is gone."""
        return self._over.is_set() or self.error is not None

    @property
    def silence(self) -> float | None:
        """How many seconds ago the store last answered, if this is too long. None if it has answered within the last
        SILENCE seconds.

        If the connection is lost, the seconds are returned at once, even if they are fewer than SILENCE. None is
        returned before the first answer, and after `close`.
        """
        now = time.monotonic()
        if not self.heard or self._over.is_set():
            return None
        return now - self.heard if self.error is not None or now - self.heard > SILENCE else None

    def silence_of(self, name: str) -> float | None:
        """Return the seconds since the store last received something from a machine."""
        seconds = self._silent.get(name, 0.0)
        return seconds if seconds > SILENCE else None

    def has_seen(self, name: str) -> bool:
        """Check whether the machine `name` has ever sent something to the store."""
        return name in self._silent

    def _run(self) -> None:
        try:
            self.store, since = self._connect(), 0
            while not self._over.is_set():
                self._wake.clear()
                told, count = {}, 0
                with contextlib.suppress(queue.Empty):
                    while True:
                        key, value = self._out.get_nowait()
                        told[key], count = value, count + 1
                answer = self.store.exchange(self._name, told, since)
                since = answer.version
                self._known.update(answer.new)
                self._silent = dict(answer.silent)
                self._written += count
                self.heard = time.monotonic()
                self._wake.wait(ROUND)
        except (OSError, ValueError, TypeError) as error:  # it closed, or is no store of ours
            self.error = error
        if isinstance(self.store, Link):
            self.store.close()
