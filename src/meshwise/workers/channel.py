"""Exchange JSON messages between each worker and its launcher.

Their connection, the side channel, works even when collectives do not. It carries messages such as done, failed,
progress and halt. A closed channel is a message too: it tells the launcher that a worker is gone, or a worker that its
launcher is gone, so that no process is left behind. Both ends prove that they know the token in a worker's
environment, without sending it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from meshwise.workers.handshake import Doorkeeper, Line, enter

Message = dict[str, Any]
ADDRESS, TOKEN = "MESHWISE_CHANNEL", "MESHWISE_TOKEN"
PURPOSE = "channel"
CONNECT_TIMEOUT = 30.0  # seconds for a worker to reach its launcher


class WorkerChannel:
    """A worker's end of the side channel to its launcher. Any thread may call `send`.

    `listeners` maps the kind of a message to the function that is called with the message.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self.listeners: dict[str, Callable[[Message], None]] = {}
        threading.Thread(target=self._listen, name="meshwise-channel", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        self._line.send(json.dumps({"kind": kind, **facts}, default=str).encode())

    def _listen(self) -> None:
        # If the launcher was killed, the connection may be reset or end within a message.
        with contextlib.suppress(OSError, ValueError):
            while received := self._line.receive():
                message = json.loads(received)
                listener = self.listeners.get(message["kind"])
                if listener is not None:
                    listener(message)
        end_own_process_group()


def end_own_process_group() -> None:
    """Kill this worker and every process that it started, such as loader workers."""
    if os.getpgid(0) == os.getpid():  # true for a worker, which leads its group; never kill another group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def connect(environment: Mapping[str, str], rank: int) -> WorkerChannel | None:
    """Connect to the side channel that the environment names. Return None if meshwise did not start this process."""
    address = environment.get(ADDRESS)
    if address is None:
        return None
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT)
    channel = WorkerChannel(enter(connection, environment[TOKEN].encode(), PURPOSE, CONNECT_TIMEOUT))
    channel.send("hello", rank=rank)
    return channel


class LauncherChannel:
    """The launcher's end of the side channel to its workers: one listening socket, and one thread per worker."""

    def __init__(self, token: str, deliver: Callable[[int, Message], None]) -> None:
        self._deliver = deliver
        self._lines: dict[int, Line] = {}
        server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._door = Doorkeeper(server, token.encode(), PURPOSE, self._serve)
        self.address = f"127.0.0.1:{self._door.port}"

    def send(self, rank: int, kind: str, **facts: Any) -> None:
        line = self._lines.get(rank)
        if line is not None:
            with contextlib.suppress(OSError):  # if the worker is gone, its closed connection reports this
                line.send(json.dumps({"kind": kind, **facts}).encode())

    def close(self) -> None:
        self._door.close()

    def _serve(self, line: Line) -> None:
        rank: int | None = None
        with contextlib.suppress(OSError, ValueError):
            while received := line.receive():
                message = json.loads(received)
                if rank is None:
                    rank = int(message["rank"])
                    self._lines[rank] = line
                self._deliver(rank, message)
        if rank is not None:
            self._deliver(rank, {"kind": "closed"})


LISTENING_PORTS = range(20_000, 32_768)
"""Ports to listen at. Ports of outgoing connections are higher on Linux: 32768 to 60999 (ip_local_port_range)."""


def listening(host: str = "", port: int = 0) -> socket.socket:
    """Return a socket that listens at a TCP port. host: "" for all addresses. port: 0 for any free port."""
    every = {"family": socket.AF_INET6, "dualstack_ipv6": True} if not host and socket.has_dualstack_ipv6() else {}
    if port:
        return socket.create_server((host, port), backlog=512, **every)  # type: ignore[arg-type]
    for free in (*random.SystemRandom().sample(LISTENING_PORTS, 100), 0):
        with contextlib.suppress(OSError):
            return socket.create_server((host, free), backlog=512, **every)  # type: ignore[arg-type]
    raise OSError("no TCP port is free on this machine")


def free_port(host: str = "") -> int:
    """Return a TCP port of this machine on which no process listens now."""
    with listening(host) as server:
        return int(server.getsockname()[1])
