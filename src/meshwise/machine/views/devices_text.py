"""Show a machine on one screen: host, devices, links, limits.

It also shows versions, limits that will hurt, and what is unknown.

Devices that are alike share a row, and a matrix in which all is alike is one line, so that 128 devices fit as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from meshwise.machine.discovery.host_facts import limits_that_hurt
from meshwise.machine.views.links_text import kind_text, links_text
from meshwise.spec.machine import HOST, Device, Host, Machine, link_between
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, plural
from meshwise.terminal.screen import LABEL, Drawn, Screen, labelled, spaced
from meshwise.terminal.table import table_lines

MOST_SINGLE = 4
"""The largest number of devices that have one row each. With more devices, equal devices in a sequence share a row."""
MOST_NOTES = 6
MOST_ROWS = 12
LEAST_NAME = 16
PEAKS = ("bf16", "fp16", "fp32")
"""The dtypes whose peak FLOP/s may be shown. Of these, the first with a known peak is shown for a device."""


def devices_text(machine: Machine, width: int | None = None) -> RenderableType:
    """Draw the machine for a terminal.

    width: the largest number of characters in a line. The default is the width of the console. If the output is a file
        or a pipe and no width is given, sentences are not wrapped.
    """
    return Drawn(lambda screen: _lines(machine, screen, width is not None), width)


def _lines(machine: Machine, screen: Screen, wrapped: bool) -> list[Text]:
    terminal = screen.console.is_terminal
    notes = _notes(machine, MOST_NOTES if terminal else None)
    limits = [labelled("limit", sentence, "yellow") for sentence in limits_that_hurt(machine)]
    facts = [*_facts(machine), *limits, *notes]
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
            lines.append(labelled("host", _fit(facts, width - LABEL) if len(facts) > 1 else facts[0]))
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


def _fit(facts: Sequence[str], width: int) -> str:
    """Join the facts to one line. If it is too wide, the first fact, which is a name, is shortened."""
    line = " · ".join(facts)
    over = len(line) - width
    return line if over <= 0 else " · ".join([_cut(facts[0], max(len(facts[0]) - over, LEAST_NAME)), *facts[1:]])


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1].rstrip() + "…"


def _table(machine: Machine, width: int) -> list[Text]:
    rows = _rows(machine)
    many = len(rows) - MOST_ROWS
    titles = ["device", "part", "memory", "NUMA", "host link", f"{_shown_dtype(machine.devices)} peak", "bandwidth"]
    shown = rows[:MOST_ROWS]
    kept = [at for at in range(len(titles)) if at in (0, 1) or any(row[at] for row in shown)]
    wide = [max(len(titles[at]), *(len(row[at]) for row in shown)) for at in kept]
    over = sum(wide) + 2 * (len(wide) - 1) - width
    if over > 0:  # a long name of an unknown part gives way before a figure does
        for row in shown:
            row[1] = _cut(row[1], max(LEAST_NAME, wide[1] - over))
    lines = table_lines([titles[at] for at in kept], [[row[at] for at in kept] for row in shown], width)
    return [*lines, Text(f"and {many} more rows; --json has all", "dim")] if many > 0 else lines


def _rows(machine: Machine) -> list[list[str]]:
    """Return the rows of the table of devices, each as a list of its cells. If several hosts have equal devices, the
    table has one set of rows for these hosts together."""
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
    """Return a row for each device of a host. If there are many devices, equal neighbors share a row, which is named
    `cuda:0-3`."""
    if len(devices) <= MOST_SINGLE:
        return [(device.name, *_cells(machine, device)) for device in devices]
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
        device.part,
        "unknown" if device.memory is None else bytes_text(device.memory),
        "" if device.numa is None else str(device.numa),
        "" if device.kind == "cpu" else "unknown" if link is None else kind_text(link),
        _reached_product(device) if peak is None else flops_text(peak[1]) + (f" {peak[0]}" if peak[0] != dtype else ""),
        _reached_memory(device) if device.memory_bandwidth is None else bandwidth_text(device.memory_bandwidth),
    ]


def _shown_dtype(devices: Sequence[Device]) -> str:
    return next((name for name in PEAKS if any(name in device.peak for device in devices)), PEAKS[0])


def _reached_product(device: Device) -> str:
    """Format the best measured rate of matrix products, or "unknown". It is shown instead of the peak FLOP/s if the
    peak of a device is unknown."""
    best = max(device.matmuls, key=lambda product: product.rate, default=None)
    return "unknown" if best is None else f"reached {flops_text(best.rate)} {best.dtype}"


def _reached_memory(device: Device) -> str:
    return "unknown" if device.memory_rate is None else f"reached {bandwidth_text(device.memory_rate)}"


def _facts(machine: Machine) -> list[Text]:
    versions = " · ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [labelled("versions", versions)] if versions else []
    return lines + ([labelled("measured", machine.measured)] if machine.measured else [])


def _notes(machine: Machine, most: int | None) -> list[Text]:
    shown = [labelled("note", sentence, "yellow") for sentence in machine.warnings[:most]]
    more = len(machine.warnings) - len(shown)
    return [*shown, labelled("note", f"and {more} more; --json has all", "dim")] if more else shown
