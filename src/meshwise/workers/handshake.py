"""Authenticate both ends of a connection, and each message, by a secret.

The secret never travels.

    client -> server   HELLO, a nonce
    server -> client   HELLO, a nonce, a proof: HMAC(secret; "server", both nonces, purpose)
    client -> server   a proof: HMAC(secret; "client", both nonces, purpose)
    both ways          a message: its length, its code, its bytes
                       code: HMAC(key of this session and of the sender's role; number of the message, bytes)

So no recorded message can be used again: not in a later session, not sent back to its sender, not for another purpose.
Not covered: the messages are not encrypted. Anybody may ask a server for its proof and test guesses of the secret on
it, so a secret is 32 random bytes, or as hard to guess.

A server has at most GUESTS connections that have not proven the secret yet, each for at most TIMEOUT seconds. With
more, the oldest is closed once it has had GRACE seconds: a flood of silent connections delays real ones but cannot keep
them out.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

HELLO = b"meshwise 1\n"
NONCE = CODE = 32
ASKS, ANSWERS = len(HELLO) + NONCE, len(HELLO) + NONCE + CODE
"""The length in bytes of the first message of a client, and of the first message of a server."""
MOST = 16 << 20
"""The largest length of a message, in bytes."""
HEAD, NUMBER = struct.Struct("!I"), struct.Struct("!Q")
GUESTS = 128  # connections that have proven nothing yet
TIMEOUT = 30.0  # seconds for each of them
GRACE = 0.5  # seconds in which it is not sent away for another one
PAUSE = 0.01  # seconds to the next look, where no more can be let in now


class Unproven(ConnectionError):
    """Raised if the other end does not prove that it knows the secret, or if a message has a wrong authentication
    code."""


def code(key: bytes, *parts: bytes) -> bytes:
    """Return the authentication code of these bytes, which only a holder of the key can compute."""
    return hmac.digest(key, b"".join(parts), "sha256")


@dataclass(frozen=True)
class Proofs:
    """The authentication codes by which the client and the server of a connection prove that they know the secret.
    `session` is the key for the codes of later messages."""

    server: bytes
    client: bytes
    session: bytes

    @classmethod
    def of(cls, secret: bytes, purpose: str, of_client: bytes, of_server: bytes) -> Proofs:
        """Compute the authentication codes by which the client and the server of a connection prove that they know the
        secret."""
        said = of_client, of_server, purpose.encode()  # the first two are always as long: no two calls join alike
        return cls(*(code(secret, role, *said) for role in (b"server", b"client", b"session")))


class Line:
    """A connection after the authentication of both ends. Any thread may call `send`, but only one thread may call
    `receive`."""

    def __init__(self, connection: socket.socket, proofs: Proofs, *, serves: bool) -> None:
        self.connection = connection
        keys = [code(proofs.session, role) for role in (b"server", b"client")]
        self._sends, self._receives = keys if serves else reversed(keys)
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self._bytes = connection.makefile("rb")

    def send(self, message: bytes) -> None:
        """Send a message of 1 to MOST bytes. Raises OSError if the connection is lost."""
        if not 0 < len(message) <= MOST:
            raise ValueError(f"a message must have 1 to {MOST} bytes, and this one has {len(message)}")
        with self._lock:
            number, self._sent = self._sent, self._sent + 1
            sealed = code(self._sends, NUMBER.pack(number), message)
            self.connection.sendall(HEAD.pack(len(message)) + sealed + message)

    def receive(self) -> bytes:
        """Return the next message, or b"" if the other end has closed the connection."""
        head = self._bytes.read(HEAD.size)
        if not head:
            return b""
        (length,) = HEAD.unpack(self._whole(head, HEAD.size))
        if not 0 < length <= MOST:
            raise Unproven(f"the other side sent a message of {length} bytes, which is not allowed")
        sealed = self._whole(self._bytes.read(CODE), CODE)
        message = self._whole(self._bytes.read(length), length)
        if not hmac.compare_digest(sealed, code(self._receives, NUMBER.pack(self._received), message)):
            raise Unproven("a message was changed on its way, or sent a second time")
        self._received += 1
        return message

    def close(self) -> None:
        """Close the connection. A thread that waits for a message wakes up."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # close alone would not wake that thread
        self._bytes.close()
        self.connection.close()

    @staticmethod
    def _whole(part: bytes, length: int) -> bytes:
        if len(part) < length:
            raise ConnectionResetError("the connection ended in the middle of a message")
        return part


def enter(connection: socket.socket, secret: bytes, purpose: str, timeout: float) -> Line:
    """Authenticate a connection as its client: check the server's proof of the secret, then send this side's proof."""
    try:
        proofs = _proven(connection, secret, purpose, timeout)
        connection.sendall(proofs.client)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return Line(connection, proofs, serves=False)


def _proven(connection: socket.socket, secret: bytes, purpose: str, timeout: float) -> Proofs:
    """Ask the server to prove that it knows the secret, and check its code."""
    until, nonce = time.monotonic() + timeout, secrets.token_bytes(NONCE)
    connection.settimeout(timeout)
    connection.sendall(HELLO + nonce)
    answer = _read(connection, ANSWERS, until, HELLO)
    proofs = Proofs.of(secret, purpose, nonce, answer[len(HELLO) : ASKS])
    if not hmac.compare_digest(answer[ASKS:], proofs.server):
        raise Unproven("the process at this address does not know the secret of this run")
    return proofs


def _read(connection: socket.socket, size: int, until: float, begins: bytes = b"") -> bytes:
    """Read `size` bytes before the time `until`. Raises OSError if they do not come, or do not begin with `begins`."""
    heard = b""
    while len(heard) < size:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(size - len(heard))
        if not part:
            raise ConnectionResetError("the other side closed the connection before it proved that it knows the secret")
        heard += part
        if not heard.startswith(begins[: len(heard)]):
            raise ConnectionRefusedError("another program listens there")
    return heard


def admit(connection: socket.socket, secret: bytes, purpose: str) -> Line:
    """Authenticate a connection as its server, within TIMEOUT seconds."""
    until = time.monotonic() + TIMEOUT
    asked, nonce = _read(connection, ASKS, until, HELLO), secrets.token_bytes(NONCE)
    proofs = Proofs.of(secret, purpose, asked[len(HELLO) :], nonce)
    try:
        connection.sendall(HELLO + nonce + proofs.server)
        proven = hmac.compare_digest(_read(connection, CODE, until), proofs.client)
    except OSError:
        proven = False
    if not proven:
        raise Unproven("the client does not know the secret of this run")
    connection.settimeout(None)
    return Line(connection, proofs, serves=True)


class Doorkeeper:
    """A listening socket that accepts only clients which know the secret."""

    def __init__(self, server: socket.socket, secret: bytes, purpose: str, serve: Callable[[Line], object]) -> None:
        self._server, self._secret, self._purpose, self._serve = server, secret, purpose, serve
        self._guests: dict[socket.socket, float] = {}
        self._lines: set[Line] = set()
        self._over = False
        self.stranger: str | None = None
        """The address of the last client that used our protocol but did not know the secret. None if there was none."""
        self.port = int(server.getsockname()[1])
        self._thread(self._run)

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._over = True
        for each in (self._server, *self._guests.copy()):
            _shut(each)  # wakes the thread, which closes it
        for line in tuple(self._lines):
            line.close()

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
        name = f"meshwise-{self._purpose} {self.port}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _run(self) -> None:
        while not self._over:
            try:
                connection, address = self._server.accept()
            except OSError:  # it has hung up, this door is closed, or no more files can be open
                time.sleep(PAUSE)
                continue
            while len(self._guests) >= GUESTS:
                oldest, since = next(iter(self._guests.copy().items()))
                if time.monotonic() - since < GRACE:
                    time.sleep(PAUSE)
                elif self._guests.pop(oldest, None):
                    _shut(oldest)
            self._guests[connection] = time.monotonic()
            self._thread(self._meet, connection, address[0])
        self._server.close()

    def _meet(self, connection: socket.socket, address: str) -> None:
        try:
            line = admit(connection, self._secret, self._purpose)
        except OSError as error:
            if isinstance(error, Unproven):
                self.stranger = address
            connection.close()
            return
        finally:
            self._guests.pop(connection, None)
        self._lines.add(line)
        try:
            if not self._over and self._serve(line):
                self.close()
        finally:
            self._lines.discard(line)
            line.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
