"""Derive the links between one host's accelerators, with warnings.

A link is described as found, beside what the parts at both ends support.

Tested in tests/machine/test_discover.py and test_discover_odd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.machine.catalog import CatalogPart, PartLink, nominal_rate
from meshwise.machine.discovery.found import Accelerator, Between
from meshwise.spec.machine import HOST, Link

AS_REPORTED = "by generation and width, as the device reports them; the part is not in the catalog"


@dataclass(frozen=True)
class Named:
    """An accelerator that was found on this host.

    name: its name in the result, such as `cuda:0`.
    part: its device model in the catalog, or None if the catalog does not contain it.
    """

    name: str
    device: Accelerator
    part: CatalogPart | None


def host_links(found: Sequence[Named], far: Callable[[Accelerator], bool]) -> list[Link]:
    """Return the links from the host to each accelerator and back.

    far: returns whether an accelerator is on a different socket than the cores of this process.
    """
    to = [_host_link(one, "socket" if far(one.device) else "") for one in found]
    return [way for link in to for way in (link, replace(link, source=link.target, target=HOST))]


def device_links(found: Sequence[Named], between: Mapping[tuple[int, int], Between]) -> list[Link]:
    """Return a link for each pair of accelerators in each direction. It is NVLink if the pair has it, else
    PCIe."""
    return [_device_link((found[a], found[b]), what) for (a, b), what in between.items()]


def link_warnings(links: Sequence[Link], found: Sequence[Named]) -> list[str]:
    """Return a sentence for each kind of suspicious link. It says what to do."""
    devices = {one.name: one.device for one in found}
    parts = {one.name: one.part for one in found}
    slow = [_pcie_warning(link, devices[link.target]) for link in links if link.source == HOST and link.kind == "pcie"]
    pairs = [link for link in links if HOST not in (link.source, link.target) and link.source < link.target]
    few = [link for link in pairs if link.kind == "nvlink" and (link.width or 0) < (link.full_width or 0)]
    missing = [link for link in pairs if link.kind == "pcie" and _should_have_nvlink(parts, link)]
    off = [link for link in pairs if link.peer is False]
    never = {p.name for link in off for end in (link.source, link.target) if (p := parts[end]) and p.peer is False}
    why = f" The vendor switched it off for {', '.join(sorted(never))}." if never else ""
    warnings = _gathered(slow)
    if few:
        up = f"{few[0].width} of {few[0].full_width} NVLinks are up"
        warnings.append(f"{_pairs(few)}: {up}. nvidia-smi nvlink --status shows which are down.")
    if missing:
        warnings.append(
            f"{_pairs(missing)}: these parts have NVLink, but no NVLink is up between them. "
            "Check whether nvidia-fabricmanager runs (systemctl status nvidia-fabricmanager)."
        )
    if off:
        warnings.append(f"{_pairs(off)}: there is no peer access, so copies go through the host's memory.{why}")
    return warnings


def _host_link(one: Named, crosses: str = "") -> Link:
    known = one.part.host_link if one.part is not None else None
    if known is not None and known.kind != "pcie":
        return Link(HOST, one.name, known.kind, crosses=crosses, **known.full)
    own, system, now = one.device.own, one.device.system, one.device.now
    full = known.full if known else _as_reported("pcie", own[0] or system[0], own[1] or system[1])
    return Link(HOST, one.name, "pcie", generation=now[0], width=now[1], crosses=crosses, **full)


def _as_reported(kind: str, generation: int | None, width: int | None) -> dict[str, Any]:
    """Return the full rate of a link as keyword arguments of a `Link`. The rate is computed from the generation and
    width that the device reports. Used for devices that are not in the catalog."""
    rate = nominal_rate(kind, generation, width)
    origin = AS_REPORTED if rate else ""
    return {"bandwidth": rate, "full_generation": generation, "full_width": width, "origin": origin}


def _device_link(ends: tuple[Named, Named], between: Between) -> Link:
    if between.links == 0:
        return _pcie_pair(ends, between)
    kind = "nvlink"
    known = _common([end.part.link or end.part.bridge if end.part is not None else None for end in ends], kind)
    generation, width = between.generation, between.links
    if known is None:
        crosses, full = "", _as_reported(kind, generation, width)
    else:
        crosses, most = between.crosses, width if known.mesh else known.width
        each = known.bandwidth / known.width if known.width else None
        rate = None if most is None or each is None else each * most
        full = known.full | {"bandwidth": rate, "full_width": most}
    facts = full | {"generation": generation, "width": width, "peer": between.peer, "crosses": crosses}
    return Link(ends[0].name, ends[1].name, kind, **facts)


def _pcie_pair(ends: tuple[Named, Named], between: Between) -> Link:
    """Return the PCIe path between two accelerators. It runs over the link of each accelerator to the host, and the
    slower of these links determines its rate."""
    links = [_host_link(end) for end in ends]
    slow = min(links, key=lambda link: (link.generation or 99, link.width or 99))
    full = min(links, key=lambda link: (link.full_generation or 99, link.full_width or 99))
    rate = min(link.bandwidth or 0.0 for link in links) or None
    return replace(
        full,
        source=ends[0].name,
        target=ends[1].name,
        kind="pcie",
        bandwidth=rate,
        generation=slow.generation,
        width=slow.width,
        peer=between.peer,
        crosses=between.crosses,
        origin=full.origin if rate else "",
    )


def _common(links: Sequence[PartLink | None], kind: str) -> PartLink | None:
    """Return the slower of two device models' links, if all of them are of this kind, such as `nvlink`. Otherwise,
    return None.

    links: the link of each of the two models. None if the model is unknown or has no link.
    """
    known = [link for link in links if link is not None and link.kind == kind]
    return min(known, key=lambda link: link.pair) if len(known) == len(links) else None


def _should_have_nvlink(parts: Mapping[str, CatalogPart | None], link: Link) -> bool:
    links = [part.link for end in (link.source, link.target) if (part := parts[end]) is not None]
    return len(links) == 2 and all(own is not None and own.kind == "nvlink" and not own.mesh for own in links)


def _pcie_warning(link: Link, device: Accelerator) -> tuple[str, str] | None:
    """Return (device, sentence) if a PCIe link runs below its full rate. Returns None if it runs at full rate, or if a
    rate is unknown."""
    if None in (link.generation, link.width, link.full_generation, link.full_width):
        return None
    now, lanes = link.generation or 0, link.width or 0
    most, all_lanes = link.full_generation or 0, link.full_width or 0
    slot = device.system if device.system[0] else (most if now <= 2 else now, lanes)
    notes = []
    if lanes < all_lanes and lanes == (slot[1] or lanes):
        notes.append(
            f"its PCIe link has {lanes} of {all_lanes} lanes: copies to and from the host can reach "
            f"{lanes / all_lanes:.0%} at best. The slot may have fewer than {all_lanes} lanes, or share its lanes"
        )
    if now < min(slot[0] or now, most):
        notes.append(
            f"its PCIe link runs at generation {now} now, as idle links do, but supports generation "
            f"{min(slot[0] or now, most)}. meshwise bench shows its speed under load"
        )
    elif now < most:
        notes.append(f"its PCIe link runs at generation {now}, like the slot; the card supports generation {most}")
    return (link.target, "; ".join(notes).replace("%", " %")) if notes else None


def _gathered(found: Sequence[tuple[str, str] | None]) -> list[str]:
    """Merge equal warnings on several devices, such as `cuda:0 and 3 more devices: ...`.

    found: pairs of a device and a sentence, or None for no warning.
    """
    by_sentence: dict[str, list[str]] = {}
    for device, sentence in filter(None, found):
        by_sentence.setdefault(sentence, []).append(device)
    return [f"{names[0]}{and_more(names, 'device')}: {sentence}." for sentence, names in by_sentence.items()]


def and_more(found: Sequence[object], word: str) -> str:
    """Return text such as ` and 3 more devices`, to append to the name of the first item. Returns "" if there is only
    one item."""
    more = len(found) - 1
    return f" and {more} more {word}{'s' if more > 1 else ''}" if more else ""


def _pairs(links: Sequence[Link]) -> str:
    return f"{links[0].source} and {links[0].target}{and_more(links, 'pair')}"
