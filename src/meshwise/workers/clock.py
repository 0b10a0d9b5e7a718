"""Ask rank 0 for the time, over an authenticated connection.

On this connection, a rank first proves that it knows the secret.

A round trip that took r ns gives the difference of two clocks to within r / 2; the shortest of several round trips is
the most exact (Cristian, 1989). The clocks' offsets are computed later, where the logs are read.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Callable

from meshwise.workers.handshake import Doorkeeper, Line, enter

ROUND = b"?"
REPLY = struct.Struct("<q")
PURPOSE = "clock"
TIMEOUT = 2.0  # seconds: a round trip that takes longer is useless
Sample = tuple[int, int, int]


class ClockServer:
    """A server that tells other processes the time on the clock of this process. It listens at `host` and `port`. A
    client must first prove that it knows `secret`. Each request is one byte."""

    def __init__(self, host: str, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.secret = secrets.token_bytes(32)
        server = socket.create_server((host, 0), backlog=512)
        self._door = Doorkeeper(server, self.secret, PURPOSE, self._serve)
        self.port = self._door.port

    def close(self) -> None:
        self._door.close()

    def _serve(self, line: Line) -> None:
        with contextlib.suppress(OSError):
            connection = _quick(line)
            while connection.recv(1) == ROUND:
                connection.sendall(REPLY.pack(self._clock()))


class ClockProbe:
    """A client that asks a `ClockServer` for the time. If the server is gone, `sample` raises no error, but returns
    fewer samples."""

    def __init__(self, address: tuple[str, int], secret: bytes, clock: Callable[[], int]) -> None:
        self._address, self._secret, self._clock = address, secret, clock
        self._line: Line | None = None

    def sample(self, rounds: int) -> list[Sample]:
        """Measure `rounds` round trips. Return three times in ns for each: when the request was sent, the server's
        clock, and when the reply was received."""
        samples: list[Sample] = []
        try:
            if self._line is None:
                found = socket.create_connection(self._address, timeout=TIMEOUT)
                self._line = enter(found, self._secret, PURPOSE, TIMEOUT)
                _quick(self._line).settimeout(TIMEOUT)
            connection = self._line.connection
            for _ in range(rounds):
                sent = self._clock()
                connection.sendall(ROUND)
                reply = connection.recv(REPLY.size, socket.MSG_WAITALL)
                received = self._clock()
                if len(reply) < REPLY.size:
                    break
                samples.append((sent, REPLY.unpack(reply)[0], received))
        except OSError:
            self.close()
        return samples

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def _quick(line: Line) -> socket.socket:
    """Return the socket of `line`, set to send bytes at once. They get no authentication codes."""
    line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line.connection
