"""Another user of the machine cannot come between the ranks of a start, nor between the launchers of a run: who listens
first, plants a file, repeats what was said, or holds connections. Needs root, which becomes that other user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers import node_options, rendezvous
from meshwise.workers.channel import free_port
from meshwise.workers.handshake import ANSWERS, ASKS, CODE, HELLO, NONCE, Unproven
from meshwise.workers.node_options import joined
from meshwise.workers.place import Place
from meshwise.workers.secret import PREFIX, VARIABLE

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
    pytest.mark.usefixtures("processes"),
]

NOBODY = 65534
HERE = Place("Slurm", rank=0, size=3, nodes=1, tasks_here=3, key=f"slurm-attacked-{os.getpid()}.0.1")
STORE = 12345
GIVEN = "of the ranks that are attacked here and nobody else"
PLANTED = json.dumps({"secret": "0" * 64, "port": 1, "addresses": ["127.0.0.1"]})

ATTACKER = """
import os, socket, sys, threading, time
"0".encode("idna")  # nothing can be imported once this is another user
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
what, *words = sys.argv[1:]
read = b""

def ready():
    print("ready", flush=True)
    sys.stdin.read()

def listen():
    return socket.create_server(("127.0.0.1", int(words[0])))

def connect():
    return socket.create_connection(("127.0.0.1", int(words[-1])))

def answer(server):  # with words[1], and hear what is said then
    global read
    while True:
        connection, _ = server.accept()
        try:
            connection.sendall(bytes.fromhex(words[1]))
            while part := connection.recv(65536):
                read += part
        except ConnectionError:
            pass

def back(source, target):
    while part := source.recv(65536):
        target.sendall(part)
    target.close()

if what == "listen":
    threading.Thread(target=answer, args=[listen()], daemon=True).start()
    ready()
    until = time.monotonic() + 20
    while not read and time.monotonic() < until:
        time.sleep(0.01)
elif what == "plant":
    with os.fdopen(os.open(words[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(words[1])
    ready()
elif what == "link":
    os.symlink(words[1], words[0])
    ready()
elif what == "flood":
    held = [connect() for _ in range(100)]
    for each in held[::2]:
        each.sendall(b"meshwise 1\\n")
    ready()
elif what == "repeat":  # pass on what a rank says to the door, and then say it again
    server, said = listen(), b""
    print("ready", flush=True)
    rank, door = server.accept()[0], connect()
    threading.Thread(target=back, args=[door, rank], daemon=True).start()
    while part := rank.recv(65536):
        said += part
        door.sendall(part)
    assert said
    again = connect()
    again.sendall(said)
    try:
        while part := again.recv(65536):
            read += part
    except ConnectionError:
        pass
print(read.hex(), flush=True)
"""


class Attacker:
    """A process of another user that does one thing, until it is asked what it has read."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-I", "-S", "-c", ATTACKER, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def read(self) -> bytes:
        out, _ = self.process.communicate(timeout=30)
        return bytes.fromhex(out.strip())


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write into, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.fixture
def place() -> Place:
    """A start whose first ports nobody has."""
    for number in range(100):
        found = replace(HERE, key=f"{HERE.key}-{number}")
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in rendezvous._ports(found.key)[:2]:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found
    raise AssertionError("no free port")


def file_of(place: Place, folder: Path) -> Path:
    return folder / f"{PREFIX}{os.geteuid()}-{place.key}.json"


def find(place: Place, rank: int, folder: Path) -> tuple[str, int]:
    return rendezvous.find_door(replace(place, rank=rank), folder, 30.0)


OF_OLD = b'{"key": "%s", "port": 1}\n'
OF_NOW = HELLO + bytes(NONCE + CODE)


@pytest.mark.parametrize("answer", [OF_OLD, OF_NOW, b""], ids=["of old", "of now", "silent"])
@pytest.mark.parametrize("given", [True, False])
def test_a_listener_that_came_first_learns_nothing_and_is_not_believed(
    answer: bytes, given: bool, place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER", 0.3)
    if given:
        monkeypatch.setenv(VARIABLE, GIVEN)
    attacker = Attacker("listen", rendezvous._ports(place.key)[0], answer.replace(b"%s", place.key.encode()).hex())
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(find, place, rank, shared) for rank in (1, 2)]
        secret = rendezvous.open_door(place, STORE, shared)
        assert [rank.result() for rank in ranks] == [("127.0.0.1", STORE)] * 2
    with contextlib.suppress(Unproven):  # where none has come by: the file told where rank 0 is
        rendezvous._ask("127.0.0.1", rendezvous._ports(place.key)[0], secret.value, b"{}")
    heard = attacker.read()
    assert heard.startswith(HELLO) and len(heard) % ASKS == 0  # questions, and no proof


@pytest.mark.parametrize("how", ["plant", "link"])
def test_a_planted_file_is_refused_by_all(
    how: str, place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(place, shared)
    if how == "link":
        Attacker("plant", shared / "mine", PLANTED).read()
        Attacker("link", path, "mine").read()
    else:
        Attacker("plant", path, PLANTED).read()
    private = f"is not a file of mode 100600 that belongs to user 0 alone (owner {NOBODY}, mode 100600, 1 links)"
    why = "cannot be opened (Too many levels of symbolic links)" if how == "link" else private
    for given in (False, True):
        if given:
            monkeypatch.setenv(VARIABLE, GIVEN)
        for meets in (lambda: rendezvous.open_door(place, STORE, shared), lambda: find(place, 1, shared)):
            with pytest.raises(UsageError, match=f"{re.escape(why)}, so it is not used. Remove the file, start in"):
                meets()


def test_what_a_rank_has_said_is_worth_nothing_when_it_is_repeated(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, GIVEN)
    first, second, *_ = rendezvous._ports(place.key)
    attacker = Attacker("repeat", first, second)
    rendezvous.open_door(place, STORE, tmp_path / "of rank 0")  # at the second port: the first is taken
    assert find(place, 1, tmp_path / "of rank 1") == ("127.0.0.1", STORE)
    # A proof of the door, and nothing else; not even that where its end is a reset, which takes what is not read yet.
    assert len(attacker.read()) <= ANSWERS
    assert find(place, 2, tmp_path / "of rank 2") == ("127.0.0.1", STORE)


def test_connections_that_are_held_keep_no_rank_out(place: Place, tmp_path: Path) -> None:
    rendezvous.open_door(place, STORE, tmp_path)
    attacker = Attacker("flood", rendezvous._ports(place.key)[0])
    assert [find(place, rank, tmp_path) for rank in (1, 2)] == [("127.0.0.1", STORE)] * 2
    attacker.read()


def test_connections_that_are_held_keep_no_machine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = "127.0.0.1", free_port()
    machines = [joined(address, 0, 2, 1)]
    attacker = Attacker("flood", address[1])
    machines.append(joined(address, 1, 2, 1))
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda machine: machine.meet(), machines))
        assert [nodes.first_rank for nodes in met] == [0, 1] and met[0].listener is not None
        met[0].listener.close()
        list(pool.map(lambda machine: machine.leave(0), machines))
    attacker.read()
    for machine in machines:
        machine.store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_says_that_who_listens_does_not_know_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_options, "STRANGERS", 0.1)
    port = free_port()
    attacker = Attacker("listen", port, OF_NOW.hex())
    with pytest.raises(UsageError, match=rf"--rdzv 127.0.0.1:{port}: the process there does not know the secret that"):
        joined(("127.0.0.1", port), 1, 2, 1)
    heard = attacker.read()
    assert heard.startswith(HELLO) and len(heard) % ASKS == 0
