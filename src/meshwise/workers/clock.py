"""Ask rank 0 for its clock, over an authenticated connection.

On this connection, a rank first proves that it knows the secret.

A round trip that took r ns gives the difference of two clocks to within r / 2; the shortest of several round trips is
the most exact (Cristian, 1989). The clocks' offsets are computed later, where the logs are read.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from meshwise.workers.doorkeeper import Doorkeeper
from meshwise.workers.handshake import Line, enter

ROUND = b"?"
REPLY = struct.Struct("<q")
PURPOSE = "clock"
TIMEOUT = 2.0  # seconds: a round trip that takes longer says nothing
Sample = tuple[int, int, int]


class ClockServer:
    """A server that tells other processes the time on the clock of this process. It listens at `host` and `port`. A
    client must first prove that it knows `secret`. Each request is one byte."""

    def __init__(self, host: str, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.secret = secrets.token_bytes(32)
        self._selector = selectors.DefaultSelector()
        self._door = Doorkeeper(socket.create_server((host, 0), backlog=512), self.secret, PURPOSE, self._let_in)
        self.port = self._door.port
        self._closed = False
        threading.Thread(target=self._run, name="meshwise-clock", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._door.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=1.0):
                assert isinstance(key.fileobj, socket.socket)
                self._answer(key.fileobj)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _let_in(self, line: Line) -> None:
        with contextlib.suppress(OSError):
            connection = line.plain()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        try:
            if connection.recv(1) == ROUND:
                connection.sendall(REPLY.pack(self._clock()))
                return
        except OSError:
            pass
        self._selector.unregister(connection)
        connection.close()


class ClockProbe:
    """A client that asks a `ClockServer` for the time. If the server is gone, `sample` raises no error, but returns
    fewer samples."""

    def __init__(self, address: tuple[str, int], secret: bytes, clock: Callable[[], int]) -> None:
        self._address, self._secret, self._clock = address, secret, clock
        self._connection: socket.socket | None = None

    def sample(self, rounds: int) -> list[Sample]:
        """Measure `rounds` round trips. Return three times in ns for each: when the request was sent, the server's
        clock, and when the reply was received."""
        samples: list[Sample] = []
        try:
            if self._connection is None:
                found = socket.create_connection(self._address, timeout=TIMEOUT)
                self._connection = enter(found, self._secret, PURPOSE, TIMEOUT).plain()
                self._connection.settimeout(TIMEOUT)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                sent = self._clock()
                self._connection.sendall(ROUND)
                reply = self._connection.recv(REPLY.size, socket.MSG_WAITALL)
                received = self._clock()
                if len(reply) < REPLY.size:
                    break
                samples.append((sent, REPLY.unpack(reply)[0], received))
        except OSError:
            self.close()
        return samples

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
