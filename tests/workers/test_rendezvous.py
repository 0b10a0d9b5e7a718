"""Ranks find rank 0 where no launcher says where it is, and only their own. On a real Slurm: test_slurm.py; attacked by
another user: test_attacks.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers import rendezvous
from meshwise.workers.handshake import CODE, HELLO, NONCE
from meshwise.workers.place import Place
from meshwise.workers.secret import VARIABLE

HERE = Place("Slurm", rank=0, size=3, nodes=1, tasks_here=3, key=f"slurm-test-{os.getpid()}.0.1")
STORE = 12345


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that does not answer is given up soon."""
    monkeypatch.setattr(rendezvous, "ANSWER", 0.3)


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have a secret from the environment."""
    monkeypatch.setenv(VARIABLE, "of this start and of nobody else")


def find(place: Place, folder: Path, timeout: float = 3.0) -> tuple[str, int]:
    return rendezvous.find_door(place, folder, timeout)


def with_free_port(place: Place) -> Place:
    """The place with a key whose first port nobody has."""
    for number in range(100):
        found = replace(place, key=f"{place.key}-{number}")
        with contextlib.suppress(OSError), socket.create_server(("", rendezvous._ports(found.key)[0])):
            return found
    raise AssertionError("no free port")


@contextlib.contextmanager
def listens(port: int, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Another program at this port."""
    server, kept = socket.create_server(("127.0.0.1", port)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                with contextlib.suppress(OSError):
                    answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in kept:
            connection.close()


def test_ranks_that_share_a_folder_read_where_rank_0_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ports", lambda key: [])  # no other way
    rendezvous.open_door(HERE, STORE, tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text().splitlines()[-1])["addresses"] == ["127.0.0.1"]
    for rank in (1, 2):
        assert find(replace(HERE, rank=rank), tmp_path) == ("127.0.0.1", STORE)
    for _ in range(100):
        if not path.exists():
            break
        threading.Event().wait(0.02)
    assert list(tmp_path.iterdir()) == []  # all are in: nothing stays behind


@pytest.mark.usefixtures("no_folder")
def test_ranks_that_share_none_try_the_ports_that_follow_from_the_key(tmp_path: Path) -> None:
    rendezvous.open_door(replace(HERE, key=HERE.key + "p"), STORE, tmp_path / "of rank 0")
    assert find(replace(HERE, key=HERE.key + "p", rank=1), tmp_path / "of rank 1") == ("127.0.0.1", STORE)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: None,  # listens, and says nothing
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.sendall(b"[1]\n"),
        lambda connection: connection.sendall(b"x" * 100_000),
        lambda connection: connection.sendall(HELLO + b"n" * NONCE + b"c" * CODE),
    ],
    ids=["silent", "closed", "http", "list", "endless", "another secret"],
)
@pytest.mark.usefixtures("no_folder")
def test_another_program_at_the_port_means_the_next(
    answer: Callable[[socket.socket], object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = with_free_port(replace(HERE, key=f"{HERE.key}-{request.node.callspec.id}"))
    with listens(rendezvous._ports(place.key)[0], answer):
        rendezvous.open_door(place, STORE, tmp_path / "of rank 0")
        assert find(replace(place, rank=1), tmp_path / "of rank 1") == ("127.0.0.1", STORE)


@pytest.mark.parametrize("given", [True, False])
def test_two_steps_never_meet_even_at_the_same_ports(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:  # the same for both
        monkeypatch.setenv(VARIABLE, "of this one job and of nobody else")
    ports = [rendezvous._ports(with_free_port(HERE).key)[0]]
    monkeypatch.setattr(rendezvous, "_ports", lambda key: ports)
    steps = [replace(HERE, key=f"{HERE.key}-step{step}-{given}") for step in (0, 1)]
    for port, step in enumerate(steps):  # the second door cannot have the port, and is written down alone
        rendezvous.open_door(step, port, tmp_path)
    for port, step in enumerate(steps):
        assert find(replace(step, rank=1), tmp_path) == ("127.0.0.1", port)


def test_a_rank_is_let_in_once_and_a_later_run_of_the_step_waits_for_its_own(tmp_path: Path) -> None:
    place = replace(HERE, key=HERE.key + "twice")
    rendezvous.open_door(place, STORE, tmp_path)
    assert find(replace(place, rank=1), tmp_path) == ("127.0.0.1", STORE)
    with pytest.raises(
        UsageError, match=r"rank 1 of 3 did not find rank 0 within 1 s: no answer through .*, nor from .*, ports "
    ):
        find(replace(place, rank=1), tmp_path, 1.0)
    rendezvous.open_door(place, STORE + 1, tmp_path)  # rank 0 of the next run in the same step
    assert find(replace(place, rank=1), tmp_path) == ("127.0.0.1", STORE + 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": "x", "addresses": ["a"]}', '{"addresses": 3, "port": 1}'])
@pytest.mark.usefixtures("no_folder")
def test_a_damaged_file_is_no_door(text: str, tmp_path: Path) -> None:
    place = replace(HERE, key=HERE.key + "damaged" + str(len(text)))
    rendezvous.open_door(place, STORE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert find(replace(place, rank=1), tmp_path) == ("127.0.0.1", STORE)


def test_a_rank_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.2)
    with pytest.raises(UsageError, match="did not find rank 0"):
        find(replace(HERE, key=HERE.key + "late", rank=2, nodes=2, hosts=("127.0.0.1",)), tmp_path, 0.5)
    assert capsys.readouterr().err.startswith(f"rank 2 of 3 waits for rank 0: no answer through {tmp_path}")


def test_a_rank_with_another_secret_gets_a_sentence_and_the_others_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STRANGERS", 0.2)
    place = with_free_port(HERE)
    for folder in ("of rank 0", "of rank 1"):
        (tmp_path / folder).mkdir()
    rendezvous.open_door(place, STORE, tmp_path / "of rank 0")
    with pytest.raises(UsageError, match=r"the process at 127.0.0.1:\d+ does not know the secret of this run") as it:
        find(replace(place, rank=1), tmp_path / "of rank 1", timeout=600.0)
    assert f"export {VARIABLE}=$(openssl rand -hex 32)" in str(it.value)
    for rank in (1, 2):
        assert find(replace(place, rank=rank), tmp_path / "of rank 0") == ("127.0.0.1", STORE)


def test_who_comes_first_makes_the_secret_that_all_have(tmp_path: Path) -> None:
    place = replace(HERE, key=HERE.key + "first")
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(find, replace(place, rank=rank), tmp_path) for rank in (1, 2)]
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        rendezvous.open_door(place, STORE, tmp_path)
        assert [each.result() for each in found] == [("127.0.0.1", STORE)] * 2


def test_one_machine_whose_folder_cannot_be_written_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendezvous.os, "access", lambda path, mode: False)
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    place = replace(HERE, key=HERE.key + "closed")
    host, port = rendezvous.meet(place)
    with socket.socket(fileno=rendezvous.taken(port)) as server:
        assert rendezvous.meet(replace(place, rank=1)) == (host, port) == server.getsockname()
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


def test_without_anything_in_common_it_is_said_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"mpirun does not say where rank 0 of 4 is. Set MASTER_ADDR to its host"):
        rendezvous.meet(Place("mpirun", rank=1, size=4))
