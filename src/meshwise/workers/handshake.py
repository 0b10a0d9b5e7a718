"""Authenticate both ends of a connection, and each message, by a secret.

The secret never travels.

    client -> server   HELLO, a nonce
    server -> client   HELLO, a nonce, a proof: HMAC(secret; "server", both nonces, purpose)
    client -> server   a proof: HMAC(secret; "client", both nonces, purpose)
    both ways          a message: its length, its code, its bytes
                       code: HMAC(key of this session and of the sender's role; number of the message, bytes)

So no recorded message can be used again: not in a later session, not sent back to its sender, not for another purpose.
Not covered: the messages are not encrypted. Anybody may ask a server for its proof and test guesses of the secret on
it, so a secret is 32 random bytes, or a text that is as hard to guess.

Each connection to a server has a thread of its own and TIMEOUT seconds to prove the secret, so silent connections keep
others out only when the process can open no more files.
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

HELLO = b"meshwise 1\n"
NONCE = CODE = 32
ASKS, ANSWERS = len(HELLO) + NONCE, len(HELLO) + NONCE + CODE
"""The length in bytes of the first message of a client, and of the first message of a server."""
MOST = 16 << 20
"""The largest length of a message, in bytes."""
HEAD, NUMBER = struct.Struct("!I"), struct.Struct("!Q")
TIMEOUT = 30.0  # seconds for a new connection to prove that it knows the secret
PAUSE = 0.01  # seconds to wait after a failed attempt to accept a connection


class Unproven(ConnectionError):
    """Raised if the other end does not prove that it knows the secret, or if a message has a wrong authentication
    code."""


def code(key: bytes, *parts: bytes) -> bytes:
    """Return the authentication code of these bytes, which only a holder of the key can compute."""
    return hmac.digest(key, b"".join(parts), "sha256")


def proofs(secret: bytes, purpose: str, of_client: bytes, of_server: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the codes by which the server and the client prove that they know the secret, and the key for the codes of
    later messages. of_client, of_server: their nonces."""
    said = of_client, of_server, purpose.encode()  # the first two have fixed lengths, so joined bytes are unambiguous
    return code(secret, b"server", *said), code(secret, b"client", *said), code(secret, b"session", *said)


class Line:
    """A connection after the authentication of both ends. Any thread may call `send`, but only one thread may call
    `receive`."""

    def __init__(self, connection: socket.socket, session: bytes, *, serves: bool) -> None:
        self.connection = connection
        keys = [code(session, role) for role in (b"server", b"client")]
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
            self.connection.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread
        self._bytes.close()
        self.connection.close()

    @staticmethod
    def _whole(part: bytes, length: int) -> bytes:
        if len(part) < length:
            raise ConnectionResetError("the connection ended in the middle of a message")
        return part


def enter(connection: socket.socket, secret: bytes, purpose: str, timeout: float) -> Line:
    """Authenticate a connection as its client: check the server's proof, then prove the secret.
    Return the line."""
    try:
        client, session = _proven(connection, secret, purpose, timeout)
        connection.sendall(client)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return Line(connection, session, serves=False)


def _proven(connection: socket.socket, secret: bytes, purpose: str, timeout: float) -> tuple[bytes, bytes]:
    """Ask the server to prove that it knows the secret, and check its code. Return the client's code, and the key of
    the session."""
    until, nonce = time.monotonic() + timeout, secrets.token_bytes(NONCE)
    connection.settimeout(timeout)
    connection.sendall(HELLO + nonce)
    answer = _read(connection, ANSWERS, until, HELLO)
    server, client, session = proofs(secret, purpose, nonce, answer[len(HELLO) : ASKS])
    if not hmac.compare_digest(answer[ASKS:], server):
        raise Unproven("the process at this address does not know the secret of this run")
    return client, session


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
    """Authenticate a connection as its server, within TIMEOUT seconds, and return the line."""
    until = time.monotonic() + TIMEOUT
    asked, nonce = _read(connection, ASKS, until, HELLO), secrets.token_bytes(NONCE)
    server, client, session = proofs(secret, purpose, asked[len(HELLO) :], nonce)
    connection.sendall(HELLO + nonce + server)
    if not hmac.compare_digest(_read(connection, CODE, until), client):
        raise Unproven("the client does not know the secret of this run")
    connection.settimeout(None)
    return Line(connection, session, serves=True)


class Doorkeeper:
    """A listening socket that accepts only clients which know the secret."""

    def __init__(self, server: socket.socket, secret: bytes, purpose: str, serve: Callable[[Line], object]) -> None:
        self._server, self._secret, self._purpose, self._serve = server, secret, purpose, serve
        self._lines: set[Line] = set()
        self._over = False
        self.port = int(server.getsockname()[1])
        self._thread(self._run)

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which closes the socket
        for line in tuple(self._lines):
            line.close()

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
        name = f"meshwise-{self._purpose} {self.port}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _run(self) -> None:
        while not self._over:
            try:
                connection, _ = self._server.accept()
            except OSError:  # the client or this server has closed, or too many files are open
                time.sleep(PAUSE)
                continue
            self._thread(self._meet, connection)
        self._server.close()

    def _meet(self, connection: socket.socket) -> None:
        try:
            line = admit(connection, self._secret, self._purpose)
        except OSError:
            connection.close()
            return
        self._lines.add(line)
        try:
            if not self._over and self._serve(line):
                self.close()
        finally:
            self._lines.discard(line)
            line.close()
