"""Compare the nodes of a run: connections, folder, clocks, versions, program.

The nodes exchange JSON through torch's TCPStore on node 0. On a cut network its calls hang beyond their time-outs, so a
thread makes them all, and the main thread waits for a limited time. Who calls `compare` must end by `os._exit`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher.node_seat import Seat
from meshwise.launcher.node_verdict import judge

REACH = 3.0
"""Seconds for a connection from one node to another, and for a new file to appear."""
ANSWER = 4.0
"""Seconds to wait for the reports of the others, once this node has made its own."""
ENOUGH = 4 * REACH + ANSWER
"""Seconds from when all nodes have come to the end."""
PINGS, TIME = 5, 20  # how often a clock is asked, and the bytes of its answer
TOKEN = ".meshwise-doctor-{}"


@dataclass
class Meeting:
    """What came of an exchange. The thread writes it, and the main thread reads it.

    stage: what this node waits for, or waited for last.
    until: when this node waits no longer, in seconds of the monotonic clock.
    facts, findings: what all nodes are like, on node 0 alone.
    bad: whether node 0 found anything. None if it did not say.
    """

    stage: str
    until: float
    error: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    bad: bool | None = None


def compare(seat: Seat, mine: Mapping[str, Any], address: str, folder: Path) -> Meeting:
    """Exchange reports with the other nodes. Return what came of it, within ENOUGH seconds after all nodes
    have come, or `seat.wait` is over.

    mine: what this node tells of itself (see `judge`).
    address: where this node is reached, or an empty string if it is not known.
    folder: the folder that all nodes should see.
    """
    meeting, over = Meeting("node 0", time.monotonic() + seat.wait + ANSWER), threading.Event()

    def meet() -> None:
        try:
            _meet(meeting, seat, mine, address, folder)
        except Exception as error:  # of the store, of its port, or of a value that is none of ours
            meeting.error = (str(error).splitlines() or [type(error).__name__])[0]
        over.set()

    threading.Thread(target=meet, daemon=True).start()
    while not over.wait(0.1) and time.monotonic() < meeting.until:
        pass
    return meeting


def _meet(meeting: Meeting, seat: Seat, mine: Mapping[str, Any], address: str, folder: Path) -> None:
    import torch.distributed as dist

    limit, serves = timedelta(seconds=seat.wait + ANSWER), seat.node == 0
    server = dist.TCPStore(seat.host, seat.port, None, serves, limit, False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"doctor/{seat.key}", server)  # type: ignore[attr-defined]
    token = folder / TOKEN.format(uuid.uuid4().hex)
    if serves:
        with contextlib.suppress(OSError):  # then all say that they do not see it
            token.touch()
    try:
        _exchange(meeting, seat, store, {**mine, "token": token.name}, address, folder)
    finally:
        if serves:
            token.unlink(missing_ok=True)


def _exchange(meeting: Meeting, seat: Seat, store: Any, mine: Mapping[str, Any], address: str, folder: Path) -> None:
    name, everyone = str(seat.node), [str(node) for node in range(seat.nodes)]
    meeting.stage = "the other nodes"
    here = {"address": _outside(address, seat), "port": _serve_time(), "token": mine["token"]}
    store.set(f"at/{name}", json.dumps(here))
    if seat.node == 0:
        store.set("came", json.dumps(_there(store, "at", everyone, seat.wait)))
    came = json.loads(store.get("came"))
    meeting.stage, meeting.until = "the verdict of node 0", time.monotonic() + ENOUGH
    peers = {node: json.loads(store.get(f"at/{node}")) for node in came}
    others = {node: at for node, at in peers.items() if node != name}
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda at: probe(at["address"] or seat.host, at["port"]), others.values())
    reached = dict(zip(others, answers, strict=True))
    shared = _appears(folder / Path(peers["0"]["token"]).name)
    store.set(f"report/{name}", json.dumps({**mine, "reached": reached, "shared": shared}))
    if seat.node == 0:
        told = _there(store, "report", came, ANSWER)
        reports = {int(node): json.loads(store.get(f"report/{node}")) for node in told}
        meeting.facts, meeting.findings = judge(seat, reports, [int(node) for node in came])
        store.set("bad", json.dumps(bool(meeting.findings)))
        store.set("left/0", "")
        _there(store, "left", told, REACH)  # the store ends with this process
    meeting.bad = bool(json.loads(store.get("bad")))
    store.set(f"left/{name}", "")


def _there(store: Any, what: str, nodes: Sequence[str], limit: float) -> list[str]:
    """Return the nodes that set a key within `limit` seconds."""
    there, until = set[str](), time.monotonic() + limit
    while len(there) < len(nodes) and time.monotonic() < until:
        there |= {node for node in nodes if node not in there and store.check([f"{what}/{node}"])}
        time.sleep(0.02)
    return [node for node in nodes if node in there]


def _outside(address: str, seat: Seat) -> str:
    """Return the address at which other nodes reach this node. It is empty where that is `seat.host`."""
    if address and not ipaddress.ip_address(address).is_loopback:
        return address
    if seat.node == 0:
        return ""
    family, _, _, _, target = socket.getaddrinfo(seat.host, seat.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)  # sends nothing
        return str(way.getsockname()[0])


def _serve_time() -> int:
    """Tell the time to whoever connects, in threads. Return the port."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(REACH)
            while connection.recv(1):
                connection.sendall(f"{time.time():{TIME}.6f}".encode())

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def probe(address: str, port: int) -> dict[str, Any]:
    """Connect to another node. Return the `seconds` of a round trip and how many seconds its clock is `ahead`, or the
    `error`."""
    try:
        with socket.create_connection((address, port), timeout=REACH) as connection:
            seconds, ahead = min(_ask_time(connection) for _ in range(PINGS))
    except (OSError, ValueError) as error:
        return {"error": f"{address} {getattr(error, 'strerror', None) or error}".lower()}
    return {"seconds": seconds, "ahead": ahead}


def _ask_time(connection: socket.socket) -> tuple[float, float]:
    asked, began = time.time(), time.monotonic()
    connection.sendall(b"?")
    there = float(connection.recv(TIME, socket.MSG_WAITALL))
    seconds = time.monotonic() - began
    return seconds, there - asked - seconds / 2


def _appears(path: Path) -> bool:
    """Return whether a file is there. A network disk may show it late."""
    until = time.monotonic() + REACH
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
