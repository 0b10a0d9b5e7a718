"""Ask rank 0 for the time.

A round trip that took r ns gives the difference of two clocks to within r / 2; the shortest of several round trips is
the most exact (Cristian, 1989). The clocks' offsets are computed later, where the logs are read.

Clients are served one after the other, so strangers cannot use up all open files.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from meshwise.workers.ports import listening

ROUND = b"?"
REPLY = struct.Struct("<q")
TIMEOUT = 2.0  # seconds: a longer round trip tells too little about the difference of the clocks
WAIT = 0.5  # seconds for the next request of a client, while others wait
Sample = tuple[int, int, int]


class ClockServer:
    """A server that tells other processes the time on the clock of this process. It listens at `host` and `port`. Each
    request is one byte."""

    def __init__(self, host: str, clock: Callable[[], int]) -> None:
        self._clock, self._over = clock, False
        self._server = listening(host)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, name="meshwise-clock", daemon=True).start()

    def close(self) -> None:
        """Accept no more requests."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _run(self) -> None:
        with self._server:
            while not self._over:
                try:
                    self._answer(self._server.accept()[0])
                except OSError:  # a client has gone, or too many files are open
                    time.sleep(0.01)

    def _answer(self, client: socket.socket) -> None:
        with client:
            client.settimeout(WAIT)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while client.recv(1) == ROUND:
                client.sendall(REPLY.pack(self._clock()))


class ClockProbe:
    """A client that asks a `ClockServer` for the time. If the server is gone, `sample` raises no error, but returns
    fewer samples."""

    def __init__(self, address: tuple[str, int], clock: Callable[[], int]) -> None:
        self._address, self._clock = address, clock

    def sample(self, rounds: int) -> list[Sample]:
        """Measure `rounds` round trips. Return three times in ns for each: when the request was sent, the server's
        clock, and when the reply was received."""
        samples: list[Sample] = []
        with contextlib.suppress(OSError, struct.error), socket.create_connection(self._address, TIMEOUT) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                sent = self._clock()
                line.sendall(ROUND)
                reply = line.recv(REPLY.size, socket.MSG_WAITALL)
                samples.append((sent, REPLY.unpack(reply)[0], self._clock()))
        return samples
