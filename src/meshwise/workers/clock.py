"""Ask rank 0 for the time.

A round trip that took r ns gives the difference of two clocks to within r / 2; the shortest of several round trips is
the most exact (Cristian, 1989). The clocks' offsets are computed later, where the logs are read.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

ROUND = b"?"
REPLY = struct.Struct("<q")
TIMEOUT = 2.0  # seconds: a longer round trip tells too little about the difference of the clocks
MOST = 4096  # connections; the oldest is closed for a new one, so that strangers cannot use up all open files
Sample = tuple[int, int, int]


class ClockServer:
    """A server that tells other processes the time on the clock of this process. It listens at `host` and `port`. Each
    request is one byte."""

    def __init__(self, host: str, clock: Callable[[], int]) -> None:
        self._clock, self._over = clock, False
        self._server = socket.create_server((host, 0), backlog=512)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, name="meshwise-clock", daemon=True).start()

    def close(self) -> None:
        """Accept no more requests."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _run(self) -> None:
        clients: dict[socket.socket, None] = {}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = min(MOST, files // 4) if files > 0 else MOST
        with self._server, selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)

            def forget(client: socket.socket) -> None:
                del clients[client]
                ready.unregister(client)
                client.close()

            while not self._over:
                for key, _ in ready.select():
                    try:
                        if key.fileobj is self._server:
                            client, _ = self._server.accept()
                            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                            client.settimeout(0)
                            clients[client] = None
                            ready.register(client, selectors.EVENT_READ)
                            if len(clients) > most:
                                forget(next(iter(clients)))
                        elif key.fileobj in clients and not self._answered(client := key.fileobj):
                            forget(client)
                    except OSError:  # a client has gone, or too many files are open
                        time.sleep(0.01)
            for client in clients:
                client.close()

    def _answered(self, client: socket.socket) -> bool:
        try:
            if client.recv(1) == ROUND:
                return client.send(REPLY.pack(self._clock())) == REPLY.size
        except OSError:
            pass
        return False


class ClockProbe:
    """A client that asks a `ClockServer` for the time. If the server is gone, `sample` raises no error, but returns
    fewer samples."""

    def __init__(self, address: tuple[str, int], clock: Callable[[], int]) -> None:
        self._address, self._clock = address, clock
        self._connection: socket.socket | None = None

    def sample(self, rounds: int) -> list[Sample]:
        """Measure `rounds` round trips. Return three times in ns for each: when the request was sent, the server's
        clock, and when the reply was received."""
        samples: list[Sample] = []
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=TIMEOUT)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                sent = self._clock()
                self._connection.sendall(ROUND)
                reply = self._connection.recv(REPLY.size, socket.MSG_WAITALL)
                received = self._clock()
                if len(reply) < REPLY.size:
                    raise ConnectionResetError
                samples.append((sent, REPLY.unpack(reply)[0], received))
        except OSError:
            self.close()
        return samples

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
