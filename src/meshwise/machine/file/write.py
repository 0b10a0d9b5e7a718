"""Write a machine as a TOML file that people can edit.

Each device and each link is a table, and its figures have units.

The figures of a part are written once, under `[part.NAME]`, and those of a single device in its own table. Consecutive
links that differ only in their ends share a table. `machine_from_toml` of read.py reads the same machine back from the
file. The text is written by tomli-w, which the `machine` extra installs.

Tested in tests/machine/test_machine_file.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from typing import Any

from meshwise.machine.file.fields import write_table
from meshwise.machine.file.tables import DEVICE, FIGURES, FILE, HOST, LINK, write_timings
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Device, Host, Machine

HEADER = """\
# A machine, as meshwise measured or described it. May be edited: every figure has its unit, a figure that is left out
# is the catalog's, "unknown" is a figure that nobody knows. `meshwise bench --save` writes such files.
"""
INSTALL = "pip install meshwise[machine]"
_LIST = re.compile(r"\[\n((?: +[^\n\[\]{}]+,\n)+)\s*\]")
"""Matches a list of numbers or texts as tomli-w writes it, with one item per line."""
_WIDTH = 100


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
    hosts = max((device.host for device in machine.devices), default=0) + 1
    file = write_table(machine, {name: FILE[name] for name in ("name", "measured", "warnings", "versions")})
    if machine.hosts != (Host(),) * hosts:
        file["host"] = [write_table(host, HOST) for host in machine.hosts]
    file["part"] = {name: _figures(first[name]) for name in dict.fromkeys(device.part for device in machine.devices)}
    file["device"] = [_device(device, first[device.part]) for device in machine.devices]
    file["link"] = [
        {"ends": [f"{link.source} -> {link.target}" for link in alike], **write_table(facts, LINK)}
        for facts, alike in groupby(machine.links, key=lambda link: replace(link, source="", target=""))
    ]
    if machine.collectives:
        file["collective"] = [
            {"kind": c.kind, "ranks": c.ranks, "backend": c.backend, **write_timings(c.timings)}
            for c in machine.collectives
        ]
    text = toml_writer().dumps(file).encode("utf-8", "replace").decode("utf-8")  # a name may have lone surrogates
    return HEADER + _LIST.sub(_wrapped, text)


def _wrapped(found: re.Match[str]) -> str:
    """Write the items of a list on as few lines as possible.

    found: a match of `_LIST`.
    """
    rows = [""]
    for item in found[1].rstrip("\n").split("\n"):
        if rows[-1] and len(rows[-1]) + len(item) > _WIDTH:
            rows.append("")
        rows[-1] += f" {item.strip()}" if rows[-1] else item.strip()
    return f"[{rows[0][:-1]}]" if len(rows) == 1 else "\n    ".join(["[", *rows]) + "\n]"


def _figures(device: Device) -> dict[str, Any]:
    """Return the nominal figures of a device as a table for the machine file. Unknown figures are written as unknown.
    If they were left out, they would be read from the catalog when the file is read."""
    return {name: field.write(getattr(device, name)) for name, field in FIGURES.items()}


def _device(device: Device, first: Device) -> dict[str, Any]:
    """Return the table that describes a device in the machine file. Figures such as memory are left out if they are
    equal to the figures of `first`, because these are written once for all devices of the model.

    first: the first device of the same model.
    """
    own = {name: field for name, field in DEVICE.items() if name not in FIGURES}
    same = all(getattr(device, name) == getattr(first, name) for name in FIGURES)
    return {**write_table(device, own), **({} if same else _figures(device))}
