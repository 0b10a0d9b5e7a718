"""Compute expected figures of links: nominal figure × share once reached.

The nominal figure is that of the parts at their full generation and width, whatever was found.

Tested in tests/rehearsal/test_collective_price.py.
"""

from __future__ import annotations

from meshwise.machine.catalog import CatalogPart, nominal_rate, part, reached
from meshwise.spec.machine import DEVICE, HOST, NODE, Link, Machine, link_between


def host_nominal(machine: Machine, link: Link) -> tuple[float | None, int | None]:
    """Return (bytes/s one way, generation) of a link between the host and a device. The rate is the nominal rate that
    the device supports, even if the link was found slower. The rate or the generation is None if unknown."""
    device = part_at(machine, link.target if link.source == HOST else link.source)
    if device is not None and device.host_link is not None and device.host_link.kind == link.kind:
        return device.host_link.bandwidth, device.host_link.generation
    generation, width = link.full_generation, link.full_width
    if link.kind == "pcie" and generation and width:
        return nominal_rate("pcie", generation, width), generation
    return link.bandwidth, generation


def device_nominal(machine: Machine, link: Link) -> tuple[float | None, int | None]:
    """Return (bytes/s one way, generation) of a link between two devices. The rate is the nominal rate of the devices,
    or of the slower device if the models differ. It does not depend on the link's present state. The rate or the
    generation is None if unknown."""
    ends = [part_at(machine, link.source), part_at(machine, link.target)]
    own = [found for end in ends if end is not None and (found := end.link_of(link.kind)) is not None]
    if len(own) == 2:
        slower = min(own, key=lambda each: each.pair)
        return slower.pair * (link.width if slower.mesh and link.width else 1), slower.generation
    generation, width = link.full_generation, link.full_width
    if generation and width and link.kind in ("pcie", "nvlink"):
        return nominal_rate(link.kind, generation, width), generation
    if link.bandwidth is None and link.kind == "network":
        any_hosts = link_between(machine, NODE, NODE)
        if any_hosts is not None:
            return any_hosts.bandwidth, None
    return link.bandwidth, generation


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
    rates = [(nominal, generation, link) for nominal, generation, link in found if nominal is not None]
    if not rates or len(rates) < len(found) or not 1 < ranks <= on_one_host:
        return None, None
    nominal, generation, link = min(rates, key=lambda rate: rate[0])
    share = reached(link, generation, kind) or reached(link, generation, "all-reduce")
    return None if share is None else nominal * share, nominal


def _ring(machine: Machine, link: Link, ranks: int) -> tuple[float | None, int | None]:
    """Return (bytes/s one way, link generation) for a collective in a ring of `ranks` devices, which are connected by
    links such as `link`. If each device has direct links to several devices, several rings run at the same time, and
    their rates are summed. Where a switch joins all links, `link.width` counts them. The rate is None if unknown."""
    nominal, generation = device_nominal(machine, link)
    end = part_at(machine, link.source)
    own = None if end is None else end.link_of(link.kind)
    if own is not None and own.mesh:
        return min(own.bandwidth, own.pair * max(ranks - 1, link.width or 1)), generation
    return nominal, generation


def part_at(machine: Machine, end: str) -> CatalogPart | None:
    """Return the device model in the catalog at one end of a link. Returns None if the model is unknown.

    end: a device such as `cuda:0`, or `device`, which means any device of the machine. For `device`, the result is None
        if the devices are of different models.
    """
    names = {device.part for device in machine.devices if end in (device.name, DEVICE)}
    return part(names.pop()) if len(names) == 1 else None
