"""Show the links between devices as a matrix: `NVLink4 x18`, `PCIe4 x16`.

If all pairs are alike, a single line replaces the matrix. If full words do not fit, the matrix has letters, and a line
below explains each letter.

Tested in tests/machine/test_devices_text.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from rich.text import Text

from meshwise.spec.machine import DEVICE, HOST, NODE, Link, Machine
from meshwise.spec.units import bandwidth_text
from meshwise.terminal.screen import labelled
from meshwise.terminal.table import table_lines, width_of

KINDS = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe", "c2c": "C2C", "network": "network", "memory": "memory"}
UNKNOWN = "a link without known details"
CROSSES = {"": "", "bridge": "over the host's bridge", "socket": "over the other socket"}
MOST_MATRIX = 8
"""The largest number of devices for which a matrix of links is shown. More devices get a line per kind of link."""


def links_text(machine: Machine, width: int) -> list[Text]:
    """Return lines that show the links between devices and between hosts. There are no lines if no such link is
    known."""
    pairs = {
        (link.source, link.target): link
        for link in machine.links
        if not {link.source, link.target} & {HOST, DEVICE} and not link.source.startswith(NODE)
    }
    lines = _classes(machine) if not pairs else _pairs(pairs, [device.name for device in machine.devices], width)
    return lines + _network(machine)


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


def _classes(machine: Machine) -> list[Text]:
    """Return a line for each link that stands for all pairs of devices of a host. Only a machine that the user has
    described has such a link. In a discovered machine, each pair of devices has a link of its own."""
    found = [link for link in machine.links if link.source == link.target == DEVICE]
    return [labelled("links", f"any two devices of a host: {_sentence(link)}") for link in found]


def _network(machine: Machine) -> list[Text]:
    found = [link for link in machine.links if link.source.startswith(NODE) and link.target.startswith(NODE)]
    if not found:
        return []
    first = found[0]
    if len(found) == 1 and first.source == NODE:
        return [labelled("network", f"any two hosts: {_sentence(first)}")]
    shown = [labelled("network", f"{link.source} to {link.target}: {_sentence(link)}") for link in found[:MOST_MATRIX]]
    more = len(found) - len(shown)
    return [*shown, labelled("network", f"and {more} more; --json has all")] if more > 0 else shown


def _pairs(pairs: Mapping[tuple[str, str], Link], names: Sequence[str], width: int) -> list[Text]:
    kinds: dict[str, list[tuple[str, str]]] = {}
    for pair, link in pairs.items():
        kinds.setdefault(_sentence(link), []).append(pair)
    every = len(names) * (len(names) - 1)
    if len(kinds) == 1 and len(pairs) == every:
        ((sentence, _),) = kinds.items()
        return [labelled("links", f"{'both ways' if len(names) == 2 else 'every pair'}: {sentence}")]
    if len(names) > MOST_MATRIX:
        return [
            labelled("links", f"{len(alike)} of {every}, such as {alike[0][0]} to {alike[0][1]}: {sentence}")
            for sentence, alike in kinds.items()
        ]
    letters = dict(zip(kinds, ascii_uppercase, strict=False))
    firsts = {sentence: pairs[alike[0]] for sentence, alike in kinds.items()}
    words = {sentence: link.crosses or kind_text(link) or UNKNOWN for sentence, link in firsts.items()}
    clear = len(set(words.values())) == len(words)
    for labels in (words, letters) if clear else (letters,):
        lines = _matrix(pairs, names, labels, width)
        if lines:
            break
    legend = [labelled(labels[sentence], sentence, width=max(map(len, labels.values())) + 2) for sentence in kinds]
    return [*lines, *legend]


def _matrix(
    pairs: Mapping[tuple[str, str], Link], names: Sequence[str], labels: Mapping[str, str], width: int
) -> list[Text]:
    """Draw the links as a matrix with a row and a column for each device. The columns are headed by the device names,
    or by their numbers if names are too wide. Returns [] if the matrix is too wide with numbers, too.

    labels: the short text for a cell. The key is the sentence that describes the link.
    """
    rows = [
        [one, *(labels[_sentence(pairs[one, other])] if (one, other) in pairs else "-" for other in names)]
        for one in names
    ]
    for titles in (names, [name.rpartition(":")[2] for name in names]):
        lines = table_lines(["links", *titles], rows)
        if width_of(lines) <= width:
            return lines
    return []


def _sentence(link: Link) -> str:
    """Format a link as `NVLink4 x18, 450 GB/s, peer`, or `PCIe4 x16, 31.5 GB/s, over the other socket, staged through
    the …`."""
    facts = [kind_text(link) or UNKNOWN]
    if link.bandwidth is not None:
        facts.append(bandwidth_text(link.bandwidth))
    elif link.kind in ("network", ""):
        facts.append("bandwidth unknown")
    facts.append(CROSSES.get(link.crosses, link.crosses))
    facts.append({True: "peer", False: "staged through the host", None: ""}[link.peer])
    return ", ".join(fact for fact in facts if fact)
