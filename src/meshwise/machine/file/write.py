"""A machine as a small TOML file: what is equal is written once, figures with the units that people use.

Figures of a part stand once under `[part.NAME]`, those that one device alone has at the device. Read back by
machine_file.machine_from_toml, it gives the same machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from meshwise.machine.catalog import part
from meshwise.machine.file.checks import UNKNOWN
from meshwise.machine.file.toml_text import Value, key_text, table_text
from meshwise.spec.machine import HOST, Collective, Device, Host, Link, Machine
from meshwise.spec.quantity import write_quantity
from meshwise.spec.timings import Timings

HEADER = """\
# A machine, as meshwise measured or described it. May be edited: every figure has its unit, a figure that is left out
# is the catalog's, "unknown" is a figure that nobody knows. `meshwise devices` and `meshwise bench` write such files.
"""
FIGURES = ("memory", "memory_bandwidth", "peak", "achievable", "origins")
"""Fields of a device that its part has too."""
Pairs = dict[str, Value]


def machine_to_toml(machine: Machine) -> str:
    """The machine as TOML. Figures are written exactly, so that reading gives the same machine."""
    top: Pairs = {"name": machine.name}
    if machine.measured:
        top["measured"] = machine.measured
    if machine.warnings:
        top["warnings"] = list(machine.warnings)
    links = sorted(machine.links, key=link_order)
    if list(machine.links) != links:
        top["links_as_written"] = True
    plain_hosts = machine.hosts == (Host(),) * (max((device.host for device in machine.devices), default=0) + 1)
    for name, things in (("host", machine.hosts), ("device", machine.devices), ("link", machine.links)):
        if not things:
            top[name] = []
    parts = {device.part: device for device in reversed(machine.devices)}
    texts = [HEADER + table_text("", top)]
    if machine.versions:
        texts.append(table_text("[versions]", dict(machine.versions)))
    texts += [table_text("[[host]]", pairs) for pairs in (() if plain_hosts else _hosts(machine.hosts))]
    for name in dict.fromkeys(device.part for device in machine.devices):
        figures, origins = _part_figures(parts[name]), dict(parts[name].origins)
        if figures or origins:  # a figure without an origin would be the file's own
            texts.append(table_text(f"[part.{key_text(name)}]", figures if origins else {**figures, "origins": {}}))
            if origins:
                texts.append(table_text(f"[part.{key_text(name)}.origins]", origins))
    texts += [table_text("[[device]]", pairs) for pairs in _devices(machine.devices, parts)]
    texts += _links(machine.links, as_written="links_as_written" in top)
    texts += [_collective(collective) for collective in machine.collectives]
    return "\n".join(texts)


def link_order(link: Link) -> tuple[Any, ...]:
    """Links in the order of a file: each device's to the host and back, then from device to device, by number."""
    if HOST in (link.source, link.target):
        return (0, _natural(link.target if link.source == HOST else link.source), link.source != HOST)
    return (1, _natural(link.source), _natural(link.target))


def _natural(end: str) -> tuple[Any, ...]:
    name, _, number = end.partition(":")
    digits = re.search(r"\d+$", name)
    index = int(number) if number.isascii() and number.isdigit() and len(number) < 9 else -1
    host = int(digits[0][:9]) if digits and digits[0].isascii() else -1
    return (name.rstrip("0123456789"), host, index, end)


# ---- Hosts and devices -----------------------------------------------------------------------------------------------


def _hosts(hosts: Sequence[Host]) -> list[Pairs]:
    found = []
    for host, equal in groupby(hosts):
        pairs: Pairs = {}
        count = len(list(equal))
        if count > 1:
            pairs["count"] = count
        for name in ("name", "processor"):
            if getattr(host, name):
                pairs[name] = getattr(host, name)
        for name in ("cores", "cores_present", "sockets", "numa_nodes"):
            if getattr(host, name) is not None:
                pairs[name] = getattr(host, name)
        for name in ("memory", "memory_present"):
            if getattr(host, name) is not None:
                pairs[name] = write_quantity(getattr(host, name), "bytes")
        if host.limits:
            pairs["limits"] = {
                key: int(limit) if float(limit).is_integer() else limit for key, limit in host.limits.items()
            }
        found.append(pairs)
    return found


def _part_figures(device: Device) -> Pairs:
    """What the devices of a part have in common: the figures of the first of them, beside the catalog's."""
    known = part(device.part)
    pairs: Pairs = {} if known is not None else {"memory": UNKNOWN}
    for name in FIGURES[:-1]:
        value = getattr(device, name)
        if value or (known is not None and getattr(known, name)):
            pairs[name] = _figure(name, value)
    return pairs


def _figure(name: str, value: Any) -> Value:
    if value is None:
        return UNKNOWN
    if name == "memory":
        return write_quantity(value, "bytes")
    if name == "memory_bandwidth":
        return write_quantity(value, "bytes/s")
    if name == "peak":
        return {dtype: write_quantity(rate, "FLOP/s") for dtype, rate in value.items()}
    return dict(value)


def _devices(devices: Sequence[Device], parts: Mapping[str, Device]) -> list[Pairs]:
    """Devices, those that follow each other and differ in name, place and host only in one table."""
    found: list[Pairs] = []
    at = 0
    while at < len(devices):
        run = _run(devices, at)
        hosts = 1
        while run > 0 and _same_again(devices, at, run, hosts):
            hosts += 1
        found.append(_device(devices[at : at + run], hosts, parts[devices[at].part]))
        at += run * hosts
    return found


def _run(devices: Sequence[Device], at: int) -> int:
    """How many devices from `at` on count up and are equal but for their place."""
    first, count = devices[at], 1
    kind, _, index = first.name.partition(":")
    if not re.fullmatch(r"0|[1-9]\d{0,7}", index, re.ASCII):
        return 1
    while at + count < len(devices):
        device = devices[at + count]
        name = f"{kind}:{int(index) + count}"
        if replace(device, numa=first.numa, pci=first.pci) != replace(first, name=name) or (
            (device.numa is None) != (first.numa is None)
        ):
            break
        count += 1
    return count


def _same_again(devices: Sequence[Device], at: int, run: int, hosts: int) -> bool:
    """Whether the next host has the same run of devices again."""
    again = devices[at + run * hosts : at + run * (hosts + 1)]
    wanted = [replace(device, host=device.host + hosts) for device in devices[at : at + run]]
    return list(again) == wanted


def _device(run: Sequence[Device], hosts: int, common: Device) -> Pairs:
    first = run[0]
    pairs: Pairs = {"name": first.name, "part": first.part}
    if len(run) > 1:
        pairs["count"] = len(run)
    if first.host:
        pairs["host"] = first.host
    if hosts > 1:
        pairs["hosts"] = hosts
    different = [name for name in FIGURES if getattr(first, name) != getattr(common, name)]
    for name in [*different, "origins"] if different else ():
        pairs[name] = _figure(name, getattr(first, name))
    if first.memory_rate is not None:
        pairs["memory_rate"] = write_quantity(first.memory_rate, "bytes/s")
    if first.launch is not None:
        pairs["launch"] = write_quantity(first.launch, "seconds")
    if first.numa is not None:
        pairs["numa"] = _one_or_each([device.numa for device in run])
    if any(device.pci for device in run):
        pairs["pci"] = _one_or_each([device.pci for device in run])
    if first.matmuls:
        pairs["matmuls"] = [
            {"dtype": p.dtype, "m": p.m, "n": p.n, "k": p.k, "seconds": p.seconds} for p in first.matmuls
        ]
    return pairs


def _one_or_each(values: list[Any]) -> Value:
    return values[0] if len(set(values)) == 1 else values


# ---- Links and collectives -------------------------------------------------------------------------------------------


def _links(links: Sequence[Link], as_written: bool) -> list[str]:
    """Links with equal facts in one table: those that follow each other, or all where their order is the file's."""
    groups: list[list[Link]] = []
    for link in links:
        candidates = groups[-1:] if as_written else groups
        same = next((group for group in candidates if _same_facts(group[0], link)), None)
        if same is None:
            groups.append([link])
        else:
            same.append(link)
    return [_link(group, as_written) for group in groups]


def _same_facts(one: Link, other: Link) -> bool:
    return replace(other, source=one.source, target=one.target) == one


def _link(group: Sequence[Link], as_written: bool) -> str:
    link = group[0]
    pairs: Pairs = {"ends": _ends(group, as_written), "kind": link.kind}
    if link.bandwidth is not None:
        pairs["bandwidth"] = write_quantity(link.bandwidth, "bytes/s")
    if link.latency is not None:
        pairs["latency"] = write_quantity(link.latency, "seconds")
    for name in ("generation", "width", "full_generation", "full_width", "peer", "crosses", "origin"):
        if (value := getattr(link, name)) not in (None, ""):
            pairs[name] = value
    timings = [table_text(f"[link.timings.{key_text(path)}]", _timings(found)) for path, found in link.timings.items()]
    return "\n".join([table_text("[[link]]", pairs), *timings])


def _ends(group: Sequence[Link], as_written: bool) -> list[Value]:
    """`cuda:0 -> cuda:1`; both directions in one, `<->`, where the order of the file puts them right."""
    pairs = [(link.source, link.target) for link in group]
    if as_written:
        return [f"{source} -> {target}" for source, target in pairs]
    there: dict[tuple[str, str], str] = {}
    for source, target in pairs:
        if (target, source) in there and source != target:
            there[target, source] = "<->"
        else:
            there[source, target] = "->"
    return [f"{source} {arrow} {target}" for (source, target), arrow in there.items()]


def _timings(timings: Timings) -> Pairs:
    fit: Pairs = {}
    if timings.latency > 0:
        fit["latency"] = write_quantity(timings.latency, "seconds")
    if timings.bandwidth != float("inf"):
        fit["bandwidth"] = write_quantity(timings.bandwidth, "bytes/s")
    fit["residual"] = timings.residual
    pairs: Pairs = {"bytes": list(timings.sizes), "seconds": list(timings.seconds)}
    for name in ("p95", "p99"):
        if getattr(timings, name):
            pairs[name] = list(getattr(timings, name))
    return {**pairs, "fit": fit}


def _collective(collective: Collective) -> str:
    pairs: Pairs = {"kind": collective.kind, "ranks": collective.ranks, "backend": collective.backend}
    return table_text("[[collective]]", {**pairs, **_timings(collective.timings)})
