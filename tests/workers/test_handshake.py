"""Who does not know the secret is not heard, whatever they record, change, repeat or hold (workers/handshake.py)."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from meshwise.workers import handshake
from meshwise.workers.handshake import (
    ANSWERS,
    ASKS,
    CODE,
    HEAD,
    HELLO,
    NONCE,
    Doorkeeper,
    Line,
    Unproven,
    enter,
    proofs,
)

SECRET = b"a secret that is known to two ends"
PATIENCE = 20.0


class House:
    """Who lets in those that know the secret, and repeats what they say."""

    def __init__(self) -> None:
        self.heard: queue.Queue[bytes] = queue.Queue()
        self.door = Doorkeeper(socket.create_server(("127.0.0.1", 0), backlog=512), SECRET, "house", self._serve)

    def _serve(self, line: Line) -> None:
        with contextlib.suppress(OSError, ValueError):
            while message := line.receive():
                self.heard.put(message)
                line.send(message.upper())

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), timeout=PATIENCE)

    def enter(self, secret: bytes = SECRET, purpose: str = "house") -> Line:
        return enter(self.connection(), secret, purpose, PATIENCE)

    def is_open(self) -> bool:
        """Whether it hears who knows the secret, and nobody has been heard before."""
        line = self.enter()
        line.send(b"here")
        said = line.receive()
        line.close()
        return said == b"HERE" and self.heard.get(timeout=PATIENCE) == b"here"


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.door.close()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end hangs up."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            read += part
    return read


class Wire:
    """Two ends that have proven the secret, and what goes from one to the other in the hands of somebody else."""

    def __init__(self) -> None:
        self._sockets = [*socket.socketpair(), *socket.socketpair()]
        one, self.from_one, self.to_other, other = self._sockets
        for each in self._sockets:
            each.settimeout(PATIENCE)
        *_, session = proofs(SECRET, "wire", b"c" * NONCE, b"s" * NONCE)
        self.one, self.other = Line(one, session, serves=False), Line(other, session, serves=True)

    def sent(self, message: bytes) -> bytes:
        """What goes over the wire for this message of one end."""
        self.one.send(message)
        return self.from_one.recv(1 << 16)

    def close(self) -> None:
        for each in (self.one, self.other, *self._sockets):
            each.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def test_two_ends_that_know_the_secret_talk_and_never_send_it(house: House) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        passing = threading.Thread(target=_pass_on, args=(server, house, recorded))
        passing.start()
        line = enter(socket.create_connection(server.getsockname()), SECRET, "house", PATIENCE)
        line.send(b"a")
        assert line.receive() == b"A"
        line.close()
        passing.join()
    assert recorded.startswith(HELLO) and SECRET not in recorded


def _pass_on(server: socket.socket, house: House, recorded: bytearray) -> None:
    client, _ = server.accept()
    with client, house.connection() as to:
        for source, target in ((client, to), (to, client)) * 2:
            part = source.recv(1 << 16)
            if source is client and len(part) == CODE:  # the first message follows the proof
                part += source.recv(1 << 16)
            recorded += part
            target.sendall(part)


@pytest.mark.parametrize(("secret", "purpose"), [(b"another", "house"), (SECRET, "garden")])
def test_another_secret_or_purpose_is_refused_by_both_ends(secret: bytes, purpose: str, house: House) -> None:
    with pytest.raises(Unproven, match="the process at this address does not know the secret of this run"):
        house.enter(secret, purpose)
    assert house.is_open()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n".ljust(ASKS),
        HELLO + b"n" * NONCE + b"c" * CODE,
        HELLO + b"n" * NONCE + b"c" * CODE + b"\0\0\0\1" + b"c" * CODE + b"x",
        b"x" * 100_000,
    ],
    ids=["nothing", "http", "no proof", "a message", "much"],
)
def test_who_proves_nothing_is_hung_up_on_and_not_heard(said: bytes, house: House) -> None:
    with house.connection() as connection:
        with contextlib.suppress(OSError):  # it may have been hung up on already
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        assert len(read_all(connection)) <= ANSWERS
    assert house.is_open()


def test_a_session_that_was_recorded_proves_nothing_again(house: House) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        passing = threading.Thread(target=_pass_on, args=(server, house, recorded))
        passing.start()
        line = enter(socket.create_connection(server.getsockname()), SECRET, "house", PATIENCE)
        line.send(b"pay")
        assert line.receive() == b"PAY" and house.heard.get(timeout=PATIENCE) == b"pay"
        line.close()
        passing.join()
    of_client = bytes(recorded[:ASKS] + recorded[ASKS + ANSWERS : -(HEAD.size + CODE + 3)])
    assert of_client.endswith(b"pay")
    with house.connection() as again:
        again.sendall(of_client)
        assert len(read_all(again)) <= ANSWERS
    assert house.is_open()  # and has heard nothing meanwhile


def test_a_server_cannot_be_made_to_answer_its_own_question(house: House) -> None:
    with house.connection() as asks, house.connection() as answers:
        asks.sendall(HELLO + b"n" * NONCE)
        answer = asks.recv(ANSWERS, socket.MSG_WAITALL)
        answers.sendall(HELLO + answer[len(HELLO) : ASKS])
        reflected = answers.recv(ANSWERS, socket.MSG_WAITALL)
        asks.sendall(reflected[ASKS:])
        assert read_all(asks) == b""
    assert house.is_open()


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda sent: sent[:at] + bytes([sent[at] ^ 1]) + sent[at + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        flipped(HEAD.size),
        flipped(-1 % (HEAD.size + CODE + 4)),
        lambda sent: sent[:-1] + b"y",
        lambda sent: b"\xff" * 99,
    ],
    ids=["code", "text", "last", "length"],
)
def test_a_message_that_was_changed_is_refused(change: Callable[[bytes], bytes], wire: Wire) -> None:
    wire.to_other.sendall(change(wire.sent(b"stop")))
    with pytest.raises(Unproven):
        wire.other.receive()


def test_a_message_that_is_repeated_left_out_or_sent_back_is_refused(wire: Wire) -> None:
    first, second = wire.sent(b"one"), wire.sent(b"two")
    wire.to_other.sendall(first)
    assert wire.other.receive() == b"one"
    for not_the_next in (first, wire.sent(b"three")):
        wire.to_other.sendall(not_the_next)
        with pytest.raises(Unproven, match="was changed on its way, or sent a second time"):
            wire.other.receive()
    wire.from_one.sendall(first)
    with pytest.raises(Unproven):
        wire.one.receive()
    wire.to_other.sendall(second)
    assert wire.other.receive() == b"two"


def test_half_a_message_is_none(wire: Wire) -> None:
    wire.to_other.sendall(wire.sent(b"stop")[:-1])
    wire.to_other.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="in the middle of a message"):
        wire.other.receive()


def test_no_message_is_empty_or_endless(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST", 3)
    for message in (b"", b"four"):
        with pytest.raises(ValueError, match="a message must have 1 to 3 bytes"):
            wire.one.send(message)


def test_who_is_silent_is_not_waited_for_longer_than_its_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT", 0.1)
    with house.connection() as silent, house.connection() as half:
        half.sendall(HELLO)
        assert read_all(silent) == read_all(half) == b""


def test_a_server_that_dribbles_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dribble() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for at in range(ANSWERS - 1):
                    connection.sendall((HELLO + b"x" * ANSWERS)[at : at + 1])
                    time.sleep(0.05)

        threading.Thread(target=dribble, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            enter(socket.create_connection(server.getsockname()), SECRET, "house", 0.2)
        assert time.monotonic() - began < PATIENCE / 4


def test_a_flood_of_connections_keeps_nobody_out(house: House) -> None:
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(house.connection()) for _ in range(200)]
        for each in flood[::2]:
            each.sendall(HELLO)
        assert house.is_open()
    assert house.is_open()


def test_a_door_that_is_closed_lets_nobody_in_and_its_port_is_free(house: House) -> None:
    line = house.enter()
    line.send(b"a")
    assert line.receive() == b"A"  # it is in
    house.door.close()
    assert line.receive() == b""
    line.close()
    Doorkeeper(socket.create_server(("127.0.0.1", house.door.port)), SECRET, "house", lambda line: None).close()
