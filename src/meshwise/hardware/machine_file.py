"""Read and write a machine as a TOML file.

Figures that the file lacks come from the catalog.

`[[device]] part = "H100-SXM"`, `count = 8` is a complete file. Every key, type and unit is checked, and
an error names the file, the table and what to write.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby, product
from typing import Any

from meshwise.hardware.catalog import CatalogPart, part, parts
from meshwise.hardware.file_keys import (
    COLUMNS,
    DEVICE,
    ENDS,
    FIGURES,
    FILE,
    FIT,
    HOST,
    LINK,
    MATMUL,
    UNKNOWN,
    Known,
    Table,
    collective,
    read_table,
)
from meshwise.hardware.quantity import write_quantity
from meshwise.hardware.words import class_links, device_of
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import DEVICE as ANY_DEVICE
from meshwise.spec.machine import HOST as ANY_HOST
from meshwise.spec.machine import MOST_DEVICES, NODE, Device, Host, Link, Machine, Matmul
from meshwise.spec.timings import Timings

FROM_FILE = "the machine file"
"""The source that is recorded for a figure in a machine file if the file does not name the figure's source."""
_PART_NAME = '"H100-SXM", or the name that the driver gives'


def machine_from_toml(text: str, where: str) -> Machine:
    """Read a machine from the text of a machine file."""
    file = read_table(_toml(text, where), FILE, where)
    if "device" not in file:
        raise UsageError(f'{where} describes no device. Write [[device]] with part = "H100-SXM" and count = 8.')
    devices = _devices(file, where)
    hosts = _hosts(file, where)
    needed = max((device.host for device in devices), default=0) + 1
    if "host" not in file:
        hosts = (Host(),) * needed
    elif devices and len(hosts) < needed:
        raise UsageError(
            f"{where}: a device is on host {needed - 1}, but there are only {len(hosts)}. Add a [[host]] for it."
        )
    if "link" in file:
        links = _links(file, {*(device.name for device in devices), *(f"node{at}" for at in range(len(hosts)))}, where)
    else:
        known = [found for device in devices if (found := part(device.part)) is not None]
        several = len({device.host for device in devices}) < len(devices)
        links = class_links(known, several) if len(known) == len(devices) else ()
    collectives = enumerate(file.get("collective", ()), 1)
    return Machine(
        file.get("name", _name(devices, hosts)),
        devices,
        links,
        hosts,
        tuple(collective(table, f"{where}, [[collective]] {at}") for at, table in collectives),
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


def _each(
    file: Table, key: str, known: Known, where: str, required: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each table of a list, and a text that names its place in the file, such as `m.toml, [[device]] 2`."""
    for at, table in enumerate(file.get(key, ()), 1):
        place = f"{where}, [[{key}]] {at}"
        yield read_table(table, known, place, required), place


def _name(devices: Sequence[Device], hosts: Sequence[Host]) -> str:
    """Return a name such as `8xH100-SXM` for a machine to which the file gives no name."""
    names = list(dict.fromkeys(device.part for device in devices))
    each = f"{len(devices) // len(hosts)}x{names[0]}" if len(names) == 1 and hosts else f"{len(devices)} devices"
    return f"{len(hosts)}x{each}" if len(hosts) > 1 and len(names) == 1 else each


# ---- Hosts and devices -----------------------------------------------------------------------------------------------


def _hosts(file: Table, where: str) -> tuple[Host, ...]:
    found: list[Host] = []
    for values, _ in _each(file, "host", HOST, where):
        count = values.pop("count", None) or 1
        found += [Host(**values)] * count
    return tuple(found)


def _devices(file: Table, where: str) -> tuple[Device, ...]:
    own_parts = {
        name: read_table(table, FIGURES, f"{where}, [part.{name[:60]}]") for name, table in file.get("part", {}).items()
    }
    found: dict[tuple[int, str], Device] = {}
    next_index: dict[tuple[int, str], int] = {}
    for values, place in _each(file, "device", DEVICE, where, {"part": _PART_NAME}):
        count, hosts = (values.pop(key, None) or 1 for key in ("count", "hosts"))
        many = len(found) + count * hosts
        if many > MOST_DEVICES:
            raise UsageError(f"{place}: {many:,} devices are too many. The limit is {MOST_DEVICES:,}.")
        device = _device(values, own_parts, place)
        if not device.name:
            kind = (part(device.part) or CatalogPart).kind
            device = replace(device, name=f"{kind}:{next_index.get((device.host, kind), 0)}")
        first = _index(device.name)
        if count > 1 and first is None:
            raise UsageError(
                f"{place}: count is above 1, so name = '{device.name[:60]}' must end in a number (cuda:0)."
            )
        each = {key: _for_each(values, key, count, place) for key in ("numa", "pci") if key in values}
        for host, at in product(range(device.host, device.host + hosts), range(count)):
            name = device.name if count == 1 else f"{device.kind}:{(first or 0) + at}"
            if (host, name) in found:
                raise UsageError(f"{place}: host {host} has two devices named {name}. Use different names.")
            own = {key: of_each[at] for key, of_each in each.items()}
            found[host, name] = replace(device, name=name, host=host, **own)
            next_index[host, device.kind] = (_index(name) or 0) + 1
    return tuple(found.values())


def _for_each(values: Table, key: str, count: int, place: str) -> list[Any]:
    """Return the value of a key for each device of a table, which has one value for all, or a list."""
    many: list[Any] = values[key] if isinstance(values[key], list) else [values[key]] * count
    if len(many) != count:
        raise UsageError(f"{place}: {key} has {len(many)} values for {count} devices. Write one value, or {count}.")
    return many


def _index(name: str) -> int | None:
    """Return the number after the colon of a name such as `cuda:0`, or None if there is none."""
    number = name.partition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else None


def _device(values: Table, own_parts: Mapping[str, Table], place: str) -> Device:
    """Make a device. Each figure comes from its own table, else from [part.NAME], else from the catalog."""
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


def _with_figures(device: Device, values: Table) -> Device:
    """Replace figures of a device by those in a table, with their source."""
    written = {name: values[name] for name in FIGURES if name in values}
    if "origins" not in written:
        kept = {name: origin for name, origin in device.origins.items() if name.split(".")[0] not in written}
        kept |= {name: FROM_FILE for name, value in written.items() if value not in (None, {})}
        written["origins"] = kept
    return replace(device, **written)


# ---- Links -----------------------------------------------------------------------------------------------------------


def _links(file: Table, names: set[str], where: str) -> tuple[Link, ...]:
    """Read the links: each pair in `ends` becomes a link with the facts of the table."""
    found: dict[tuple[str, str], Link] = {}
    for values, place in _each(file, "link", LINK, where, {"ends": ENDS}):
        for pair in (pair for text in values.pop("ends") for pair in _ends(text, names, place)):
            if pair in found:
                raise UsageError(f"{place}: the link {' -> '.join(pair)} is given twice. Write each link once.")
            found[pair] = Link(*pair, **{"kind": "", **values})
    return tuple(found.values())


def _ends(text: str, names: set[str], place: str) -> list[tuple[str, str]]:
    """Parse `cuda:0 -> cuda:1` as one pair (source, target), and `cuda:0 <-> cuda:1` as two pairs."""
    arrow = "<->" if "<->" in text else "->"
    source, found_arrow, target = (part.strip() for part in text.partition(arrow))
    if not found_arrow:
        raise UsageError(f"{place}: '{text[:60]}' does not name two ends of a link. Write ends = {ENDS}.")
    known = {ANY_HOST, ANY_DEVICE, NODE, *names}
    for end in (source, target):
        if end not in known:
            raise UsageError(
                f"{place}: '{end[:60]}' is not a device of this machine.{nearest(end, known)} Use the name of "
                "a device in the file, host, device (any device), node (any host) or node0."
            )
    return list(dict.fromkeys([(source, target), (target, source)] if arrow == "<->" else [(source, target)]))


HEADER = """\
# A machine, measured or described by meshwise. May be edited: every figure has its unit, omitted figures come from the
# catalog, and "unknown" marks an unknown figure. `meshwise bench --save` writes such files.
"""
INSTALL = "pip install meshwise[machine]"
UNITS = {
    **dict.fromkeys(("memory", "memory_present"), "bytes"),
    **dict.fromkeys(("memory_bandwidth", "memory_rate", "bandwidth"), "bytes/s"),
    **dict.fromkeys(("latency", "launch"), "seconds"),
    "peak": "FLOP/s",
}
"""The figures that are written with a unit."""
_LIST = re.compile(r"\[\n((?: +[^\n\[\]{}]+,\n)+)\s*\]")
"""Matches a list of numbers or texts as tomli-w writes it, with one item per line."""


def toml_writer() -> Any:
    """Import and return tomli_w, which writes TOML."""
    try:
        import tomli_w
    except ImportError:
        raise UsageError(f"writing a machine file needs tomli-w, which is not installed. Use {INSTALL}.") from None
    return tomli_w


def machine_to_toml(machine: Machine) -> str:
    """Write the machine as TOML. Figures are written exactly, so reading the text gives the same machine."""
    first = {device.part: device for device in reversed(machine.devices)}
    file = _table(machine, ("name", "measured", "warnings", "versions"))
    if machine.hosts != (Host(),) * (max((device.host for device in machine.devices), default=0) + 1):
        file["host"] = [_table(host, HOST) for host in machine.hosts]
    file["part"] = {name: _figures(first[name]) for name in dict.fromkeys(device.part for device in machine.devices)}
    file["device"] = [_own_table(device, first[device.part]) for device in machine.devices]
    file["link"] = [
        {"ends": [f"{link.source} -> {link.target}" for link in alike], **_table(facts, LINK)}
        for facts, alike in groupby(machine.links, key=lambda link: replace(link, source="", target=""))
    ]
    if machine.collectives:
        file["collective"] = [
            {"kind": c.kind, "ranks": c.ranks, "backend": c.backend, **_timings(c.timings)} for c in machine.collectives
        ]
    text = toml_writer().dumps(file).encode("utf-8", "replace").decode("utf-8")  # UTF-8 cannot encode lone surrogates
    return HEADER + _LIST.sub(_in_one_line, text)


def _in_one_line(found: re.Match[str]) -> str:
    lines = [line.strip(" ") for line in found[1][:-1].split("\n")]  # no other end of a line: a text may have one
    return f"[{' '.join(lines)[:-1]}]"


def _table(thing: Any, names: Iterable[str]) -> dict[str, Any]:
    """Convert fields to a table. Those that are empty or have their default value are left out."""
    default = {field.name: field.default for field in fields(thing)}
    values = {name: getattr(thing, name) for name in names if name in default}
    return {name: _value(name, value) for name, value in values.items() if value not in (default[name], (), {})}


def _value(name: str, value: Any) -> Any:
    match value:
        case None:
            return UNKNOWN
        case Timings():
            return _timings(value)
        case Matmul():
            return _table(value, MATMUL)
        case tuple():
            return [_value(name, one) for one in value]
        case Mapping():
            return {key: _value(name, one) for key, one in value.items()}
    return write_quantity(value, UNITS[name]) if name in UNITS else value


def _timings(timings: Timings) -> dict[str, Any]:
    """Convert measured times, and the latency and bandwidth that were fitted to them, to a table of the file."""
    finite = [name for name in FIT if getattr(timings, name) != float("inf")]
    return {"bytes": timings.sizes, **_table(timings, COLUMNS), "fit": _table(timings, finite)}


def _figures(device: Device) -> dict[str, Any]:
    """Return all nominal figures, even unknown ones: omitted figures would be read from the catalog."""
    return {name: _value(name, getattr(device, name)) for name in FIGURES}


def _own_table(device: Device, first: Device) -> dict[str, Any]:
    """Return the table of a device, without figures if they equal those of `first`."""
    own = _table(device, [name for name in DEVICE if name not in FIGURES])
    same = all(getattr(device, name) == getattr(first, name) for name in FIGURES)
    return own if same else {**own, **_figures(device)}
