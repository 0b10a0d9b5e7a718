"""Find rank 0 without a launcher's help.

Rank 0 listens, and the other ranks look for it.

The door is a port at which rank 0 tells the store's port to its own ranks, and to no other process. Rank 0 writes the
door's port, with every address of its machine, into the file of the start's secret. Ranks that share this file read it;
others try the first host, at ports derived from job, step and attempt. Both ends prove the secret of the start, so two
steps of one job, two users or two attempts never meet, and a foreign process that took a port first is noticed. A door
lets each rank in once, so that no rank meets a run that is about to end.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from meshwise.spec.errors import UsageError
from meshwise.workers.channel import LISTENING_PORTS, listening
from meshwise.workers.handshake import Doorkeeper, Line, Unproven, enter
from meshwise.workers.place import Place
from meshwise.workers.secret import SET_ONE, Secret, secret_of

TIMEOUT = 600.0  # seconds for rank 0 to begin to listen
PORTS = 8  # number of ports to try, derived from job, step and attempt
PATIENCE = 20.0  # seconds after which a rank says what it waits for
STRANGERS = 60.0  # seconds to keep trying if a process answers that does not know the secret
REACH, ANSWER = 2.0, 5.0  # seconds for a connection, and for a proof or a message
PURPOSE = "rendezvous"


def meet(place: Place, folder: Path | None = None) -> tuple[str, int]:
    """Return the host and the port at which the processes of this run meet.

    Rank 0 chooses the port, and the other ranks ask rank 0 for it. On rank 0, this process keeps the port open until
    the store takes it over by `taken`.

    folder: a folder that all ranks can read. By default, the current folder.

    Raises UsageError if rank 0 is not found, or if `place.key` is empty.
    """
    if not place.key:
        raise UsageError(
            f"{place.launcher or 'the launcher'} does not say where rank 0 of {place.size} is. Set MASTER_ADDR to its "
            "host and MASTER_PORT to a free port there: mpirun -x MASTER_ADDR=n1 -x MASTER_PORT=29500."
        )
    folder = folder or _folder(alone=place.nodes == 1)
    if place.rank > 0:
        return find_door(place, folder)
    server = listening(listens_at(alone=place.nodes == 1))
    port = int(server.getsockname()[1])
    _listening_at[port] = server
    secret = open_door(place, port, folder)
    found = next((address for address in _addresses(place) if _reaches(address, port)), "127.0.0.1"), port
    _secrets[found] = secret
    return found


_listening_at: dict[int, socket.socket] = {}
_secrets: dict[tuple[str, int], Secret] = {}


def taken(port: int) -> int | None:
    """Return the file descriptor of the socket that `meet` opened at this port, or None if there is no such socket."""
    server = _listening_at.pop(port, None)
    return None if server is None else server.detach()


def secret_at(where: tuple[str, int]) -> Secret:
    """Return the secret that is shared by all processes which meet at this host and port."""
    return _secrets.get(where) or secret_of(f"{where[0]}:{where[1]}", _folder(alone=is_here(where[0])))


def is_here(host: str) -> bool:
    """Check whether `host` is a loopback name, which only processes of this machine can reach."""
    return host in ("localhost", "127.0.0.1")


def listens_at(*, alone: bool) -> str:
    """Return the address to listen at: loopback if `alone`, else all addresses."""
    return "127.0.0.1" if alone else ""


def _folder(*, alone: bool) -> Path:
    """Return the folder in which processes that were started together share a file."""
    here = Path.cwd()
    return Path(tempfile.gettempdir()) if alone and not os.access(here, os.W_OK) else here


def _reaches(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=REACH):
        return True
    return False


def open_door(place: Place, port: int, folder: Path) -> Secret:
    """On rank 0, start threads that tell the other ranks the port at which they meet.
    Return the start's secret."""
    secret = secret_of(place.key, folder)
    let_in, answered = dict[int, str](), set[int]()

    def answer(line: Line) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            line.connection.settimeout(ANSWER)
            asked = json.loads(line.receive())
            rank = int(asked["rank"])
            if let_in.setdefault(rank, asked["who"]) == asked["who"]:
                line.send(json.dumps({"port": port}).encode())
                if line.receive():
                    answered.add(rank)
        if len(answered) < place.size - 1:
            return False
        secret.remove()
        return True

    server = _listening(place)
    with contextlib.suppress(OSError):  # if the file is unwritable, ranks still try the derived ports
        secret.tell(port=server.getsockname()[1], addresses=_addresses(place))
    atexit.register(secret.remove)
    Doorkeeper(server, secret.value, PURPOSE, answer)
    return secret


def find_door(place: Place, folder: Path, timeout: float = TIMEOUT) -> tuple[str, int]:
    """On a rank other than 0, find the host and the port of the store."""
    began, since, said = time.monotonic(), math.inf, False
    question = json.dumps({"rank": place.rank, "who": uuid.uuid4().hex}).encode()
    while True:
        secret, waited = secret_of(place.key, folder), time.monotonic() - began
        stranger = ""
        for address, port in _doors(place, secret):
            try:
                answer = _ask(address, port, secret.value, question)
            except Unproven:
                stranger = f"{address}:{port}"
                continue
            if "port" in answer:
                found = address, int(answer["port"])
                _secrets[found] = secret
                return found
        tried, since = _tried(place, secret, stranger), min(since, waited) if stranger else math.inf
        if waited > PATIENCE and not said:
            print(f"rank {place.rank} of {place.size} waits for rank 0: {tried}", file=sys.stderr, flush=True)
            said = True
        if waited > min(timeout, since + STRANGERS):
            break
        time.sleep(0.1)
    raise UsageError(
        f"rank {place.rank} of {place.size} did not find rank 0 within {waited:.0f} s: {tried}. Check that rank 0 "
        f"runs. Then start every rank in a folder that machines share, {SET_ONE}, or set MASTER_ADDR and MASTER_PORT."
    )


def _tried(place: Place, secret: Secret, stranger: str) -> str:
    """Return a phrase for an error: in which file and at which addresses this rank has looked for rank 0."""
    host = place.hosts[0] if place.hosts else "any known host"
    ports = ", ".join(map(str, _ports(place.key)))
    strange = f"; the process at {stranger} does not know the secret of this run" if stranger else ""
    return f"no answer through {secret.path}, nor from {host}, ports {ports}{strange}"


def _listening(place: Place) -> socket.socket:
    host = listens_at(alone=place.nodes == 1)
    for port in _ports(place.key):
        with contextlib.suppress(OSError):
            return listening(host, port)
    return listening(host)


def _ask(address: str, port: int, secret: bytes, question: bytes) -> dict[str, Any]:
    """Ask the process at this address, and return its answer, or {} if there is none."""
    try:
        with socket.create_connection((address, port), timeout=REACH) as connection:
            line = enter(connection, secret, PURPOSE, ANSWER)
            connection.settimeout(ANSWER)
            line.send(question)
            answer = json.loads(line.receive() or b"{}")
            line.send(b"heard")  # rank 0 waits for this rank until this message comes
            return answer if isinstance(answer, dict) else {}
    except Unproven:
        raise
    except (OSError, ValueError):
        return {}


def _doors(place: Place, secret: Secret) -> Iterator[tuple[str, int]]:
    """Yield each host and port at which rank 0 may answer."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        yield from [(str(address), int(secret.told["port"])) for address in secret.told["addresses"]]
    if place.hosts or place.nodes == 1:
        yield from [(place.hosts[0] if place.nodes > 1 else "127.0.0.1", port) for port in _ports(place.key)]


def _ports(key: str) -> list[int]:
    """Derive PORTS ports from `Place.key`."""
    digest = hashlib.sha256(key.encode()).digest()
    numbers = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * PORTS, 4)]
    return [LISTENING_PORTS[number % len(LISTENING_PORTS)] for number in numbers]


def _addresses(place: Place) -> list[str]:
    """Return the names and addresses at which other machines may reach this machine."""
    if place.nodes == 1:
        return ["127.0.0.1"]
    known = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    found = [each.address for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
    outside = [address for address in found if not address.startswith(("127.", "::1", "fe80:"))]
    return list(dict.fromkeys([*place.hosts[:1], socket.gethostname(), *outside]))
