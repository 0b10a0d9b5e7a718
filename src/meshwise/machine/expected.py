"""Compute expected figures of links: nominal figure × share once reached.

The nominal figure is that of the parts at their full generation and width, whatever was found.

Tested in tests/rehearsal/test_collective_price.py.
"""

from __future__ import annotations

from meshwise.machine.catalog import nominal_rate, part, reached
from meshwise.spec.machine import DEVICE, HOST, NODE, Link, Machine


def nominal_of(link: Link) -> tuple[float | None, int | None]:
    """Return (bytes/s one way, generation) that the parts at both ends of a link support, even if the link was found
    slower. None if unknown."""
    rate = link.bandwidth or nominal_rate(link.kind, link.full_generation, link.full_width)
    return rate, link.full_generation


def expected_collective(machine: Machine, kind: str, ranks: int) -> tuple[float | None, float | None]:
    """Return the bus bandwidth that a collective on one host should reach, and its nominal bandwidth, in bytes/s. The
    devices form a ring, and the slowest link of the ring limits the rate. The result is the nominal rate of this link,
    times the share of the nominal rate that was reached in the catalog's measurements. None if unknown.

    kind: the collective, such as `all-reduce`.
    """
    on_one_host = sum(device.host == 0 for device in machine.devices)
    found = [
        (*_ring(machine, link, ranks), link.kind)
        for link in machine.links
        if HOST not in (link.source, link.target) and not link.source.startswith(NODE) and link.kind != "process"
    ]
    rates = [(rate, generation, link) for rate, generation, link in found if rate is not None]
    if not rates or len(rates) < len(found) or not 1 < ranks <= on_one_host:
        return None, None
    rate, generation, link = min(rates, key=lambda known: known[0])
    share = reached(link, generation, kind) or reached(link, generation, "all-reduce")
    return None if share is None else rate * share, rate


def _ring(machine: Machine, link: Link, ranks: int) -> tuple[float | None, int | None]:
    """Return (bytes/s, generation) of a ring over such links. In a mesh, several rings run at once."""
    rate, generation = nominal_of(link)
    names = {device.part for device in machine.devices if link.source in (device.name, DEVICE)}
    end = part(names.pop()) if len(names) == 1 else None
    own = None if end is None else end.link_of(link.kind)
    if own is not None and own.mesh:
        return min(own.bandwidth, own.pair * max(ranks - 1, link.width or 1)), generation
    return rate, generation
