"""Links of the accelerators of one host: as they were found, beside what the parts at both ends could have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwise.machine.catalog import Part, PartLink, nvlink, pcie
from meshwise.machine.discovery.found import Accelerator, Between, Found
from meshwise.spec.machine import HOST, Link

AS_TOLD = "by generation and width, as the device tells them; the part is not in the catalog"


def host_links(
    names: Sequence[str], found: Found, parts: Sequence[Part | None], far: Callable[[Accelerator], bool]
) -> list[Link]:
    """From the host to each accelerator and back. far: whether it hangs on a socket that this process may not use."""
    links = []
    for name, device, part in zip(names, found.accelerators, parts, strict=True):
        link = _host_link(name, device, part, "socket" if far(device) else "")
        links += [link, _turned(link)]
    return links


def device_links(names: Sequence[str], found: Found, parts: Sequence[Part | None]) -> list[Link]:
    """Between each two accelerators, both ways: by NVLink or xGMI where there is one, else by PCIe."""
    return [
        _device_link(
            (names[one], names[other]), between, [found.accelerators[at] for at in pair], [parts[at] for at in pair]
        )
        for (one, other), between in found.between.items()
        for pair in [(one, other)]
    ]


def link_warnings(
    links: Sequence[Link], parts: Mapping[str, Part | None], found: Mapping[str, Accelerator]
) -> list[str]:
    """What looks wrong of links, in one sentence a kind, with what to do."""
    said = [_pcie_warning(link, found[link.target]) for link in links if link.source == HOST and link.kind == "pcie"]
    pairs = [link for link in links if HOST not in (link.source, link.target) and link.source < link.target]
    few = [link for link in pairs if link.kind == "nvlink" and (link.width or 0) < (link.full_width or 0)]
    if few:
        said.append(
            (
                "",
                f"{_pair(few[0])}{_more(few, 'pair')}: {few[0].width} of {few[0].full_width} NVLinks are up. "
                "nvidia-smi nvlink --status tells which are down.",
            )
        )
    missing = [link for link in pairs if link.kind == "pcie" and _should_have_nvlink(parts, link)]
    if missing:
        said.append(
            (
                "",
                f"{_pair(missing[0])}{_more(missing, 'pair')}: these parts have NVLink, and none is up between them. "
                "See whether nvidia-fabricmanager runs (systemctl status nvidia-fabricmanager).",
            )
        )
    off = [link for link in pairs if link.peer is False]
    if off:
        known = {
            part.name
            for link in off
            for end in (link.source, link.target)
            if (part := parts[end]) and part.peer is False
        }
        why = f" The vendor switched it off for {', '.join(sorted(known))}." if known else ""
        said.append(
            ("", f"{_pair(off[0])}{_more(off, 'pair')}: no peer access, copies are staged through the host.{why}")
        )
    return _gathered(said)


def _host_link(name: str, device: Accelerator, part: Part | None, crosses: str) -> Link:
    known = part.host_link if part is not None else None
    generation, width = device.now
    if known is None:
        full = (device.own[0] or device.system[0], device.own[1] or device.system[1])
        rate = pcie(full[0], full[1]) if full[0] and full[1] else None
        return Link(
            HOST, name, "pcie", rate, None, generation, width, *full, crosses=crosses, origin=AS_TOLD if rate else ""
        )
    if known.kind != "pcie":
        return Link(HOST, name, known.kind, known.bandwidth, crosses=crosses, origin=known.origin)
    return Link(
        HOST,
        name,
        "pcie",
        known.bandwidth,
        None,
        generation,
        width,
        known.generation,
        known.width,
        crosses=crosses,
        origin=known.origin,
    )


def _device_link(
    names: tuple[str, str], between: Between, devices: Sequence[Accelerator], parts: Sequence[Part | None]
) -> Link:
    if between.links == 0:
        return _pcie_pair(names, between, devices, parts)
    kind = "xgmi" if devices[0].vendor == "amd" else "nvlink"
    known = _common([part.link or part.bridge if part is not None else None for part in parts], kind)
    width = between.links
    if known is None:
        rate = nvlink(between.generation, width) if kind == "nvlink" and between.generation and width else None
        full = (between.generation, width)
        return Link(
            *names, kind, rate, None, between.generation, width, *full, between.peer, origin=AS_TOLD if rate else ""
        )
    each = known.bandwidth / known.width if known.width else None
    full_width = width if known.mesh else known.width
    rate = None if full_width is None or each is None else each * full_width
    return Link(
        *names,
        kind,
        rate,
        None,
        between.generation,
        width,
        known.generation,
        full_width,
        between.peer,
        between.crosses,
        origin=known.origin,
    )


def _pcie_pair(
    names: tuple[str, str], between: Between, devices: Sequence[Accelerator], parts: Sequence[Part | None]
) -> Link:
    """Two PCIe links in a row: the slower of them counts."""
    ends = [_host_link("", device, part, "") for device, part in zip(devices, parts, strict=True)]
    slow = min(ends, key=lambda link: (link.generation or 99, link.width or 99))
    full = min(ends, key=lambda link: (link.full_generation or 99, link.full_width or 99))
    rates = [link.bandwidth for link in ends]
    rate = min((r for r in rates if r is not None), default=None) if None not in rates else None
    return Link(
        *names,
        "pcie",
        rate,
        None,
        slow.generation,
        slow.width,
        full.full_generation,
        full.full_width,
        between.peer,
        between.crosses,
        origin=full.origin if rate else "",
    )


def _common(links: Sequence[PartLink | None], kind: str) -> PartLink | None:
    """The link that the parts at both ends have; of two that differ, the slower. None where one is not known."""
    known = [link for link in links if link is not None and link.kind == kind]
    return min(known, key=lambda link: link.pair) if len(known) == len(links) else None


def _should_have_nvlink(parts: Mapping[str, Part | None], link: Link) -> bool:
    ends = [parts[end] for end in (link.source, link.target)]
    return all(
        part is not None and part.link is not None and part.link.kind == "nvlink" and not part.link.mesh
        for part in ends
    )


def _pcie_warning(link: Link, device: Accelerator) -> tuple[str, str] | None:
    """What looks wrong of one PCIe link, as (device, sentence). Nothing while all is as it could be."""
    if None in (link.generation, link.width, link.full_generation, link.full_width):
        return None
    now, lanes = link.generation or 0, link.width or 0
    most, all_lanes = link.full_generation or 0, link.full_width or 0
    slot = device.system if device.system[0] else (most if now <= 2 else now, lanes)
    said = []
    if lanes < all_lanes and lanes == (slot[1] or lanes):
        said.append(
            f"its PCIe link has {lanes} of {all_lanes} lanes: copies to and from the host can reach "
            f"{lanes / all_lanes:.0%} at best. See whether the slot has {all_lanes} lanes, or shares them with another"
        )
    if now < min(slot[0] or now, most):
        said.append(
            f"its PCIe link runs at generation {now} now, as an idle one does; it could do generation "
            f"{min(slot[0] or now, most)}. meshwise bench tells what it does under load"
        )
    elif now < most:
        said.append(f"its PCIe link is of generation {now}, as the slot is; the card could do generation {most}")
    return (link.target, "; ".join(said).replace("%", " %")) if said else None


def _gathered(said: Sequence[tuple[str, str] | None]) -> list[str]:
    """One sentence for all devices of which the same is said."""
    by_sentence: dict[str, list[str]] = {}
    for entry in said:
        if entry is not None:
            by_sentence.setdefault(entry[1], []).append(entry[0])
    return [f"{names[0]}{_more(names, 'device')}: {text}." if names[0] else text for text, names in by_sentence.items()]


def _more(found: Sequence[object], word: str) -> str:
    more = len(found) - 1
    return f" and {more} more {word}{'s' if more > 1 else ''}" if more else ""


def _pair(link: Link) -> str:
    return f"{link.source} and {link.target}"


def _turned(link: Link) -> Link:
    return replace(link, source=link.target, target=link.source)
