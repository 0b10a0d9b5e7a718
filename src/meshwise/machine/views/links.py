"""Show the links between devices as a matrix of letters.

If all pairs are alike, a single line replaces the matrix. A line below the matrix explains each of its letters.

Tested in tests/machine/test_devices_text.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from rich.text import Text

from meshwise.spec.machine import DEVICE, NODE, Link, Machine
from meshwise.spec.units import bandwidth_text
from meshwise.terminal.screen import labelled
from meshwise.terminal.table import table_lines, width_of

KINDS = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe", "c2c": "C2C", "network": "network", "memory": "memory"}
UNKNOWN = "a link without known details"
CROSSES = {"": "", "bridge": "over the host's bridge", "socket": "over the other socket"}
MOST_MATRIX = 8
"""The largest number of devices for which a matrix of links is shown. More devices get a line per kind of link."""


def links_text(machine: Machine, width: int) -> list[Text]:
    """Return lines that show the links between devices and between hosts."""
    names = [device.name for device in machine.devices]
    pairs = [link for link in machine.links if {link.source, link.target} <= set(names)]
    classes = [link for link in machine.links if link.source == link.target == DEVICE]  # only if described, not found
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
    """Gather the links that the same sentence describes."""
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
