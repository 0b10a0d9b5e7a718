"""Choose the network interface by which ranks of several machines communicate.

By default, gloo takes the wrong interface on many machines.

gloo listens at the address to which the machine's own name resolves. On many machines that is a loopback address
(Debian writes 127.0.1.1 into /etc/hosts), or there is none: other machines then cannot reach the rank, and wait.
Tested in tests/workers/test_interface.py and, on machines without names, in tests/workers/test_slurm.py.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

ANYWHERE = "192.0.2.1"
"""A reserved address that no host has. The route to it shows by which interface packets leave this machine."""


def interface_towards(host: str) -> str | None:
    """Return the network interface that gloo must use to reach `host`, such as `eth0`."""
    own: dict[str, str] = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address.address)
    }
    if any(address in own for address in _addresses_of(socket.gethostname())):
        return None
    for target in (host, ANYWHERE):
        if (found := own.get(_source_of(target))) is not None:
            return found
    up = psutil.net_if_stats()
    return next((name for name in own.values() if name in up and up[name].isup), None)


def _addresses_of(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None)]
    return []


def _source_of(host: str) -> str:
    """Return the address from which this machine would send a packet to `host`, without sending one."""
    for address in _addresses_of(host)[:1]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_loopback or found.is_link_local
