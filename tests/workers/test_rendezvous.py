"""Processes of one start meet at torch's store, and only they. Where they meet: test_places.py. On a real Slurm:
test_slurm.py."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshwise.spec.errors import UsageError
from meshwise.workers import join, rendezvous
from meshwise.workers.places.place import Place
from meshwise.workers.rendezvous import START, reached, served
from tests.hosts import free_port

OURS, OTHER, WHO = "slurm-one-7.0.1", "slurm-one-8.0.1", "rank 1 of 3"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not come is given up soon."""
    for name, seconds in {"TRY": 0.2, "PATIENCE": 0.1, "COME": 0.5}.items():
        monkeypatch.setattr(rendezvous, name, seconds)


@pytest.fixture
def address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


@contextlib.contextmanager
def listens(address: tuple[str, int], answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Another program at this address."""
    server, kept = socket.create_server(address), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                with contextlib.suppress(OSError):
                    answer(kept[-1])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in (server, *kept):
            each.close()


def torchs(address: tuple[str, int]) -> Any:
    """The store of a program that meshwise did not start."""
    return TCPStore(*address, None, True, wait_for_workers=False)


def test_processes_of_a_start_meet_whoever_comes_first(address: tuple[str, int]) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(reached, address, OURS, WHO) for _ in range(2)]
        store = served(address, OURS)
        store.set("key", "value")
        assert [other.result().get("key") for other in others] == [b"value"] * 2


def test_another_start_at_the_same_port_is_refused_on_both_sides(address: tuple[str, int]) -> None:
    store = served(address, OURS)
    set_one = "Set MASTER_PORT, or --master-port, to a free port of the first machine."
    with pytest.raises(UsageError) as of_rank_0:
        served(address, OTHER)
    assert str(of_rank_0.value) == (
        f"this process cannot listen at port {address[1]} (Address already in use). {set_one}"
    )
    with pytest.raises(UsageError) as of_another:
        reached(address, OTHER, WHO)
    assert str(of_another.value) == (
        f"127.0.0.1:{address[1]} is the meeting point of another start: {OURS}, not {OTHER}. {set_one}"
    )
    assert store.get(START).decode() == OURS


@pytest.mark.usefixtures("soon")
def test_a_store_that_meshwise_does_not_serve_is_refused_and_left_as_it_is(address: tuple[str, int]) -> None:
    store = torchs(address)
    with pytest.raises(UsageError, match=f"meeting point of another start: one without a name, not {OURS}"):
        reached(address, OURS, WHO)
    assert not store.check([START])


def test_a_store_is_waited_for_until_it_has_its_name(address: tuple[str, int]) -> None:
    store = torchs(address)
    timer = threading.Timer(0.2, lambda: store.set(START, OURS))
    timer.start()
    reached(address, OURS, WHO)
    timer.join()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.sendall(connection.recv(100)),
        None,
    ],
    ids=["closes", "http", "echo", "nobody"],
)
def test_who_waits_says_so_once_and_gives_up(
    answer: Callable[[socket.socket], object] | None, address: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    with listens(address, answer) if answer else contextlib.nullcontext(), pytest.raises(OSError) as it:
        reached(address, OURS, WHO)
    assert "\n" not in str(it.value)
    assert capsys.readouterr().err == f"{WHO} waits for the first machine at 127.0.0.1:{address[1]}\n"


@pytest.mark.usefixtures("soon")
def test_a_rank_that_does_not_find_rank_0_is_told_what_to_set(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "of another test")
    with pytest.raises(UsageError, match=r"^rank 1 of 3 did not find rank 0: .*\. Set MASTER_PORT, or --master-port"):
        join._meet(Place("Slurm", rank=1, size=3, key=OURS), address)


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_on_one_machine_no_other_machine_reaches_the_store(host: str, alone: bool) -> None:
    store = served((host, free_port()), OURS)
    found = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == store.port}
    assert any(address in found for address in ("::", "0.0.0.0")) != alone
