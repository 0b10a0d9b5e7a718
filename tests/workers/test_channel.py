"""The side channel over real sockets: what arrives, and that a closed end is a message too. Attacked by another user:
test_attacks.py."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.workers import channel
from meshwise.workers.channel import ADDRESS, LauncherChannel, Line, WorkerChannel, connect

PATIENCE = 20  # seconds until what does not come counts as lost


class Launcher:
    """A launcher's end and all that it was told, and the workers that are connected to it."""

    def __init__(self, folder: Path) -> None:
        self.told: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.channel = self.listens(folder)
        self.orphans: queue.Queue[str] = queue.Queue()
        self.workers: list[WorkerChannel] = []

    def listens(self, folder: Path) -> LauncherChannel:
        return LauncherChannel(folder, lambda rank, message: self.told.put((rank, message)))

    def worker(self, rank: int) -> WorkerChannel:
        made = connect({ADDRESS: self.channel.address}, rank)
        assert made is not None
        self.workers.append(made)
        told_rank, hello = self.next()
        assert (told_rank, hello["kind"], hello["rank"]) == (rank, "hello", rank)
        return made

    def next(self) -> tuple[int, dict[str, Any]]:
        return self.told.get(timeout=PATIENCE)

    def stranger(self, said: bytes) -> bytes:
        """What a connection that said this reads until it is hung up on."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(self.channel.address)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(said)
            read = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(4096):
                    read += part
            return read


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    # A worker without its launcher ends its own process, which here is the test's.
    monkeypatch.setattr(channel, "end_own_process_group", lambda: made.orphans.put(threading.current_thread().name))
    yield made
    for worker in made.workers:
        worker._line.close()
    made.channel.close()
    for _ in made.workers:
        made.orphans.get(timeout=PATIENCE)


def test_messages_of_a_worker_arrive_in_order_with_its_rank(launcher: Launcher) -> None:
    first, second = launcher.worker(0), launcher.worker(5)
    for step in range(20):
        first.send("log", step=step, loss=0.5)
    assert [launcher.next() for _ in range(20)] == [(0, {"kind": "log", "step": s, "loss": 0.5}) for s in range(20)]
    second.send("done")
    assert launcher.next() == (5, {"kind": "done"})


def test_messages_sent_from_many_threads_stay_whole(launcher: Launcher) -> None:
    worker = launcher.worker(0)
    threads = [
        threading.Thread(target=lambda: [worker.send("log", text="x" * 5000) for _ in range(20)]) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    messages = [launcher.next() for _ in range(100)]
    assert messages == [(0, {"kind": "log", "text": "x" * 5000})] * 100


def test_what_json_does_not_know_is_sent_as_text(launcher: Launcher) -> None:
    launcher.worker(0).send("failed", where=ValueError("no"))
    assert launcher.next() == (0, {"kind": "failed", "where": "no"})


def test_the_launcher_speaks_to_the_rank_that_it_names(launcher: Launcher) -> None:
    heard: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    for rank in (0, 1):
        launcher.worker(rank).listeners["last"] = lambda message, rank=rank: heard.put((rank, message))  # type: ignore[misc]
    launcher.channel.send(1, "unheard")
    launcher.channel.send(1, "last", step=3)
    assert heard.get(timeout=PATIENCE) == (1, {"kind": "last", "step": 3})
    launcher.channel.send(7, "last", step=3)  # a rank that has not come yet: no error
    assert heard.empty()


def test_a_worker_that_goes_away_is_delivered_as_closed(launcher: Launcher) -> None:
    worker = launcher.worker(3)
    worker._line._connection.sendall(b'{"kind": "do')  # cut off in the middle of a message
    worker._line._connection.shutdown(socket.SHUT_RDWR)
    assert launcher.next() == (3, {"kind": "closed"})
    launcher.channel.send(3, "halt")  # to nobody: no error


def test_a_launcher_that_goes_away_ends_its_workers(launcher: Launcher) -> None:
    launcher.worker(0)
    launcher.channel.close()
    launcher.orphans.put(launcher.orphans.get(timeout=PATIENCE))


@pytest.mark.parametrize("last_words", [b"", b'{"kind"', b"{}\n", b"unread"])
def test_however_the_launcher_goes_away_the_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: bytes
) -> None:
    orphans: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr(channel, "end_own_process_group", lambda: orphans.put(True))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "channel"))
        server.listen()
        worker = connect({ADDRESS: str(tmp_path / "channel")}, 0)
        connection, _ = server.accept()
        with connection:  # a killed process with unread messages resets its connections
            if last_words != b"unread":
                Line(connection).receive()
                connection.sendall(last_words)
    assert orphans.get(timeout=PATIENCE)
    assert worker is not None
    worker._line.close()


def test_a_closed_launcher_leaves_no_thread_behind(launcher: Launcher) -> None:
    launcher.worker(0)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("meshwise-channel")]
    assert len(threads) >= 3
    launcher.channel.close()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b'{"rank": "first"}\n', b"\0" * 100_000]
)
def test_what_is_no_message_is_hung_up_on_and_not_heard(launcher: Launcher, said: bytes) -> None:
    assert launcher.stranger(said + b"\n") == b""
    launcher.worker(1).send("done")
    assert launcher.next() == (1, {"kind": "done"})


def test_another_user_is_hung_up_on_and_not_heard(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.worker(1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert launcher.stranger(b'{"kind": "hello", "rank": 1}\n') == b""
    assert launcher.told.empty()


def test_the_path_of_a_socket_may_be_longer_than_the_kernel_allows(launcher: Launcher, tmp_path: Path) -> None:
    (deep := tmp_path / ("a deep TMPDIR " * 10)).mkdir()
    launcher.channel.close()
    launcher.channel = launcher.listens(deep)
    assert launcher.channel.address == str(deep / "channel") and (deep / "channel").is_socket()
    launcher.worker(0).send("done")
    assert launcher.next() == (0, {"kind": "done"})


def test_without_an_address_there_is_no_channel() -> None:
    assert connect({}, 0) is None
