"""The side channel: JSON lines between every worker and the launcher that started it.

It carries what must be known when collectives cannot carry it: done, failed, progress, halt. A channel that closes is
itself a message: to the launcher that a worker is gone, to a worker that its launcher is gone, so that nobody is left
over.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
ADDRESS, TOKEN = "MESHWISE_CHANNEL", "MESHWISE_TOKEN"


class WorkerChannel:
    """A worker's end. `send` may be called from any thread; incoming messages go to the functions in `listeners`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.listeners: dict[str, Callable[[Message], None]] = {}
        threading.Thread(target=self._listen, name="meshwise-channel", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, **facts}, default=str).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def _listen(self) -> None:
        # A launcher that was killed may leave a reset connection or half a line instead of an end.
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                listener = self.listeners.get(message["kind"])
                if listener is not None:
                    listener(message)
        end_own_process_group()


def end_own_process_group() -> None:
    """The launcher is gone: end this worker and every process that it started (loader workers), at once."""
    if os.getpgid(0) == os.getpid():  # a worker leads its own group; never reach beyond it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def connect(environment: Mapping[str, str], rank: int) -> WorkerChannel | None:
    """The worker's end of the channel that the environment names, or None when meshwise did not start this process."""
    address = environment.get(ADDRESS)
    if address is None:
        return None
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    channel = WorkerChannel(connection)
    channel.send("hello", rank=rank, pid=os.getpid(), token=environment.get(TOKEN, ""))
    return channel


MOST_HELLO = 64 << 10
"""Bytes that are read of a connection that has not shown the token."""
HELLO_TIMEOUT = 30.0  # seconds for it to show the token


class LauncherChannel:
    """The launcher's end: one listening socket, one thread a worker, every message put to `deliver(rank, message)`.

    A connection that closes is delivered as the message `{"kind": "closed"}`.
    """

    def __init__(self, token: str, deliver: Callable[[int, Message], None]) -> None:
        self._token = token
        self._deliver = deliver
        self._connections: dict[int, socket.socket] = {}
        self._server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, name=f"meshwise-accept {self.address}", daemon=True).start()

    def send(self, rank: int, kind: str, **facts: Any) -> None:
        connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # the worker is gone: its closed connection is already the message
                connection.sendall(json.dumps({"kind": kind, **facts}).encode() + b"\n")

    def close(self) -> None:
        for connection in (self._server, *self._connections.values()):
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread that waits on it
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name=f"meshwise-serve {self.address}", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        try:
            connection.settimeout(HELLO_TIMEOUT)
            with connection, connection.makefile("rb") as lines:
                hello = json.loads(lines.readline(MOST_HELLO) or b"{}")
                token = hello.get("token") if isinstance(hello, dict) else None
                if not isinstance(token, str) or not secrets.compare_digest(token, self._token):
                    return  # somebody else's connection
                connection.settimeout(None)
                rank = int(hello["rank"])
                self._connections[rank] = connection
                self._deliver(rank, hello)
                for line in lines:
                    self._deliver(rank, json.loads(line))
        except (OSError, ValueError):
            pass
        if rank is not None:
            self._deliver(rank, {"kind": "closed"})


LISTENING_PORTS = range(20_000, 32_768)
"""Linux connects from 32768 to 60999 (ip_local_port_range)."""


def listening(host: str = "", port: int = 0) -> socket.socket:
    """A socket that listens at a TCP port of this machine, by default a free one below those that outgoing connections
    take. Without a host it listens for all of them. Raises OSError where the port is taken."""
    every = {"family": socket.AF_INET6, "dualstack_ipv6": True} if not host and socket.has_dualstack_ipv6() else {}
    if port:
        return socket.create_server((host, port), backlog=512, **every)  # type: ignore[arg-type]
    for free in (*random.SystemRandom().sample(LISTENING_PORTS, 100), 0):
        with contextlib.suppress(OSError):
            return socket.create_server((host, free), backlog=512, **every)  # type: ignore[arg-type]
    raise OSError("this machine has no free TCP port")


def free_port(host: str = "") -> int:
    """A TCP port of this machine that nobody listens on now."""
    with listening(host) as server:
        return int(server.getsockname()[1])
