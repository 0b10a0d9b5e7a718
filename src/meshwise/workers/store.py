"""Serve the key-value store in which launchers meet.

Each launcher keeps a store: if the one in use is lost, the next takes over.

An exchange is one message each way: a machine sends its values, and receives what has changed since its last exchange,
with the seconds for which each machine has been silent. Both ends prove the secret of the run (handshake.py). It does
without torch, so it starts at once, and a dead link blocks no more than one Python thread.
Tested in tests/workers/test_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwise.workers.channel import listening
from meshwise.workers.handshake import Doorkeeper, Line, enter

PURPOSE = "machines"
PROOF_TIMEOUT = 5.0  # seconds for a launcher that is reached to prove the secret: it may be busy


@dataclass(frozen=True)
class Answer:
    """The answer of a store to one exchange.

    version: the number to pass as `since` in the next exchange.
    new: the values that have changed.
    silent: for each machine, the seconds since it last sent something. Infinity if its process is gone.
    """

    version: int
    new: Mapping[str, str]
    silent: Mapping[str, float]


class Exchanges(Protocol):
    """A key-value store in which launchers meet: the store of this process, or a connection to the store of another
    machine."""

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        """Set values in the store, and return the values that have changed since an earlier exchange.

        name: the name of the machine that calls.
        told: the values to set, by key.
        since: the `version` in the answer to the earlier exchange, or 0 to get all values.

        Raises OSError or ValueError if the store is lost.
        """


class Store:
    """A key-value store in the memory of this process. Other machines reach it at a port."""

    def __init__(self, secret: bytes, port: int = 0, listens: int | None = None, host: str = "") -> None:
        """Begin to serve the store."""
        self._kept: dict[str, tuple[int, str]] = {}
        self._heard: dict[str, float] = {}
        self._version, self._lock = 0, threading.Lock()
        server = listening(host, port) if listens is None else socket.socket(fileno=listens)
        self.door = Doorkeeper(server, secret, PURPOSE, self._serve)
        self.port = self.door.port

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
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
        wrong = (OSError, ValueError, TypeError, KeyError, AttributeError)  # it is gone, or is no launcher
        with contextlib.suppress(*wrong):
            while message := line.receive():
                asked = json.loads(message)
                told = {str(key): str(value) for key, value in asked["told"].items()}
                name = str(asked["name"])
                answer = self.exchange(name, told, int(asked["since"]))
                line.send(json.dumps(vars(answer)).encode())
        with self._lock:
            if name in self._heard:  # its process is gone, or has hung up: nobody waits for it
                self._heard[name] = -math.inf


class Link:
    """A connection to the store of another machine. Raises OSError if the store cannot be reached in time, or if the
    process there does not know the secret of this run."""

    def __init__(self, address: tuple[str, int], secret: bytes, timeout: float) -> None:
        connection = socket.create_connection(address, timeout=timeout)
        self._line = enter(connection, secret, PURPOSE, PROOF_TIMEOUT)
        self.host = str(connection.getsockname()[0])
        """The address at which the machine that keeps the store can reach this machine."""

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        asked: dict[str, Any] = {"name": name, "told": dict(told), "since": since}
        self._line.send(json.dumps(asked).encode())
        message = self._line.receive()
        if not message:
            raise ConnectionResetError("the store is closed")
        return Answer(**json.loads(message))

    def close(self) -> None:
        """Close the connection, even during an exchange that waits for an answer. Later exchanges fail."""
        self._line.close()
