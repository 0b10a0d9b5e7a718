"""Serve the key-value store in which launchers meet and exchange values.

Each launcher keeps a store: if the store in use is lost, another store takes over.

An exchange is one message each way: a machine sends its values, and receives what has changed since its last exchange,
with the seconds for which each machine has been silent. A thread of each launcher makes one exchange after another, and
so shows that its machine is alive. Callers read what has come and never wait for the network, so that Ctrl-C takes
effect at once. Both ends prove the secret of the run (handshake.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.workers.channel import listening
from meshwise.workers.handshake import Doorkeeper, Line, enter

PURPOSE = "machines"
ROUND = 0.25  # seconds between exchanges
SILENCE = 5.0  # seconds of silence after which a machine counts as lost
PROOF_TIMEOUT = 5.0  # seconds for a launcher, which may be busy, to prove that it knows the secret


@dataclass(frozen=True)
class Answer:
    """The answer of a store to one exchange."""

    version: int
    new: Mapping[str, Any]
    silent: Mapping[str, float]


class Store:
    """A key-value store in the memory of this process. Other machines reach it at a port. Values are JSON values."""

    def __init__(self, secret: bytes, port: int = 0, listens: int | None = None, host: str = "") -> None:
        """Serve the store at a port, or on the listening socket with the descriptor `listens`."""
        self._kept: dict[str, tuple[int, Any]] = {}
        self._heard: dict[str, float] = {}
        self._version, self._lock = 0, threading.Lock()
        server = listening(host, port) if listens is None else socket.socket(fileno=listens)
        self.door = Doorkeeper(server, secret, PURPOSE, self._serve)
        self.port = self.door.port

    def exchange(self, name: str, told: Mapping[str, Any], since: int) -> Answer:
        """Set values in the store, and return the values that have changed since an earlier exchange."""
        with self._lock:
            now = self._heard[name] = time.monotonic()
            for key, value in told.items():
                self._version += 1
                self._kept[key] = self._version, value
            new = {key: value for key, (version, value) in self._kept.items() if version > since}
            return Answer(self._version, new, {other: now - at for other, at in self._heard.items()})

    def forget_gone(self) -> None:
        """Forget the machines that have closed their connection to this store, so that they do not count as lost."""
        with self._lock:
            self._heard = {name: at for name, at in self._heard.items() if at > -math.inf}

    def close(self) -> None:
        """Stop serving the store to other machines."""
        self.door.close()

    def _serve(self, line: Line) -> None:
        name = ""
        wrong = (OSError, ValueError, TypeError, KeyError, AttributeError)  # the peer is gone or is not a launcher
        with contextlib.suppress(*wrong):
            while message := line.receive():
                asked = json.loads(message)
                name = str(asked["name"])
                answer = self.exchange(name, asked["told"], int(asked["since"]))
                line.send(json.dumps(vars(answer)).encode())
        with self._lock:
            if name in self._heard:  # the machine has left, so it does not count as lost
                self._heard[name] = -math.inf


class Link:
    """A connection to the store of another machine. Raises OSError if the store cannot be reached in time, or if the
    process there does not know the secret of this run."""

    def __init__(self, address: tuple[str, int], secret: bytes, timeout: float) -> None:
        connection = socket.create_connection(address, timeout=timeout)
        self._line = enter(connection, secret, PURPOSE, PROOF_TIMEOUT)
        self.host = str(connection.getsockname()[0])
        """The address at which the machine that keeps the store can reach this machine."""

    def exchange(self, name: str, told: Mapping[str, Any], since: int) -> Answer:
        """Do the same as `Store.exchange`. Raises OSError or ValueError if the store is lost."""
        asked: dict[str, Any] = {"name": name, "told": dict(told), "since": since}
        self._line.send(json.dumps(asked).encode())
        message = self._line.receive()
        if not message:
            raise ConnectionResetError("the store is closed")
        return Answer(**json.loads(message))

    def close(self) -> None:
        """Close the connection, even during an exchange that waits for an answer. Later exchanges fail."""
        self._line.close()


class Meeting:
    """The connection of one machine, which is identified by its name, to the store in which the launchers meet."""

    def __init__(self, connect: Callable[[], Store | Link], name: str) -> None:
        """connect: a function that returns the store by which the machines of a run exchange values, or raises
        OSError."""
        self._connect, self._name = connect, name
        self._lock, self._is_behind = threading.Lock(), False
        self._pending: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._silent: dict[str, float] = {}
        self._wake, self._over = threading.Event(), threading.Event()
        self.store: Store | Link | None = None
        """The store. None until it is reached."""
        self.error: Exception | None = None
        """What went wrong when the store could not be reached, or was lost. None as long as nothing went wrong."""
        self.heard = 0.0
        """When the store last answered (monotonic). 0 before the first answer."""
        threading.Thread(target=self._run, name="meshwise-meeting", daemon=True).start()

    def set(self, key: str, value: object) -> None:
        """Send a value to the other machines, within ROUND seconds. A value that has not changed is not sent again."""
        value = json.loads(json.dumps(value))  # convert it to the value that the other machines get
        with self._lock:
            if self._told.get(key) != value:
                self._told[key] = self._pending[key] = value
                self._is_behind = True
                self._wake.set()

    def try_get(self, key: str) -> Any:
        """Return the value of a key that any machine has set, or None if there is no value."""
        return self._known.get(key)

    def flush(self, seconds: float) -> None:
        """Wait until everything that was set has reached the store, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self._is_behind and self.error is None and time.monotonic() < until:
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
        """How many seconds ago the store last answered, if this is too long ago.
        Otherwise None."""
        now = time.monotonic()
        if not self.heard or self._over.is_set():
            return None
        return now - self.heard if self.error is not None or now - self.heard > SILENCE else None

    def silence_of(self, name: str) -> float | None:
        """Return how many seconds ago the store last heard from a machine, if this is too long ago.
        Otherwise None."""
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
                with self._lock:
                    told, self._pending = self._pending, {}
                answer = self.store.exchange(self._name, told, since)
                since = answer.version
                self._known.update(answer.new)
                self._silent = dict(answer.silent)
                with self._lock:
                    self._is_behind = bool(self._pending)
                self.heard = time.monotonic()
                self._wake.wait(ROUND)
        except (OSError, ValueError, TypeError) as error:  # the connection is closed, or the peer is no meshwise store
            self.error = error
        if isinstance(self.store, Link):
            self.store.close()
