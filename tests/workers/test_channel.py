"""The side channel over a real pair of sockets: what arrives, and that its end ends a worker."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshwise.workers import channel
from meshwise.workers.channel import CHANNEL, Line, WorkerChannel, connect

PATIENCE = 20  # seconds until what does not come counts as lost


class Pair:
    """A launcher's end with all that it was told, and the worker at the other end."""

    def __init__(self) -> None:
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.orphans: queue.Queue[str] = queue.Queue()
        before = set(threading.enumerate())  # a pool of this process has channels too
        ours, theirs = socket.socketpair()
        self.variables = {CHANNEL: str(theirs.detach())}
        self.launcher = Line(ours, self.told.put)
        made = connect(self.variables)
        assert made is not None
        self.worker: WorkerChannel = made
        self.threads = set(threading.enumerate()) - before

    def next(self) -> dict[str, Any]:
        return self.told.get(timeout=PATIENCE)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    orphans: queue.Queue[str] = queue.Queue()
    # A worker without its launcher ends its own process, which here is the test's.
    monkeypatch.setattr(channel, "end_own_process_group", lambda: orphans.put(threading.current_thread().name))
    made = Pair()
    made.orphans = orphans
    yield made
    made.worker.close()
    made.launcher.close()
    orphans.get(timeout=PATIENCE)


def test_messages_of_a_worker_arrive_in_order(pair: Pair) -> None:
    for step in range(20):
        pair.worker.send("log", step=step, loss=0.5)
    assert [pair.next() for _ in range(20)] == [{"kind": "log", "step": step, "loss": 0.5} for step in range(20)]


def test_messages_sent_from_many_threads_stay_whole(pair: Pair) -> None:
    threads = [
        threading.Thread(target=lambda: [pair.worker.send("log", text="x" * 5000) for _ in range(20)]) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    assert [pair.next() for _ in range(100)] == [{"kind": "log", "text": "x" * 5000}] * 100


def test_what_json_does_not_know_is_sent_as_text(pair: Pair) -> None:
    pair.worker.send("failed", where=ValueError("no"))
    assert pair.next() == {"kind": "failed", "where": "no"}


def test_a_message_goes_to_the_listener_of_its_kind(pair: Pair) -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    pair.worker.listeners["last"] = heard.put
    pair.launcher.send("unheard")
    pair.launcher.send("last", step=3)
    assert heard.get(timeout=PATIENCE) == {"kind": "last", "step": 3} and heard.empty()


def test_a_program_that_a_worker_starts_is_not_taken_for_it(pair: Pair) -> None:
    assert pair.variables == {} and connect(pair.variables) is None


def test_who_sends_to_a_worker_that_is_gone_does_not_fail(pair: Pair) -> None:
    pair.worker._connection.sendall(b'{"kind": "do')  # cut off in the middle of a message
    pair.worker._connection.shutdown(socket.SHUT_RDWR)
    pair.launcher.send("halt")
    assert pair.told.empty()


@pytest.mark.parametrize("last_words", [b"", b'{"kind"', b"unread"])
def test_however_the_launcher_goes_away_the_worker_ends(monkeypatch: pytest.MonkeyPatch, last_words: bytes) -> None:
    orphans: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr(channel, "end_own_process_group", lambda: orphans.put(True))
    ours, theirs = socket.socketpair()
    worker = WorkerChannel(theirs)
    with ours:  # a killed process with unread messages resets its connections
        if last_words == b"unread":
            worker.send("log")
        else:
            ours.sendall(last_words)
    assert orphans.get(timeout=PATIENCE)


def test_a_closed_channel_leaves_no_thread_behind(pair: Pair) -> None:
    assert [thread.name for thread in pair.threads] == ["meshwise-channel"] * 2
    pair.launcher.close()
    for thread in pair.threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in pair.threads)
