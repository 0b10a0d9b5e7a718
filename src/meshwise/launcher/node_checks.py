"""Exchange what nodes tell of themselves, and try every connection.

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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher.node_verdict import judge
from meshwise.workers.places.place import Place

REACH = 3.0
"""Seconds for a connection from one node to another, and for a new file to appear."""
ANSWER = 8.0
"""Seconds to wait for the reports of the others, once node 0 has made its own."""
TRIES, TIME = 5, 20  # how often a node is asked for its time, and the bytes of the answer


@dataclass
class Exchange:
    """What came of an exchange. A thread writes it, and the main thread reads it.

    until: when this node waits no longer, in seconds of the monotonic clock.
    facts, findings: what all nodes are like, on node 0 alone.
    bad: whether node 0 found anything. None if it did not say.
    """

    until: float
    error: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    bad: bool | None = None


def compare(place: Place, mine: Mapping[str, Any], gloo: str, folder: Path, wait: float) -> Exchange:
    """Exchange reports with the other nodes. Return what came of it, at most 2 * ANSWER seconds after all nodes have
    come, or `wait` is over.

    place: this node, and in `address` where node 0 serves the store.
    mine: what this node tells of itself (see `judge`).
    gloo: the address at which gloo listens on this node.
    folder: the folder that all nodes should see.
    wait: the seconds to wait until all nodes have come.
    """
    exchange, over = Exchange(time.monotonic() + wait + ANSWER), threading.Event()
    token = folder / f".meshwise-doctor-{uuid.uuid4().hex}"

    def meet() -> None:
        try:
            _exchange(exchange, place, mine, _own_address(gloo, place), token, wait)
        except Exception as error:  # of the store, of its port, or of a value that is none of ours
            exchange.error = (str(error).splitlines() or [type(error).__name__])[0]
        over.set()

    if place.node == 0:
        with contextlib.suppress(OSError):  # then no node sees it
            token.touch()
    threading.Thread(target=meet, daemon=True).start()
    while not over.wait(0.1) and time.monotonic() < exchange.until:
        pass
    if place.node == 0:
        token.unlink(missing_ok=True)
    return exchange


def _exchange(
    exchange: Exchange, place: Place, mine: Mapping[str, Any], address: str, token: Path, wait: float
) -> None:
    import torch.distributed as dist

    host, port = place.address or ("", 0)
    name, limit = str(place.node), timedelta(seconds=wait + ANSWER)
    server = dist.TCPStore(host, port, None, place.node == 0, limit, False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"doctor/{place.key}", server)  # type: ignore[attr-defined]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    clock = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)
    threading.Thread(target=_tell_time, args=(clock,), daemon=True).start()
    store.set(f"at/{name}", json.dumps([address or host, clock.getsockname()[1], token.name]))
    if place.node == 0:
        store.set("came", json.dumps(_there(store, "at", range(place.nodes), wait)))
    came = json.loads(store.get("came"))
    exchange.until = time.monotonic() + 2 * ANSWER
    peers = {node: json.loads(store.get(f"at/{node}")) for node in came}
    others = [node for node in came if node != place.node]
    with ThreadPoolExecutor(32) as pool:
        seen = pool.submit(_appears, token.with_name(peers[0][2]))
        ways = pool.map(lambda node: probe(*peers[node][:2]), others)
        report = {**mine, "reached": dict(zip(others, ways, strict=True)), "shared": seen.result()}
    store.set(f"report/{name}", json.dumps(report))
    if place.node == 0:
        told = _there(store, "report", came, ANSWER)
        reports = {node: json.loads(store.get(f"report/{node}")) for node in told}
        exchange.facts, exchange.findings = judge(place, reports, came)
        store.set("bad", json.dumps(bool(exchange.findings)))
        _there(store, "left", told[1:], REACH)  # the store ends with this process
    exchange.bad = bool(json.loads(store.get("bad")))
    store.set(f"left/{name}", "")


def _there(store: Any, what: str, nodes: Iterable[int], limit: float) -> list[int]:
    """Return the nodes that set a key within `limit` seconds."""
    missing, there, until = {*nodes}, set[int](), time.monotonic() + limit
    while missing and time.monotonic() < until:
        there |= {node for node in missing if store.check([f"{what}/{node}"])}
        missing -= there
        time.sleep(0.02)
    return sorted(there)


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
    """Connect to another node. Return the `seconds` until it answers and how many seconds its clock is `ahead`, or the
    `error`."""
    try:
        seconds, ahead = min(_ask_time(address, port) for _ in range(TRIES))
    except (OSError, ValueError) as error:
        return {"error": f"{address} {getattr(error, 'strerror', None) or error}".lower()}
    return {"seconds": seconds, "ahead": ahead}


def _ask_time(address: str, port: int) -> tuple[float, float]:
    asked, began = time.time(), time.monotonic()
    with socket.create_connection((address, port), timeout=REACH) as connection:
        there = float(connection.recv(TIME, socket.MSG_WAITALL))
    seconds = time.monotonic() - began
    return seconds, there - asked - seconds / 2


def _appears(path: Path) -> bool:
    """Return whether a file is there. A network disk may show it late."""
    until = time.monotonic() + REACH
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return path.exists()
