"""Show a machine on one screen: host, devices, links, limits.

The text also shows versions, limits that will hurt, and what is unknown.

Equal devices share a row, and a uniform matrix is one line, so that 128 devices fit as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from string import ascii_uppercase
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.hardware.discovery.limits import limits_that_hurt
from meshwise.spec.json_values import json_value
from meshwise.spec.machine import DEVICE, HOST, NODE, Device, Host, Link, Machine, link_between
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, plural
from meshwise.terminal.screen import LABEL, Drawn, Screen, labelled, spaced
from meshwise.terminal.table import columns_lines, table_lines, width_of

MOST_NOTES = 6
MOST_ROWS = 12
LEAST_NAME, MOST_NAME = 16, 28
PEAKS = ("bf16", "fp16", "fp32")
"""The dtypes whose peak FLOP/s may be shown. Of these, the first with a known peak is shown for a device."""


def devices_text(machine: Machine, width: int | None = None, *, limits: bool = True) -> RenderableType:
    """Draw the machine for a terminal.

    limits: whether to show the limits that hurt.
    """
    return Drawn(lambda screen: _lines(machine, screen, width is not None, limits), width)


def devices_dict(machine: Machine) -> dict[str, Any]:
    """Convert a machine to plain data, for --json."""
    return {**json_value(machine), "limits_that_hurt": [str(limit) for limit in limits_that_hurt(machine)]}


def _lines(machine: Machine, screen: Screen, wrapped: bool, limits: bool) -> list[Text]:
    terminal = screen.console.is_terminal
    notes = _notes(machine, MOST_NOTES if terminal else None)
    hurting = limits_that_hurt(machine) if limits else []
    facts = [*_facts(machine), *(labelled("limit", str(limit), "yellow") for limit in hurting), *notes]
    table = _table(machine, screen.table_width)
    parts = [_hosts(machine, screen.table_width), table, links_text(machine, screen.width), facts]
    if terminal or wrapped:
        parts = [screen.wrap(*part, indent=LABEL) for part in parts]
    lines = spaced(parts, screen.height)
    for line in lines:
        line.no_wrap, line.overflow = True, "crop" if terminal else "ignore"
    return lines


def _hosts(machine: Machine, width: int) -> list[Text]:
    """Return a line for each different host: `AMD EPYC 7763 · 2 sockets, 2 NUMA nodes · 2 of 256 cores · 16.0 GiB`."""
    nameless = [replace(host, name="", limits={}) for host in machine.hosts]
    alike = [(host, len(list(many))) for host, many in groupby(nameless)]
    lines = []
    for host, many in alike[:MOST_ROWS]:
        facts = _host_facts(host)
        if many > 1:
            facts.insert(0, f"{many} alike" if facts else f"{many} hosts, without known details")
        if facts:
            over = LABEL + len(" · ".join(facts)) - width
            first = _cut(facts[0], max(len(facts[0]) - over, LEAST_NAME)) if len(facts) > 1 else facts[0]
            lines.append(labelled("host", " · ".join([first, *facts[1:]])))
    return lines


def _host_facts(host: Host) -> list[str]:
    several = {"socket": host.sockets, "NUMA node": host.numa_nodes}
    counts = [plural(count, word) for word, count in several.items() if count and count > 1]
    processor = re.sub(r"\((R|TM)\)", "", host.processor)
    cores = _of(host.cores, host.cores_present, str)
    cores = cores and f"{cores} core{'' if cores == '1' else 's'}"
    memory = _of(host.memory, host.memory_present, bytes_text)
    return [fact for fact in (processor, ", ".join(counts), cores, memory) if fact]


def _of(allowed: int | None, present: int | None, text: Callable[[int], str]) -> str:
    """Format two counts as `2 of 64`, for 2 allowed of 64 present. If all are allowed, the result is `64`."""
    return " of ".join(dict.fromkeys(text(count) for count in (allowed, present) if count is not None))


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1].rstrip() + "…"


def _table(machine: Machine, width: int) -> list[Text]:
    rows = _rows(machine)
    many = len(rows) - MOST_ROWS
    titles = [
        "device",
        "part",
        "memory",
        "NUMA",
        "host link",
        f"{_shown_dtype(machine.devices)} peak",
        "bandwidth",
    ]
    cells = zip(*rows[:MOST_ROWS], strict=True)
    lines = columns_lines(dict(zip(titles, cells, strict=False)), width, left=("device",))
    return [*lines, Text(f"and {many} more rows; --json has all", "dim")] if many > 0 else lines


def _rows(machine: Machine) -> list[list[str]]:
    """Return the cells of each row. Hosts with equal devices have their rows together."""
    hosts_of: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for host in range(len(machine.hosts)):
        own = [device for device in machine.devices if device.host == host]
        hosts_of.setdefault(tuple(_grouped(machine, own)), []).append(host)
    rows = []
    for group, hosts in hosts_of.items():
        where = f"{len(hosts)} × " if len(hosts) > 1 else f"node{hosts[0]} " if len(machine.hosts) > 1 else ""
        rows += [[where + name, *cells] for name, *cells in group]
    return rows


def _grouped(machine: Machine, devices: Sequence[Device]) -> list[tuple[str, ...]]:
    """Return a row for each device of a host. Equal neighbors share a row, which is named `cuda:0-3`."""
    rows = []
    for (_, *cells), members in groupby(devices, key=lambda device: (device.kind, *_cells(machine, device))):
        first, *others = [device.name for device in members]
        rows.append((first + (f"-{others[-1].rpartition(':')[2]}" if others else ""), *cells))
    return rows


def _cells(machine: Machine, device: Device) -> list[str]:
    link = link_between(machine, HOST, device.name)
    dtype = _shown_dtype(machine.devices)
    peak = next(((name, device.peak[name]) for name in (dtype, *PEAKS) if name in device.peak), None)
    return [
        _cut(device.part, MOST_NAME),
        "unknown" if device.memory is None else bytes_text(device.memory),
        "" if device.numa is None else str(device.numa),
        "" if device.kind == "cpu" else "unknown" if link is None else kind_text(link),
        _reached(device) if peak is None else flops_text(peak[1]) + (f" {peak[0]}" if peak[0] != dtype else ""),
        bandwidth_text(device.memory_bandwidth)
        if device.memory_bandwidth is not None
        else "unknown"
        if device.memory_rate is None
        else f"reached {bandwidth_text(device.memory_rate)}",
    ]


def _shown_dtype(devices: Sequence[Device]) -> str:
    return next((name for name in PEAKS if any(name in device.peak for device in devices)), PEAKS[0])


def _reached(device: Device) -> str:
    """Format the best measured rate of matrix products, or "unknown", for a device with unknown peak."""
    best = max(device.matmuls, key=lambda product: product.rate, default=None)
    return "unknown" if best is None else f"reached {flops_text(best.rate)} {best.dtype}"


def _facts(machine: Machine) -> list[Text]:
    versions = " · ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [labelled("versions", versions)] if versions else []
    return lines + ([labelled("measured", machine.measured)] if machine.measured else [])


def _notes(machine: Machine, most: int | None) -> list[Text]:
    shown = [labelled("note", sentence, "yellow") for sentence in machine.warnings[:most]]
    more = len(machine.warnings) - len(shown)
    return [*shown, labelled("note", f"and {more} more; --json has all", "dim")] if more else shown


KINDS = {
    "nvlink": "NVLink",
    "xgmi": "xGMI",
    "pcie": "PCIe",
    "c2c": "C2C",
    "network": "network",
    "memory": "memory",
}
UNKNOWN = "a link without known details"
CROSSES = {"": "", "bridge": "over the host's bridge", "socket": "over the other socket"}
MOST_MATRIX = 8
"""The largest number of devices for which a matrix of links is shown. More devices get a line per kind of link."""


def links_text(machine: Machine, width: int) -> list[Text]:
    """Return lines that show the links between devices and between hosts."""
    names = [device.name for device in machine.devices]
    pairs = [link for link in machine.links if {link.source, link.target} <= set(names)]
    classes = [link for link in machine.links if link.source == link.target == DEVICE]  # each stands for all pairs
    network = _alike([link for link in machine.links if link.source.startswith(NODE)])
    lines = [labelled("links", f"any two devices of a host: {_sentence(link)}") for link in classes]
    return [
        *(_pairs(pairs, names, width) if pairs else lines),
        *(labelled("network", f"{_some(alike, 'any two hosts')}: {sentence}") for sentence, alike in network.items()),
    ]


def kind_text(link: Link) -> str:
    """Format a link as `PCIe4 x16`. If it is below its maximum, the maximum is added: `PCIe1 of 4 x16`, `NVLink4 x12 of
    18`. The result is "" for a link without known details."""
    word = KINDS.get(link.kind, link.kind)
    if link.kind not in ("pcie", "nvlink", "xgmi"):
        return word
    generation, width = link.generation or link.full_generation, link.width or link.full_width
    most, lanes = link.full_generation or generation, link.full_width or width
    text = f"{word}{generation or ''}" + (f" of {most}" if most != generation else "")
    return text + (f" x{width}" + (f" of {lanes}" if lanes != width else "") if width else "")


def _pairs(pairs: Sequence[Link], names: Sequence[str], width: int) -> list[Text]:
    kinds = _alike(pairs)
    every = len(names) * (len(names) - 1)
    if len(kinds) == 1 and len(pairs) == every:
        return [labelled("links", f"{'both ways' if len(names) == 2 else 'every pair'}: {next(iter(kinds))}")]
    if len(names) > MOST_MATRIX:
        some = ((f"{len(alike)} of {every}, such as {_some(alike)}", sentence) for sentence, alike in kinds.items())
        return [labelled("links", ": ".join(both)) for both in some]
    letters = dict(zip(kinds, ascii_uppercase, strict=False))
    cells = {(link.source, link.target): letters[_sentence(link)] for link in pairs}
    rows = [[one, *(cells.get((one, other), "-") for other in names)] for one in names]
    lines = table_lines(["links", *names], rows)
    if width_of(lines) > width:
        lines = table_lines(["links", *(name.rpartition(":")[2] for name in names)], rows)
    return [*lines, *(labelled(letter, sentence, width=3) for sentence, letter in letters.items())]


def _alike(links: Sequence[Link]) -> dict[str, list[Link]]:
    """Group the links that have the same description."""
    kinds: dict[str, list[Link]] = {}
    for link in links:
        kinds.setdefault(_sentence(link), []).append(link)
    return kinds


def _some(alike: Sequence[Link], every: str = "") -> str:
    first = alike[0]
    return every if first.source == NODE else f"{first.source} to {first.target}"


def _sentence(link: Link) -> str:
    """Format a link as `NVLink4 x18, 450 GB/s, peer`."""
    facts = [kind_text(link) or UNKNOWN]
    if link.bandwidth is not None:
        facts.append(bandwidth_text(link.bandwidth))
    elif link.kind in ("network", ""):
        facts.append("bandwidth unknown")
    facts.append(CROSSES.get(link.crosses, link.crosses))
    facts.append({True: "peer", False: "staged through the host", None: ""}[link.peer])
    return ", ".join(fact for fact in facts if fact)
