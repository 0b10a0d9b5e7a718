"""Accept only connections that prove the secret, at little cost.

One thread holds all connections that have not yet proven the secret: at most GUESTS of them, each for at most TIMEOUT
seconds. When there are more, the oldest is closed once it has had GRACE seconds, so a flood of silent connections
delays real ones but cannot keep them out. Only a connection that has proven the secret gets its own thread.
Tested in tests/workers/test_handshake.py.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from meshwise.workers.handshake import Guest, Line

GUESTS = 128  # that have proven nothing yet
TIMEOUT = 30.0  # seconds for each of them
TICK = 1.0  # seconds between two looks at those that are silent
GRACE = 0.5  # seconds in which it is not sent away for another one
PAUSE = 0.01  # seconds to the next look, where no more can be let in now


class Doorkeeper:
    """A listening socket that accepts only clients which know the secret.

    server: the socket, which listens already.
    serve: called with each authenticated connection, in a thread of its own. The connection is closed when `serve`
        returns. Once `serve` returns True, no further connection is accepted.
    """

    def __init__(self, server: socket.socket, secret: bytes, purpose: str, serve: Callable[[Line], object]) -> None:
        self._server, self._secret, self._purpose, self._serve = server, secret, purpose, serve
        self._guests: dict[socket.socket, Guest] = {}
        self._lines: set[Line] = set()
        self._over = False
        self.stranger: str | None = None
        """The address of the last client that used our protocol but did not know the secret. None if there was none."""
        self.port = int(server.getsockname()[1])
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._thread(self._run)

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        for line in tuple(self._lines):
            line.close()

    def _thread(self, target: Callable[..., None], *arguments: Line) -> None:
        name = f"meshwise-{self._purpose} {self.port}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(TICK):
                if key.data is None:
                    self._accept()
                elif key.fileobj in self._guests:
                    self._hear(key.data)
            while (oldest := self._oldest()) and time.monotonic() - oldest.since > TIMEOUT:
                self._part(oldest)
        for each in (self._server, *self._guests):
            each.close()
        self._selector.close()

    def _oldest(self) -> Guest | None:
        return next(iter(self._guests.values()), None)

    def _accept(self) -> None:
        oldest = self._oldest()
        if oldest is not None and len(self._guests) >= GUESTS:
            if time.monotonic() - oldest.since < GRACE:
                time.sleep(PAUSE)
                return
            self._part(oldest)
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has hung up, this door is closed, or no more files can be open
            time.sleep(PAUSE)
            return
        guest = self._guests[connection] = Guest(connection)
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _part(self, guest: Guest) -> None:
        """Close the connection to a client that has not proven that it knows the secret."""
        if guest.proofs is not None:
            with contextlib.suppress(OSError):
                self.stranger = str(guest.connection.getpeername()[0])
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]
        guest.connection.close()

    def _hear(self, guest: Guest) -> None:
        try:
            line = guest.hear(self._secret, self._purpose)
        except OSError:
            self._part(guest)
            return
        if line is not None:
            self._selector.unregister(guest.connection)
            del self._guests[guest.connection]
            self._lines.add(line)
            self._thread(self._let_in, line)

    def _let_in(self, line: Line) -> None:
        try:
            if not self._over and self._serve(line):
                self.close()
        finally:
            self._lines.discard(line)
            line.close()
