"""Exchange what nodes tell of themselves, and try every connection.

The nodes exchange what they tell as the launchers of a run do (workers/meeting.py). Who calls `compare` must end by
`os._exit`, since a call of the store may hang on a cut network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher.node_verdict import judge
from meshwise.workers.meeting import Meeting
from meshwise.workers.places.place import Place

REACH = 3.0
"""Seconds for a connection from one node to another, and for a new file to appear."""
ANSWER = 8.0
"""Seconds to wait for the reports of the others, once node 0 has made its own."""
TIME = 20  # the bytes in which a node tells its time


@dataclass(frozen=True)
class Compared:
    """What came of an exchange.

    error: why node 0 was not reached. Empty if it was.
    facts, findings: what all nodes are like, on node 0 alone.
    bad: whether node 0 found anything. None if it did not say.
    """

    error: str
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    bad: bool | None = None


def compare(place: Place, mine: Mapping[str, Any], gloo: str, folder: Path, wait: float) -> Compared:
    """Exchange reports with the other nodes. Return what came of it, at most 2 * ANSWER seconds after all nodes have
    come, or `wait` is over.

    place: this node, and in `address` where node 0 serves the store.
    mine: what this node tells of itself (see `judge`).
    gloo: the address at which gloo listens on this node.
    folder: the folder that all nodes should see.
    wait: the seconds to wait until all nodes have come.
    """
    meeting, token = Meeting(place, 1), folder / f".meshwise-doctor-{uuid.uuid4().hex}"
    try:
        if place.node == 0:
            with contextlib.suppress(OSError):  # then no node sees it
                token.touch()
        return _compared(meeting, mine, _own_address(gloo, place), token, wait)
    finally:
        if place.node == 0:
            token.unlink(missing_ok=True)
        meeting.leave()


def _compared(meeting: Meeting, mine: Mapping[str, Any], address: str, token: Path, wait: float) -> Compared:
    place, every = meeting.place, range(meeting.nodes)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    clock = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)
    threading.Thread(target=_tell_time, args=(clock,), daemon=True).start()
    meeting.set("at", [address or meeting.master, clock.getsockname()[1], token.name])
    if place.node == 0:
        meeting.set("came", _there(meeting, "at", every, wait))
    if not _there(meeting, "came", [0], wait + ANSWER):
        return Compared(meeting.error)
    came = meeting.said(0, "came")
    others = [node for node in came if node != place.node]
    with ThreadPoolExecutor(32) as pool:
        seen = pool.submit(_appears, token.with_name(meeting.said(0, "at")[2]))
        ways = pool.map(lambda node: probe(*meeting.said(node, "at")[:2]), others)
        report = {**mine, "reached": dict(zip(others, ways, strict=True)), "shared": seen.result()}
    meeting.set("report", report)
    if place.node:
        _there(meeting, "bad", [0], 2 * ANSWER)
        return Compared(meeting.error, bad=meeting.said(0, "bad"))
    told = _there(meeting, "report", came, ANSWER)
    facts, findings = judge(place, {node: meeting.said(node, "report") for node in told}, came)
    meeting.set("bad", bool(findings))
    return Compared("", facts, findings, bool(findings))


def _there(meeting: Meeting, what: str, nodes: Iterable[int], limit: float) -> list[int]:
    """Return the nodes that set a value within `limit` seconds."""
    until = time.monotonic() + limit
    with meeting.quick():
        while True:
            there = [node for node in nodes if meeting.said(node, what) is not None]
            if len(there) == len([*nodes]) or meeting.error or time.monotonic() > until:
                return there
            time.sleep(0.02)


def _own_address(gloo: str, place: Place) -> str:
    """Return the address at which others reach this node. It is empty on node 0 if it is where they reach the store."""
    if gloo and not ipaddress.ip_address(gloo).is_loopback:
        return gloo
    if place.node == 0 or place.address is None:
        return ""
    with socket.socket(type=socket.SOCK_DGRAM) as way:
        way.connect(place.address)  # sends nothing
        return str(way.getsockname()[0])


def _tell_time(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection:
            connection.sendall(f"{time.time():{TIME}.6f}".encode())


def probe(address: str, port: int) -> dict[str, Any]:
    """Connect to another node. Return how many seconds its clock is `ahead`, or the `error`."""
    asked = time.time()
    try:
        with socket.create_connection((address, port), timeout=REACH) as connection:
            there = float(connection.recv(TIME, socket.MSG_WAITALL))
    except (OSError, ValueError) as error:
        return {"error": f"{address} {getattr(error, 'strerror', None) or error}".lower()}
    return {"ahead": there - (asked + time.time()) / 2}


def _appears(path: Path) -> bool:
    """Return whether a file is there. A network disk may show it late."""
    until = time.monotonic() + REACH
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return path.exists()
