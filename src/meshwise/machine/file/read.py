"""The machine file: a machine as TOML that people read and edit, and back. What is left out is the catalog's.

`[[device]] part = "H100-SXM"`, `count = 8` and nothing else is a whole file. Every key, type and unit is checked, and
an error names the file, the table and what to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.machine.catalog import part, parts
from meshwise.machine.file.checks import (
    Table,
    bytes_of,
    checked_count,
    checked_number,
    count_of,
    flag_of,
    number_table_of,
    only_keys,
    quantity_of,
    read_toml,
    table_of,
    tables_of,
    text_of,
    text_table_of,
    texts_of,
)
from meshwise.machine.file.links import read_collective, read_links
from meshwise.machine.file.write import FIGURES, link_order, machine_to_toml
from meshwise.machine.words import MOST_DEVICES, class_links, device_of
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import Device, Host, Machine, Matmul

__all__ = ["FROM_FILE", "machine_from_toml", "machine_to_toml"]

FROM_FILE = "the machine file"
"""Origin of a figure that a file writes without an origin of its own."""
_TOP = ("name", "measured", "warnings", "links_as_written", "versions", "host", "part", "device", "link", "collective")
_HOST = ("count", "name", "processor", "cores", "cores_present", "sockets", "numa_nodes", "memory", "memory_present")
_DEVICE = ("name", "part", "count", "host", "hosts", *FIGURES, "memory_rate", "launch", "numa", "pci", "matmuls")


def machine_from_toml(text: str, where: str) -> Machine:
    """The machine that a file describes. where: its name, for errors. Raises UsageError for what is wrong."""
    top = read_toml(text, where)
    only_keys(top, _TOP, where)
    part_tables = _part_tables(table_of(top, "part", where), where)
    devices = _devices(tables_of(top, "device", where), part_tables, where)
    hosts = _hosts(tables_of(top, "host", where), where)
    needed = max((device.host for device in devices), default=0) + 1
    if "host" not in top:
        hosts = (Host(),) * needed
    elif devices and len(hosts) < needed:
        raise UsageError(
            f"{where}: a device is on host {needed - 1}, and there are {len(hosts)} hosts. Write [[host]]."
        )
    links = read_links(tables_of(top, "link", where), devices, hosts, where)
    if "link" not in top:
        known = [found for device in devices if (found := part(device.part)) is not None]
        several = len({device.host for device in devices}) < len(devices)
        links = class_links(known, several) if len(known) == len(devices) else ()
    elif not flag_of(top, "links_as_written", where):
        links = tuple(sorted(links, key=link_order))
    if "device" not in top:
        raise UsageError(f'{where}: no device. Write [[device]] with part = "H100-SXM" and count = 8.')
    return Machine(
        text_of(top, "name", where, _name(devices, hosts)),
        devices,
        links,
        hosts,
        tuple(read_collective(entry, f"{where}, [[collective]] {at}") for at, entry in _each(top, "collective", where)),
        text_table_of(top, "versions", where),
        texts_of(top, "warnings", where),
        text_of(top, "measured", where),
    )


def _each(table: Table, key: str, where: str) -> list[tuple[int, Table]]:
    return list(enumerate(tables_of(table, key, where), 1))


def _name(devices: Sequence[Device], hosts: Sequence[Host]) -> str:
    """`8xH100-SXM`, for a file without a name."""
    names = list(dict.fromkeys(device.part for device in devices))
    each = f"{len(devices) // len(hosts)}x{names[0]}" if len(names) == 1 and hosts else f"{len(devices)} devices"
    return f"{len(hosts)}x{each}" if len(hosts) > 1 and len(names) == 1 else each


# ---- Hosts and devices -----------------------------------------------------------------------------------------------


def _hosts(tables: Sequence[Table], where: str) -> tuple[Host, ...]:
    found: list[Host] = []
    for at, table in enumerate(tables, 1):
        place = f"{where}, [[host]] {at}"
        only_keys(table, (*_HOST, "limits"), place)
        counts = {key: count_of(table, key, place, 0) for key in ("cores", "cores_present", "sockets", "numa_nodes")}
        host = Host(
            text_of(table, "name", place),
            text_of(table, "processor", place),
            memory=bytes_of(table, "memory", place),
            memory_present=bytes_of(table, "memory_present", place),
            limits=number_table_of(table, "limits", place),
            **counts,
        )
        found += [host] * (count_of(table, "count", place, 1, MOST_DEVICES) or 1)
        _no_more(len(found), "hosts", place)
    return tuple(found)


def _part_tables(tables: Table, where: str) -> dict[str, Table]:
    for name in tables:
        only_keys(table_of(tables, name, where), FIGURES, f"{where}, [part.{name[:60]}]")
    return {name: table_of(tables, name, where) for name in tables}


def _devices(tables: Sequence[Table], part_tables: Mapping[str, Table], where: str) -> tuple[Device, ...]:
    found: list[Device] = []
    next_index: dict[tuple[int, str], int] = {}
    taken: set[tuple[int, str]] = set()
    for at, table in enumerate(tables, 1):
        place = f"{where}, [[device]] {at}"
        only_keys(table, _DEVICE, place)
        count = count_of(table, "count", place, 1, MOST_DEVICES) or 1
        hosts = count_of(table, "hosts", place, 1, MOST_DEVICES) or 1
        _no_more(len(found) + count * hosts, "devices", place)
        device = _device(table, part_tables, place)
        if "name" not in table:
            kind = "cpu" if (known := part(device.part)) is not None and known.kind == "cpu" else "cuda"
            device = replace(device, name=f"{kind}:{next_index.get((device.host, kind), 0)}")
        for host in range(device.host, device.host + hosts):
            for one in _counted(replace(device, host=host), table, count, place):
                if (host, one.name) in taken:
                    raise UsageError(f"{place}: {one.name} is on host {host} already. Give each device its own name.")
                taken.add((host, one.name))
                next_index[host, one.kind] = _index(one.name) + 1
                found.append(one)
    return tuple(found)


def _no_more(count: int, things: str, place: str) -> None:
    if count > MOST_DEVICES:
        raise UsageError(f"{place}: {count:,} {things}; at most {MOST_DEVICES:,} can be described.")


def _index(name: str) -> int:
    number = name.partition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else 0


def _device(table: Table, part_tables: Mapping[str, Table], place: str) -> Device:
    name = text_of(table, "part", place)
    if not name:
        raise UsageError(f'{place}: part is missing. Write part = "H100-SXM", or the name that the driver gives.')
    known = part(name)
    if known is None and name not in part_tables and not set(FIGURES) & set(table):
        near = nearest(name, [one.name for one in parts()])
        raise UsageError(
            f"{place}: part '{name[:60]}' is not in the catalog and has no figures.{near} Write [part.NAME] with "
            f'memory, memory_bandwidth and peak, or at least memory = "unknown".'
        )
    plain = device_of(known, 0) if known is not None else Device("", name)
    plain = _with_figures(plain, part_tables.get(name, {}), f"{place}, [part.{name[:60]}]")
    plain = _with_figures(plain, table, place)
    return replace(
        plain,
        name=text_of(table, "name", place),
        host=count_of(table, "host", place, 0, MOST_DEVICES) or 0,
        memory_rate=quantity_of(table, "memory_rate", "bytes/s", place),
        launch=quantity_of(table, "launch", "seconds", place),
        matmuls=tuple(_matmul(entry, f"{place}, matmul {at}") for at, entry in _each(table, "matmuls", place)),
    )


def _with_figures(device: Device, table: Table, place: str) -> Device:
    """The device with the figures of a table; a figure without an origin of its own is the file's."""
    written: dict[str, Any] = {}
    if "memory" in table:
        written["memory"] = bytes_of(table, "memory", place)
    if "memory_bandwidth" in table:
        written["memory_bandwidth"] = quantity_of(table, "memory_bandwidth", "bytes/s", place)
    if "peak" in table:
        written["peak"] = number_table_of(table, "peak", place, "FLOP/s")
    if "achievable" in table:
        shares = table_of(table, "achievable", place)
        written["achievable"] = {
            dtype: checked_number(share, f"{place}, achievable.{dtype[:60]}", 0.0, 2.0)
            for dtype, share in shares.items()
        }
    if "origins" in table:
        return replace(device, **written, origins=text_table_of(table, "origins", place))
    kept = {name: origin for name, origin in device.origins.items() if name.split(".")[0] not in written}
    kept |= {name: FROM_FILE for name, value in written.items() if value not in (None, {})}
    return replace(device, **written, origins=kept)


def _counted(device: Device, table: Table, count: int, place: str) -> list[Device]:
    """`count` devices whose names count up from the first; numa and pci are one for all, or one each."""
    kind, colon, number = device.name.partition(":")
    if count > 1 and not (colon and number.isascii() and number.isdigit() and len(number) < 9):
        raise UsageError(f"{place}: name = '{device.name[:60]}' cannot count up. Write a number at its end, as cuda:0.")
    numa = _per_device(table, "numa", count, place)
    pci = _per_device(table, "pci", count, place)
    for at in range(count):
        if numa[at] is not None:
            checked_count(numa[at], f"{place}: numa", -1)
        if pci[at] is not None and not isinstance(pci[at], str):
            raise UsageError(f'{place}: pci: must be an address as a text. Write pci = "0000:3b:00.0".')
    names = [device.name] if count == 1 else [f"{kind}:{int(number) + at}" for at in range(count)]
    return [replace(device, name=name, numa=numa[at], pci=pci[at] or "") for at, name in enumerate(names)]


def _per_device(table: Table, key: str, count: int, place: str) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise UsageError(f"{place}: {key}: {len(value)} values for {count} devices. Write one for all, or one each.")
    return value


def _matmul(table: Table, place: str) -> Matmul:
    only_keys(table, ("dtype", "m", "n", "k", "seconds"), place)
    shape = [checked_count(table.get(key), f"{place}: {key}", 1) for key in ("m", "n", "k")]
    seconds = checked_number(table.get("seconds"), f"{place}: seconds", 1e-12, 1e9)
    return Matmul(text_of(table, "dtype", place), shape[0], shape[1], shape[2], seconds)
