"""Choose the TCP ports at which processes of a run listen."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
from typing import Any

LISTENING_PORTS = range(20_000, 32_768)
"""Ports to listen at. Ports of outgoing connections are higher on Linux: 32768 to 60999 (ip_local_port_range)."""


def listening(host: str = "", port: int = 0) -> socket.socket:
    """Return a socket that listens at a TCP port. host: "" for all addresses. port: 0 for any free port."""
    every: dict[str, Any] = {"family": socket.AF_INET6} if ":" in host else {}
    if not host and socket.has_dualstack_ipv6():
        every = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    if port:
        return socket.create_server((host, port), backlog=512, **every)
    for free in (*random.SystemRandom().sample(LISTENING_PORTS, 100), 0):
        with contextlib.suppress(OSError):
            return socket.create_server((host, free), backlog=512, **every)
    raise OSError("no TCP port is free on this machine")


def listening_as(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens where others reach this machine as `host`: only there if it is a loopback name."""
    return listening("::1" if host == "::1" else "127.0.0.1" if is_loopback(host) else "", port)


def port_of(start: str) -> int:
    """Return the port at which the processes of one start meet. Each process derives it from the name of the start,
    such as the number of a Slurm job."""
    digest = hashlib.sha256(start.encode()).digest()
    return LISTENING_PORTS[int.from_bytes(digest[:4], "big") % len(LISTENING_PORTS)]


def is_loopback(host: str) -> bool:
    """Check whether `host` is a loopback name, which only processes of this machine can reach."""
    return host in ("localhost", "::1") or host.startswith("127.")
