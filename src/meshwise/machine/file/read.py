"""Read a machine from its TOML file.

What the file leaves out comes from the catalog.

`[[device]] part = "H100-SXM"`, `count = 8` and nothing else is a whole file. Every key, type and unit is checked, and
an error names the file, the table and what to write.

Tested in tests/machine/test_machine_file.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.machine.catalog import CatalogPart, part, parts
from meshwise.machine.file.fields import MANY, TEXT, Table, list_of, read_table
from meshwise.machine.file.tables import COLLECTIVE, DEVICE, FIGURES, FILE, HOST, LINK
from meshwise.machine.words import class_links, device_of
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import DEVICE as ANY_DEVICE
from meshwise.spec.machine import HOST as ANY_HOST
from meshwise.spec.machine import MOST_DEVICES, NODE, Device, Host, Link, Machine

FROM_FILE = "the machine file"
"""The source that is recorded for a figure in a machine file if the file does not name the figure's source."""
_PART_NAME = '"H100-SXM", or the name that the driver gives'
_LINK_ENDS = '["host -> cuda:0", "cuda:0 <-> cuda:1"]'


def machine_from_toml(text: str, where: str) -> Machine:
    """Read a machine from the text of a machine file. Raises UsageError if the text is not valid.

    where: the name of the file, for errors.
    """
    file = read_table(_toml(text, where), FILE, where)
    if "device" not in file:
        raise UsageError(f'{where} describes no device. Write [[device]] with part = "H100-SXM" and count = 8.')
    own_parts = {
        name: read_table(table, FIGURES, f"{where}, [part.{name[:60]}]") for name, table in file.get("part", {}).items()
    }
    devices = _devices(file["device"], own_parts, where)
    hosts = _hosts(file.get("host", ()), where)
    needed = max((device.host for device in devices), default=0) + 1
    if "host" not in file:
        hosts = (Host(),) * needed
    elif devices and len(hosts) < needed:
        raise UsageError(
            f"{where}: a device is on host {needed - 1}, but there are only {len(hosts)}. Add a [[host]] for it."
        )
    if "link" in file:
        links = _links(file["link"], devices, len(hosts), where)
    else:
        known = [found for device in devices if (found := part(device.part)) is not None]
        several = len({device.host for device in devices}) < len(devices)
        links = class_links(known, several) if len(known) == len(devices) else ()
    return Machine(
        file.get("name", _name(devices, hosts)),
        devices,
        links,
        hosts,
        tuple(COLLECTIVE.read(table, place) for table, place in _each(file.get("collective", ()), "collective", where)),
        file.get("versions", {}),
        file.get("warnings", ()),
        file.get("measured", ""),
    )


def _toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML. Raises UsageError with the line and the column if the text is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(
            f"{where}: tables or lists are nested too deep. `meshwise bench --save` writes a valid file."
        ) from None
    except ValueError as error:  # TOMLDecodeError, or a number that Python refuses to read
        raise UsageError(f"{where} is not a valid TOML file: {error}.") from None


def _each(tables: Sequence[Table], key: str, where: str) -> list[tuple[Table, str]]:
    """Return each table with a text on its place in the file, such as `m.toml, [[device]] 2`, for error messages."""
    return [(table, f"{where}, [[{key}]] {at}") for at, table in enumerate(tables, 1)]


def _name(devices: Sequence[Device], hosts: Sequence[Host]) -> str:
    """Return a name such as `8xH100-SXM` for a machine to which the file gives no name."""
    names = list(dict.fromkeys(device.part for device in devices))
    each = f"{len(devices) // len(hosts)}x{names[0]}" if len(names) == 1 and hosts else f"{len(devices)} devices"
    return f"{len(hosts)}x{each}" if len(hosts) > 1 and len(names) == 1 else each


def _times(table: Table, key: str, place: str) -> int:
    """Return how many equal items a table describes. This is the count at `key`, or 1 if the table has no such key."""
    return MANY.read(table[key], f"{place}: {key}") or 1 if key in table else 1


def _no_more(count: int, things: str, place: str) -> None:
    if count > MOST_DEVICES:
        raise UsageError(f"{place}: {count:,} {things} are too many. The limit is {MOST_DEVICES:,}.")


# ---- Hosts and devices -----------------------------------------------------------------------------------------------


def _hosts(tables: Sequence[Table], where: str) -> tuple[Host, ...]:
    found: list[Host] = []
    for table, place in _each(tables, "host", where):
        host = Host(**read_table(table, HOST, place, also=("count",)))
        found += [host] * _times(table, "count", place)
        _no_more(len(found), "hosts", place)
    return tuple(found)


def _devices(tables: Sequence[Table], own_parts: Mapping[str, Table], where: str) -> tuple[Device, ...]:
    found: dict[tuple[int, str], Device] = {}
    next_index: dict[tuple[int, str], int] = {}
    for table, place in _each(tables, "device", where):
        values = read_table(table, DEVICE, place, also=("count", "hosts"), required={"part": _PART_NAME})
        count, hosts = _times(table, "count", place), _times(table, "hosts", place)
        _no_more(len(found) + count * hosts, "devices", place)
        device = _device(values, own_parts, place)
        if not device.name:
            kind = (part(device.part) or CatalogPart).kind
            device = replace(device, name=f"{kind}:{next_index.get((device.host, kind), 0)}")
        alike = _counted(device, values, count, place)
        for host in range(device.host, device.host + hosts):
            for one in alike:
                if (host, one.name) in found:
                    raise UsageError(f"{place}: host {host} has two devices named {one.name}. Use different names.")
                found[host, one.name] = replace(one, host=host)
                next_index[host, one.kind] = (_index(one.name) or 0) + 1
    return tuple(found.values())


def _index(name: str) -> int | None:
    """Return the number after the colon of a name such as `cuda:0`, or None if there is none."""
    number = name.partition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else None


def _device(values: Mapping[str, Any], own_parts: Mapping[str, Table], place: str) -> Device:
    """Make a device from its table in the machine file. A figure that this table lacks is taken from the table
    [part.NAME] of the same file. If it is missing there, too, it is taken from the catalog."""
    name = values["part"]
    known = part(name)
    if known is None and name not in own_parts and not set(FIGURES) & set(values):
        near = nearest(name, [one.name for one in parts()])
        raise UsageError(
            f"{place}: part '{name[:60]}' is not in the catalog and has no figures.{near} Write [part.NAME] with "
            f'memory, memory_bandwidth and peak, or at least memory = "unknown".'
        )
    plain = device_of(known, 0) if known is not None else Device("", name)
    own = _with_figures(_with_figures(plain, own_parts.get(name, {})), values)
    facts = {key: values[key] for key in ("memory_rate", "launch", "matmuls") if key in values}
    return replace(own, name=values.get("name", ""), host=values.get("host") or 0, **facts)


def _with_figures(device: Device, values: Mapping[str, Any]) -> Device:
    """Replace figures of a device, such as its memory, by the figures in a table of the machine file. If the table does
    not name the sources of its figures, "the machine file" is recorded as their source."""
    written = {name: values[name] for name in FIGURES if name in values}
    if "origins" not in written:
        kept = {name: origin for name, origin in device.origins.items() if name.split(".")[0] not in written}
        kept |= {name: FROM_FILE for name, value in written.items() if value not in (None, {})}
        written["origins"] = kept
    return replace(device, **written)


def _counted(device: Device, values: Mapping[str, Any], count: int, place: str) -> list[Device]:
    """Return `count` devices named `cuda:0`, `cuda:1` and so on. `numa` and `pci` in `values` are either one value for
    all devices or a list."""
    index = _index(device.name)
    if count > 1 and index is None:
        raise UsageError(f"{place}: count is above 1, so name = '{device.name[:60]}' must end in a number (cuda:0).")
    each = {}
    for key in ("numa", "pci"):
        value = values.get(key, getattr(device, key))
        each[key] = value if isinstance(value, list) else [value] * count
        if len(each[key]) != count:
            raise UsageError(
                f"{place}: {key} has {len(each[key])} values for {count} devices. Write one value, or {count}."
            )
    names = [device.name] if index is None or count == 1 else [f"{device.kind}:{index + at}" for at in range(count)]
    return [
        replace(device, name=name, numa=numa, pci=pci)
        for name, numa, pci in zip(names, each["numa"], each["pci"], strict=True)
    ]


# ---- Links -----------------------------------------------------------------------------------------------------------


def _links(tables: Sequence[Table], devices: Sequence[Device], hosts: int, where: str) -> tuple[Link, ...]:
    """Read the links of a machine file from its tables `[[link]]`, in the order of the file. The key `ends` of a table
    lists pairs of devices, such as "cuda:0 <-> cuda:1". Each pair in the list becomes a link with the facts of the
    table. Raises UsageError if an end is unknown, or if a link is given twice."""
    known = {ANY_HOST, ANY_DEVICE, NODE, *(device.name for device in devices), *(f"node{at}" for at in range(hosts))}
    texts = list_of(TEXT, f"texts: {_LINK_ENDS}")
    found: dict[tuple[str, str], Link] = {}
    for table, place in _each(tables, "link", where):
        facts = {"kind": "", **read_table(table, LINK, place, also=("ends",), required={"ends": _LINK_ENDS})}
        for source, target in _ends(texts.read(table["ends"], f"{place}: ends"), known, place):
            if (source, target) in found:
                raise UsageError(f"{place}: the link {source} -> {target} is given twice. Write each link once.")
            found[source, target] = Link(source, target, **facts)
    return tuple(found.values())


def _ends(texts: Iterable[str], known: set[str], place: str) -> list[tuple[str, str]]:
    """Parse `cuda:0 -> cuda:1` as one pair (source, target), and `cuda:0 <-> cuda:1` as two pairs."""
    found = []
    for text in texts:
        arrow = "<->" if "<->" in text else "->"
        source, found_arrow, target = (part.strip() for part in text.partition(arrow))
        if not found_arrow:
            raise UsageError(f"{place}: '{text[:60]}' does not name two ends of a link. Write ends = {_LINK_ENDS}.")
        for end in (source, target):
            if end not in known:
                raise UsageError(
                    f"{place}: '{end[:60]}' is not a device of this machine.{nearest(end, known)} Use the name of "
                    "a device in the file, host, device (any device), node (any host) or node0."
                )
        found += [(source, target)] if arrow == "->" or source == target else [(source, target), (target, source)]
    return found
