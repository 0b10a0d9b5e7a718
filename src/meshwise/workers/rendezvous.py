"""Where rank 0 is reached, when no launcher says it: rank 0 opens a door, and the others look for it.

The door is a port at which rank 0 tells its own ranks, and nobody else, the port of the store. It is written down in a
folder, with every address of the machine: what the others share, they read. Where they share none, they try the first
host and the ports that follow from job, step and attempt. A door says whose it is, so that two steps of one job, two
users and two attempts never meet; and it lets each rank in once, so that nobody meets what is about to end.

A door speaks one line of JSON each way over plain sockets: a client of a torch store waits for ever at a port where
another program listens. Tested in tests/workers/test_rendezvous.py.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from meshwise.records.files import write_text
from meshwise.spec.errors import UsageError
from meshwise.workers.channel import LISTENING_PORTS, listening
from meshwise.workers.launchers.place import Place

TIMEOUT = 600.0  # seconds for rank 0 to open its door
PORTS = 8  # that follow from the key
PATIENCE = 20.0  # seconds after which a rank says what it waits for
REACH, ANSWER = 2.0, 5.0  # seconds for a connection, and for the line that answers
PREFIX = ".meshwise-rendezvous-"


def meet(place: Place, folder: Path | None = None) -> tuple[str, int]:
    """The host and the port of the store that all of this start use. On rank 0 the port is free until it takes what
    listens there, by `taken`. folder: the one that the others read too; by default the current one.

    Raises UsageError where rank 0 is not found, or nothing tells the processes of this start from others.
    """
    folder = Path.cwd() if folder is None else folder
    if not place.key:
        raise UsageError(
            f"{place.launcher or 'the launcher'} does not say where rank 0 of {place.size} is. Set MASTER_ADDR to its "
            "host and MASTER_PORT to a free port there: mpirun -x MASTER_ADDR=n1 -x MASTER_PORT=29500."
        )
    if place.rank > 0:
        return find_door(place, folder)
    server = listening("127.0.0.1" if place.nodes == 1 else "")
    port = int(server.getsockname()[1])
    _listening_at[port] = server
    open_door(place, port, folder)
    return next((address for address in _addresses(place) if _reaches(address, port)), "127.0.0.1"), port


_listening_at: dict[int, socket.socket] = {}


def taken(port: int) -> int | None:
    """The descriptor of the socket that `meet` has listening at this port; it is the caller's from now on."""
    server = _listening_at.pop(port, None)
    return None if server is None else server.detach()


def _reaches(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=REACH):
        return True
    return False


def open_door(place: Place, port: int, folder: Path) -> None:
    """On rank 0: tell the others of this start that the store listens at `port` here; until each of them has asked."""
    server = _listening(place.key)
    told = json.dumps({"port": server.getsockname()[1], "addresses": _addresses(place)})
    path = _path(place, folder)
    with contextlib.suppress(OSError):  # a folder that cannot be written: the ports that follow from the key are left
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, told + "\n")
    atexit.register(path.unlink, missing_ok=True)
    threading.Thread(target=_answer, args=(server, place, port, path), name="meshwise-door", daemon=True).start()


def find_door(place: Place, folder: Path, timeout: float = TIMEOUT) -> tuple[str, int]:
    """On another rank: the host and the port of the store. Raises UsageError where rank 0 is not found in time."""
    began, mine, path = time.monotonic(), uuid.uuid4().hex, _path(place, folder)
    host = place.hosts[0] if place.hosts else "no host that is known"
    tried = f"no answer by {path}, nor at {host}, ports {', '.join(map(str, _ports(place.key)))}"
    question = json.dumps({"key": place.key, "rank": place.rank, "who": mine}).encode() + b"\n"
    said = False
    while (waited := time.monotonic() - began) < timeout:
        if waited > PATIENCE and not said:
            print(f"rank {place.rank} of {place.size} waits for rank 0: {tried}", file=sys.stderr, flush=True)
            said = True
        for address, port in _doors(place, path):
            answer = _ask(address, port, question)
            if answer.get("key") == place.key and "port" in answer:
                return address, int(answer["port"])
        time.sleep(0.1)
    raise UsageError(
        f"rank {place.rank} of {place.size} did not find rank 0 within {timeout:.0f} s: {tried}. See whether it has "
        "started, start it in a folder that all machines share, or set MASTER_ADDR and MASTER_PORT."
    )


def _listening(key: str) -> socket.socket:
    every = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    for port in _ports(key):
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=512, **every)  # type: ignore[arg-type]
    return listening()


def _answer(server: socket.socket, place: Place, port: int, path: Path) -> None:
    let_in: dict[int, str] = {}
    with server, contextlib.suppress(OSError):
        while len(let_in) < place.size - 1:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(ANSWER)
                asked = json.loads(_line(connection))
                if asked["key"] == place.key and let_in.setdefault(int(asked["rank"]), asked["who"]) == asked["who"]:
                    connection.sendall(json.dumps({"key": place.key, "port": port}).encode() + b"\n")
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _ask(address: str, port: int, question: bytes) -> dict[str, Any]:
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((address, port), timeout=REACH) as connection,
    ):
        connection.settimeout(ANSWER)
        connection.sendall(question)
        answer = json.loads(_line(connection))
        return answer if isinstance(answer, dict) else {}
    return {}


def _line(connection: socket.socket) -> bytes:
    """One line, which ends within ANSWER seconds and 4 kB, or ValueError."""
    until, line = time.monotonic() + ANSWER, b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        line += part
        if not part or len(line) > 4096 or time.monotonic() > until:
            raise ValueError("no line")
    return line


def _doors(place: Place, path: Path) -> Iterator[tuple[str, int]]:
    """Where to ask: what is written down, then what follows from the key."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_text(encoding="utf-8"))
        yield from [(str(address), int(told["port"])) for address in told["addresses"]]
    if place.hosts or place.nodes == 1:
        yield from [(place.hosts[0] if place.nodes > 1 else "127.0.0.1", port) for port in _ports(place.key)]


def _ports(key: str) -> list[int]:
    """Ports below those that outgoing connections take, the same on all machines."""
    digest = hashlib.sha256(key.encode()).digest()
    numbers = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * PORTS, 4)]
    return [LISTENING_PORTS[number % len(LISTENING_PORTS)] for number in numbers]


def _addresses(place: Place) -> list[str]:
    """The names and addresses at which another machine may reach this one; on one machine, itself."""
    if place.nodes == 1:
        return ["127.0.0.1"]
    known = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    found = [each.address for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
    outside = [address for address in found if not address.startswith(("127.", "::1", "fe80:"))]
    return list(dict.fromkeys([*place.hosts[:1], socket.gethostname(), *outside]))


def _path(place: Place, folder: Path) -> Path:
    return folder / (PREFIX + re.sub(r"[^.\w-]", "_", f"{os.getuid()}-{place.key}") + ".json")
