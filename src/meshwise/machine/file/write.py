"""Write a machine as a TOML file that people can edit.

Each device and each link is a table, and its figures have units.

The figures of a part are written once, under `[part.NAME]`, and those of a single device in its own table. Consecutive
links that differ only in their ends share a table. `machine_from_toml` of read.py reads the same machine back from the
file. The text is written by tomli-w, which the `machine` extra installs.

Tested in tests/machine/test_machine_file.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from meshwise.machine.file.tables import COLUMNS, DEVICE, FIGURES, FIT, HOST, LINK, MATMUL, UNKNOWN
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Device, Host, Machine, Matmul
from meshwise.spec.quantity import write_quantity
from meshwise.spec.timings import Timings

HEADER = """\
# A machine, as meshwise measured or described it. May be edited: every figure has its unit, a figure that is left out
# is the catalog's, "unknown" is a figure that nobody knows. `meshwise bench --save` writes such files.
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
    """Import and return tomli_w, which writes TOML. If it is not installed, raises UsageError with the command that
    installs it."""
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
    file["device"] = [_device(device, first[device.part]) for device in machine.devices]
    file["link"] = [
        {"ends": [f"{link.source} -> {link.target}" for link in alike], **_table(facts, LINK)}
        for facts, alike in groupby(machine.links, key=lambda link: replace(link, source="", target=""))
    ]
    if machine.collectives:
        file["collective"] = [
            {"kind": c.kind, "ranks": c.ranks, "backend": c.backend, **_timings(c.timings)} for c in machine.collectives
        ]
    text = toml_writer().dumps(file).encode("utf-8", "replace").decode("utf-8")  # a name may have lone surrogates
    return HEADER + _LIST.sub(lambda found: f"[{' '.join(map(str.strip, found[1].splitlines()))[:-1]}]", text)


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
    """Return the nominal figures; what is left out would be read from the catalog."""
    return {name: _value(name, getattr(device, name)) for name in FIGURES}


def _device(device: Device, first: Device) -> dict[str, Any]:
    """Return the table of a device; figures that are those of `first` stand under its part."""
    own = _table(device, [name for name in DEVICE if name not in FIGURES])
    same = all(getattr(device, name) == getattr(first, name) for name in FIGURES)
    return own if same else {**own, **_figures(device)}
