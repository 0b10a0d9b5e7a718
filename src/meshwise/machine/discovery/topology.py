"""Links of the accelerators of one host: as they were found, beside what the parts at both ends could have.

Tested in tests/machine/test_discover.py and test_discover_odd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.machine.catalog import Part, PartLink, nvlink, pcie
from meshwise.machine.discovery.found import Accelerator, Between, Found
from meshwise.spec.machine import HOST, Link

AS_REPORTED = "by generation and width, as the device reports them; the part is not in the catalog"


def host_links(
    names: Sequence[str], found: Found, parts: Sequence[Part | None], far: Callable[[Accelerator], bool]
) -> list[Link]:
    """From the host to each accelerator and back. far: whether it hangs on a socket that this process may not use."""
    links = []
    for name, device, part in zip(names, found.accelerators, parts, strict=True):
        link = _host_link(name, device, part, "socket" if far(device) else "")
        links += [link, replace(link, source=name, target=HOST)]
    return links


def device_links(names: Sequence[str], found: Found, parts: Sequence[Part | None]) -> list[Link]:
    """Between each two accelerators, both ways: by NVLink or xGMI where there is one, else by PCIe."""
    return [
        _device_link((names[a], names[b]), between, [found.accelerators[at] for at in (a, b)], [parts[a], parts[b]])
        for (a, b), between in found.between.items()
    ]


def link_warnings(
    links: Sequence[Link], parts: Mapping[str, Part | None], found: Mapping[str, Accelerator]
) -> list[str]:
    """What looks wrong of links, in one sentence a kind, with what to do."""
    slow = [_pcie_warning(link, found[link.target]) for link in links if link.source == HOST and link.kind == "pcie"]
    pairs = [link for link in links if HOST not in (link.source, link.target) and link.source < link.target]
    few = [link for link in pairs if link.kind == "nvlink" and (link.width or 0) < (link.full_width or 0)]
    missing = [link for link in pairs if link.kind == "pcie" and _should_have_nvlink(parts, link)]
    off = [link for link in pairs if link.peer is False]
    never = {p.name for link in off for end in (link.source, link.target) if (p := parts[end]) and p.peer is False}
    why = f" The vendor switched it off for {', '.join(sorted(never))}." if never else ""
    warnings = _gathered(slow)
    if few:
        up = f"{few[0].width} of {few[0].full_width} NVLinks are up. nvidia-smi nvlink --status shows which are down."
        warnings.append(f"{_pairs(few)}: {up}")
    if missing:
        warnings.append(
            f"{_pairs(missing)}: these parts have NVLink, and none is up between them. "
            "See whether nvidia-fabricmanager runs (systemctl status nvidia-fabricmanager)."
        )
    if off:
        warnings.append(f"{_pairs(off)}: no peer access, copies are staged through the host.{why}")
    return warnings


def _host_link(name: str, device: Accelerator, part: Part | None, crosses: str) -> Link:
    known = part.host_link if part is not None else None
    if known is not None and known.kind != "pcie":
        return Link(HOST, name, known.kind, crosses=crosses, **known.full)
    if known is not None:
        full = known.full
    else:
        most = (device.own[0] or device.system[0], device.own[1] or device.system[1])
        full = _full(pcie(most[0], most[1]) if most[0] and most[1] else None, *most)
    return Link(HOST, name, "pcie", generation=device.now[0], width=device.now[1], crosses=crosses, **full)


def _full(rate: float | None, generation: int | None, width: int | None) -> dict[str, Any]:
    """What a link could do, of a part that the catalog does not have."""
    origin = AS_REPORTED if rate else ""
    return {"bandwidth": rate, "full_generation": generation, "full_width": width, "origin": origin}


def _device_link(
    names: tuple[str, str], between: Between, devices: Sequence[Accelerator], parts: Sequence[Part | None]
) -> Link:
    if between.links == 0:
        return _pcie_pair(names, between, devices, parts)
    kind = "xgmi" if devices[0].vendor == "amd" else "nvlink"
    known = _common([part.link or part.bridge if part is not None else None for part in parts], kind)
    generation, width = between.generation, between.links
    crosses = ""
    if known is None:
        rate = nvlink(generation, width) if kind == "nvlink" and generation and width else None
        full = _full(rate, generation, width)
    else:
        crosses, most = between.crosses, width if known.mesh else known.width
        each = known.bandwidth / known.width if known.width else None
        rate = None if most is None or each is None else each * most
        full = known.full | {"bandwidth": rate, "full_width": most}
    return Link(*names, kind, generation=generation, width=width, peer=between.peer, crosses=crosses, **full)


def _pcie_pair(
    names: tuple[str, str], between: Between, devices: Sequence[Accelerator], parts: Sequence[Part | None]
) -> Link:
    """Two PCIe links in a row: the slower of them counts."""
    ends = [_host_link("", device, part, "") for device, part in zip(devices, parts, strict=True)]
    slow = min(ends, key=lambda link: (link.generation or 99, link.width or 99))
    full = min(ends, key=lambda link: (link.full_generation or 99, link.full_width or 99))
    rates = [link.bandwidth for link in ends if link.bandwidth is not None]
    rate = min(rates) if len(rates) == len(ends) else None
    return replace(
        full,
        source=names[0],
        target=names[1],
        kind="pcie",
        bandwidth=rate,
        generation=slow.generation,
        width=slow.width,
        peer=between.peer,
        crosses=between.crosses,
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
    notes = []
    if lanes < all_lanes and lanes == (slot[1] or lanes):
        notes.append(
            f"its PCIe link has {lanes} of {all_lanes} lanes: copies to and from the host can reach "
            f"{lanes / all_lanes:.0%} at best. See whether the slot has {all_lanes} lanes, or shares them with another"
        )
    if now < min(slot[0] or now, most):
        notes.append(
            f"its PCIe link runs at generation {now} now, as an idle one does; it could do generation "
            f"{min(slot[0] or now, most)}. meshwise bench shows what it does under load"
        )
    elif now < most:
        notes.append(f"its PCIe link is of generation {now}, as the slot is; the card could do generation {most}")
    return (link.target, "; ".join(notes).replace("%", " %")) if notes else None


def _gathered(found: Sequence[tuple[str, str] | None]) -> list[str]:
    """One sentence for all devices of which the same is to be reported."""
    by_sentence: dict[str, list[str]] = {}
    for device, sentence in filter(None, found):
        by_sentence.setdefault(sentence, []).append(device)
    return [f"{names[0]}{and_more(names, 'device')}: {sentence}." for sentence, names in by_sentence.items()]


def and_more(found: Sequence[object], word: str) -> str:
    """` and 3 more devices`, behind the first of what was found; empty for one."""
    more = len(found) - 1
    return f" and {more} more {word}{'s' if more > 1 else ''}" if more else ""


def _pairs(links: Sequence[Link]) -> str:
    return f"{links[0].source} and {links[0].target}{and_more(links, 'pair')}"
