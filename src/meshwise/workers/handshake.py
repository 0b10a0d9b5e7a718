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
Tested in tests/workers/test_handshake.py.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

HELLO = b"meshwise 1\n"
NONCE = CODE = 32
ASKS, ANSWERS = len(HELLO) + NONCE, len(HELLO) + NONCE + CODE
"""The length in bytes of the first message of a client, and of the first message of a server."""
MOST = 16 << 20
"""The largest length of a message, in bytes."""
HEAD, NUMBER = struct.Struct("!I"), struct.Struct("!Q")


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
        secret.

        purpose: what the connection is for, such as `channel`. Codes for one purpose are not valid for another purpose.
        of_client, of_server: the nonces (random bytes) that the client and the server have sent.
        """
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
        self._lock, self._over = threading.Lock(), False
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
        """Return the next message, or b"" if the other end has closed the connection.

        Each message has an authentication code. Raises OSError if the code is wrong, or if the connection is lost.
        """
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

    def plain(self) -> socket.socket:
        """Return the bare socket, for data without authentication codes. After this call, this `Line` can no longer be
        used."""
        mine, self._over = self.connection.dup(), True
        self.close()
        return mine

    def close(self) -> None:
        """Close the connection. A thread that waits for a message wakes up."""
        with contextlib.suppress(OSError):
            if not self._over:
                self.connection.shutdown(socket.SHUT_RDWR)  # close alone would not wake that thread
        self._bytes.close()
        self.connection.close()

    @staticmethod
    def _whole(part: bytes, length: int) -> bytes:
        if len(part) < length:
            raise ConnectionResetError("the connection ended in the middle of a message")
        return part


def enter(connection: socket.socket, secret: bytes, purpose: str, timeout: float) -> Line:
    """Authenticate a connection as its client: check the server's proof of the secret, then send this side's proof.

    timeout: the seconds in which the server must have sent its proof.

    On an error, the connection is closed. Raises Unproven if the server does not know the secret, and another OSError
    if the server is gone or too slow.
    """
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
    until, nonce, answer = time.monotonic() + timeout, secrets.token_bytes(NONCE), b""
    connection.settimeout(timeout)
    connection.sendall(HELLO + nonce)
    while len(answer) < ANSWERS:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(ANSWERS - len(answer))
        if not part:
            raise ConnectionResetError("the other side closed the connection before it proved that it knows the secret")
        answer += part
        if not answer.startswith(HELLO[: len(answer)]):
            raise ConnectionRefusedError("another program listens there")
    proofs = Proofs.of(secret, purpose, nonce, answer[len(HELLO) : ASKS])
    if not hmac.compare_digest(answer[ASKS:], proofs.server):
        raise Unproven("the process at this address does not know the secret of this run")
    return proofs


class Guest:
    """The server's side of a connection, until the client has proven that it knows the secret. Reading from it never
    blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.proofs: Proofs | None = None
        """The codes by which each end proves that it knows the secret. None until the client has sent its nonce."""
        self._heard, self.since = b"", time.monotonic()

    def hear(self, secret: bytes, purpose: str) -> Line | None:
        """Read what has arrived. Return the connection once the client has proven the secret, and None before that.

        Raises OSError on a wrong proof.
        """
        wanted = ASKS if self.proofs is None else CODE
        part = self.connection.recv(wanted - len(self._heard))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        self._heard += part
        if len(self._heard) < wanted:
            return None
        heard, self._heard = self._heard, b""
        if self.proofs is None:
            if not heard.startswith(HELLO):
                raise Unproven("another program")
            nonce = secrets.token_bytes(NONCE)
            self.proofs = Proofs.of(secret, purpose, heard[len(HELLO) :], nonce)
            self.connection.sendall(HELLO + nonce + self.proofs.server)
            return None
        if not hmac.compare_digest(heard, self.proofs.client):
            raise Unproven("the client does not know the secret of this run")
        self.connection.setblocking(True)
        return Line(self.connection, self.proofs, serves=True)
