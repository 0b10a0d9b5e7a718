"""The key-value store in which launchers meet. Each keeps one: where the one in use is lost, the next takes over.

One exchange is a line each way: what a machine tells goes, and what has changed since its last one comes, with the
seconds for which each of the others was silent. No torch: it starts at once, and a dead link holds no more than a
thread of Python's own.
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

MOST_LINE = 16 << 20
"""Bytes of one line; whoever sends more is no launcher."""


@dataclass(frozen=True)
class Answer:
    """Of an exchange. version: where the next one goes on. new: what has changed. silent: seconds, by machine;
    infinity of one whose process is gone."""

    version: int
    new: Mapping[str, str]
    silent: Mapping[str, float]


class Exchanges(Protocol):
    """The store of this process, or a link to another's."""

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        """Tell, as the machine of this name, and get what is new. Raises OSError or ValueError where it is gone."""


class Store:
    """A store in this process's memory, which others reach at a port."""

    def __init__(self, port: int = 0, listens: int | None = None) -> None:
        """port: 0 takes a free one. listens: the descriptor of a socket that listens there already. Raises OSError
        where the port is taken."""
        self._kept: dict[str, tuple[int, str]] = {}
        self._heard: dict[str, float] = {}
        self._version, self._lock = 0, threading.Lock()
        self._server = listening(port=port) if listens is None else socket.socket(fileno=listens)
        self._connections: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, name="meshwise-store", daemon=True).start()

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        with self._lock:
            now = self._heard[name] = time.monotonic()
            for key, value in told.items():
                self._version += 1
                self._kept[key] = self._version, value
            new = {key: value for key, (version, value) in self._kept.items() if version > since}
            return Answer(self._version, new, {other: now - at for other, at in self._heard.items()})

    def close(self) -> None:
        """Serve no more."""
        for each in (self._server, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread that waits on it
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="meshwise-store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        name = ""
        wrong = (OSError, ValueError, TypeError, KeyError, AttributeError)  # it is gone, or is no launcher
        with contextlib.suppress(*wrong), connection, connection.makefile("rb") as lines:
            while line := lines.readline(MOST_LINE):
                asked = json.loads(line)
                told = {str(key): str(value) for key, value in asked["told"].items()}
                name = str(asked["name"])
                answer = self.exchange(name, told, int(asked["since"]))
                connection.sendall(json.dumps(vars(answer)).encode() + b"\n")
        with self._lock:
            if name in self._heard:  # its process is gone, or has hung up: nobody waits for it
                self._heard[name] = -math.inf


class Link:
    """The store of another machine. Raises OSError where it is not to be reached."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._connection = socket.create_connection(address, timeout=timeout)
        self._connection.settimeout(None)
        self._lines = self._connection.makefile("rb")
        self.host = str(self._connection.getsockname()[0])
        """Where this machine is reached by that one."""

    def exchange(self, name: str, told: Mapping[str, str], since: int) -> Answer:
        asked: dict[str, Any] = {"name": name, "told": dict(told), "since": since}
        self._connection.sendall(json.dumps(asked).encode() + b"\n")
        line = self._lines.readline(MOST_LINE)
        if not line:
            raise ConnectionResetError("the store is closed")
        return Answer(**json.loads(line))

    def interrupt(self) -> None:
        """End the exchange that waits for an answer, and all later ones."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it. Called by the thread that exchanges."""
        self._lines.close()
        self._connection.close()
