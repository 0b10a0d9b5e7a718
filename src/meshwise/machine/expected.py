"""Compute expected figures of links: nominal figure × share once reached.

The nominal figure is that of the parts at their full generation and width, whatever was found. Where a figure is not
known there is no expectation: None, with the reason in its origin.

Tested in tests/rehearsal/test_collective_price.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.machine.catalog import CatalogPart, PartLink, nominal_rate, part, reached
from meshwise.spec.bandwidth import FACTORS
from meshwise.spec.machine import DEVICE, HOST, NODE, Collective, Link, Machine, link_between
from meshwise.spec.units import bandwidth_text

Share = tuple[float, str] | None
"""(measured rate / nominal rate, where this ratio was measured), or None if unknown."""


@dataclass(frozen=True)
class Expected:
    """The rate that a collective should reach.

    rate: in bytes/s. None if unknown.
    nominal: the rate in the data sheet, or None if unknown.
    origin: the sources of the rates, or the reason why there is no expected rate.
    """

    rate: float | None
    nominal: float | None
    origin: str


def host_nominal(machine: Machine, link: Link) -> tuple[float | None, int | None, str]:
    """Return (bytes/s one way, generation, source of the rate) of a link between the host and a device. The rate is the
    nominal rate that the device supports, even if the link was found slower. The rate or the generation is None if
    unknown."""
    device = part_at(machine, link.target if link.source == HOST else link.source)
    if device is not None and device.host_link is not None and device.host_link.kind == link.kind:
        own = device.host_link
        return own.bandwidth, own.generation, f"{device.name}: {_named(own)}"
    generation, width = link.full_generation, link.full_width
    if link.kind == "pcie" and generation and width:
        rate = nominal_rate("pcie", generation, width)
        return rate, generation, f"PCIe {generation} x{width}, what the device reports it can do"
    return link.bandwidth, generation, link.origin or "the nominal bandwidth of the link"


def device_nominal(machine: Machine, link: Link) -> tuple[float | None, int | None, str]:
    """Return (bytes/s one way, generation, source of the rate) of a link between two devices. The rate is the nominal
    rate of the devices, or of the slower device if the models differ. It does not depend on the link's present state.
    The rate or the generation is None if unknown."""
    ends = [part_at(machine, link.source), part_at(machine, link.target)]
    own = [(found, end) for end in ends if end is not None and (found := end.link_of(link.kind)) is not None]
    if len(own) == 2:
        slower, end = min(own, key=lambda pair: pair[0].pair)
        if slower.mesh and link.width:
            return slower.pair * link.width, slower.generation, f"{end.name}: {link.width} of its {slower.width} links"
        return slower.pair, slower.generation, f"{end.name}: {_named(slower)}"
    generation, width = link.full_generation, link.full_width
    if generation and width and link.kind in ("pcie", "nvlink"):
        rate = nominal_rate(link.kind, generation, width)
        origin = f"{link.kind} generation {generation}, width {width}, what the devices report they can do"
        return rate, generation, origin
    if link.bandwidth is None and link.kind == "network":
        any_hosts = link_between(machine, NODE, NODE)
        if any_hosts is not None:
            return any_hosts.bandwidth, None, any_hosts.origin
    return link.bandwidth, generation, link.origin or "the nominal bandwidth of the link"


def expected_collective(machine: Machine, collective: Collective) -> Expected:
    """Return the bus bandwidth that a collective should reach. The devices form a ring, and the slowest link of the
    ring limits the rate. The result is the nominal rate of this link, times the share of the nominal rate that was
    reached in the catalog's measurements. If a nominal rate is unknown, no rate is expected."""
    if collective.kind not in FACTORS or collective.ranks < 2:
        return Expected(None, None, f"the expected rate of {collective.kind} is not known")
    on_one_host = sum(device.host == 0 for device in machine.devices)
    inside = [
        link
        for link in machine.links
        if HOST not in (link.source, link.target) and not link.source.startswith(NODE) and link.kind != "process"
    ]
    across = [link for link in machine.links if link.source.startswith(NODE) and link.target.startswith(NODE)]
    if collective.backend == "gloo" and not across:
        return Expected(None, None, "gloo between processes of one host has no expected rate")
    found = [_ring(machine, link, min(collective.ranks, on_one_host)) for link in inside]
    rates = [(nominal, link, generation, origin) for nominal, link, generation, origin in found if nominal is not None]
    if collective.ranks > on_one_host:
        rates += [(link.bandwidth, link, None, link.origin) for link in across if link.bandwidth is not None]
        if not any(link.bandwidth for link in across):
            return Expected(None, None, "the nominal bandwidth between the hosts is not known")
    if not rates or len(rates) < len(found):
        return Expected(None, None, "the nominal bandwidth between the devices is not known")
    nominal, link, generation, origin = min(rates, key=lambda rate: rate[0])
    share = reached(link.kind, generation, collective.kind)
    if share is None and (share := reached(link.kind, generation, "all-reduce")) is not None:
        share = (share[0], f"{share[1]} in all-reduce, none was measured of {collective.kind}")
    return _of_nominal(nominal, share, origin)


def _ring(machine: Machine, link: Link, ranks: int) -> tuple[float | None, Link, int | None, str]:
    """Return (bytes/s one way, link, link generation, source of the rate) for a collective in a ring of `ranks`
    devices, which are connected by links such as `link`. If each device has direct links to several devices, several
    rings run at the same time, and their rates are summed. Where a switch joins all links, `link.width` counts them.
    The rate is None if unknown."""
    nominal, generation, origin = device_nominal(machine, link)
    end = part_at(machine, link.source)
    own = None if end is None else end.link_of(link.kind)
    if own is not None and own.mesh:
        most = own.pair * max(ranks - 1, link.width or 1)
        return min(own.bandwidth, most), link, generation, f"{origin}, {ranks} ranks"
    return nominal, link, generation, origin


def part_at(machine: Machine, end: str) -> CatalogPart | None:
    """Return the device model in the catalog at one end of a link. Returns None if the model is unknown.

    end: a device such as `cuda:0`, or `device`, which means any device of the machine. For `device`, the result is None
        if the devices are of different models.
    """
    names = {device.part for device in machine.devices if end in (device.name, DEVICE)}
    return part(names.pop()) if len(names) == 1 else None


def _of_nominal(nominal: float | None, found: Share, origin: str) -> Expected:
    if nominal is None:
        return Expected(None, None, "the nominal figure is not known")
    if found is None:
        return Expected(None, nominal, f"{origin}; the share of it that can be reached is unknown")
    return Expected(nominal * found[0], nominal, f"{origin}; {found[1]}")


def _named(link: PartLink) -> str:
    """Format a link as `PCIe 5 x16, 63 GB/s (source)`."""
    words = {"pcie": "PCIe", "nvlink": "NVLink", "xgmi": "xGMI", "c2c": "C2C"}.get(link.kind, link.kind)
    number = f" {link.generation}" if link.generation else ""
    width = f" x{link.width}" if link.width else ""
    return f"{words}{number}{width}, {bandwidth_text(link.bandwidth)} ({link.origin})"
