"""Derive the links between one host's accelerators, with warnings.

A link is described as found, along with what the parts at both ends support.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.hardware.catalog import CatalogPart, nominal_rate, part_of_driver_name
from meshwise.spec.machine import HOST, Link
from meshwise.spec.units import percent_text

AS_REPORTED = "by generation and width, as the device reports them; the part is not in the catalog"


def host_links(found: Sequence[Accelerator], far: Container[int | None]) -> list[Link]:
    """Return the links from the host to each accelerator and back."""
    to = [_host_link(one, "socket" if one.numa in far else "") for one in found if one.listed]
    return [way for link in to for way in (link, replace(link, source=link.target, target=HOST))]


def device_links(found: Sequence[Accelerator], between: Mapping[tuple[int, int], Between]) -> list[Link]:
    """Return a link for each pair of accelerators in each direction."""
    return [_device_link((found[a], found[b]), what) for (a, b), what in between.items()]


def link_warnings(links: Sequence[Link], found: Sequence[Accelerator]) -> list[str]:
    """Return a sentence for each kind of suspicious link, most with advice."""
    parts = {one.label: one.part for one in found}
    slow: dict[str, list[str]] = {}
    for link in links:
        if link.source == HOST and link.kind == "pcie" and (sentence := _narrow_or_idle(link)):
            slow.setdefault(sentence, []).append(link.target)
    pairs = [link for link in links if HOST not in (link.source, link.target) and link.source < link.target]
    few = [link for link in pairs if link.kind == "nvlink" and (link.width or 0) < (link.full_width or 0)]
    missing = [link for link in pairs if link.kind == "pcie" and _should_have_nvlink(parts, link)]
    off = [link for link in pairs if link.peer is False]
    never = {p.name for link in off for end in (link.source, link.target) if (p := parts[end]) and p.peer is False}
    why = f" The vendor switched it off for {', '.join(sorted(never))}." if never else ""
    warnings = [f"{names[0]}{and_more(names, 'device')}: {sentence}." for sentence, names in slow.items()]
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


def _host_link(one: Accelerator, crosses: str = "") -> Link:
    known = one.part.host_link if one.part is not None else None
    kind, full = (known.kind, known.full) if known else ("pcie", _as_reported("pcie", *one.own))
    generation, width = one.now if kind == "pcie" else (None, None)
    return Link(HOST, one.label, kind, generation=generation, width=width, crosses=crosses, **full)


def _as_reported(kind: str, generation: int | None, width: int | None) -> dict[str, Any]:
    """Return the full rate of a link as arguments of a `Link`, for a part that the catalog lacks."""
    rate = nominal_rate(kind, generation, width)
    origin = AS_REPORTED if rate else ""
    return {"bandwidth": rate, "full_generation": generation, "full_width": width, "origin": origin}


def _device_link(ends: tuple[Accelerator, Accelerator], between: Between) -> Link:
    names = (ends[0].label, ends[1].label)
    if between.links is None:
        return Link(*names, "", peer=between.peer)
    if between.links == 0:  # the path leads through the host: the slower host link counts
        links = [_host_link(end) for end in ends]
        slow = min(links, key=lambda link: (link.bandwidth or 0.0, link.generation or 99, link.width or 99))
        return replace(slow, source=names[0], target=names[1], kind="pcie", peer=between.peer, crosses=between.crosses)
    parts = [end.part.link or end.part.bridge for end in ends if end.part is not None]
    nvlinks = [link for link in parts if link is not None and link.kind == "nvlink"]
    generation, width = between.generation, between.links
    if len(nvlinks) < len(ends):
        full = _as_reported("nvlink", generation, width)
    else:
        known = min(nvlinks, key=lambda link: link.pair)
        most = width if known.mesh else known.width
        rate = known.bandwidth / known.width * most if known.width and most else None
        full = known.full | {"bandwidth": rate, "full_width": most}
    return Link(*names, "nvlink", generation=generation, width=width, peer=between.peer, **full)


def _should_have_nvlink(parts: Mapping[str, CatalogPart | None], link: Link) -> bool:
    links = [part.link for end in (link.source, link.target) if (part := parts[end]) is not None]
    return len(links) == 2 and all(own is not None and own.kind == "nvlink" and not own.mesh for own in links)


def _narrow_or_idle(link: Link) -> str:
    """Return a sentence if a PCIe link runs below its full rate, else ""."""
    now, lanes, most, all_lanes = link.generation, link.width, link.full_generation, link.full_width
    notes = []
    if lanes and all_lanes and lanes < all_lanes:
        notes.append(
            f"its PCIe link has {lanes} of {all_lanes} lanes, so copies to and from the host reach at most "
            f"{percent_text(lanes / all_lanes)}. The slot may have fewer than {all_lanes} lanes, or share them"
        )
    if now and most and now < most:
        notes.append(
            f"its PCIe link runs at generation {now} now, as idle links do, and supports generation {most}. meshwise "
            "bench shows its speed under load"
        )
    return "; ".join(notes)


def and_more(found: Sequence[object], word: str) -> str:
    """Return text such as ` and 3 more devices`, to append to the name of the first item."""
    more = len(found) - 1
    return f" and {more} more {word}{'s' if more > 1 else ''}" if more else ""


def _pairs(links: Sequence[Link]) -> str:
    return f"{links[0].source} and {links[0].target}{and_more(links, 'pair')}"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver or torch reports it. Values that are unknown are None."""

    name: str
    pci: str
    memory: int | None = None
    numa: int | None = None
    now: tuple[int | None, int | None] = (None, None)
    own: tuple[int | None, int | None] = (None, None)
    told_by: str = "as the driver reports it"
    label: str = ""
    listed: bool = True

    @property
    def part(self) -> CatalogPart | None:
        """The device model in the catalog, or None if the catalog does not have it."""
        return part_of_driver_name(self.name, self.memory)


@dataclass(frozen=True)
class Between:
    """The connection between two accelerators."""

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """The accelerators in the reported order, the connections between them, and versions."""

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
