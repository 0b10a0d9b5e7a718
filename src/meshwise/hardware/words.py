"""Read a machine in words: `8xH100`, `2x8xA100-80GB@200Gb`, `2xA100+2xV100`, `4xcpu`.

The figures come from the catalog.

Counts come first: hosts × devices per host, or devices of one host. After @ comes the one-way bandwidth of a host.
Parts joined with + are devices of one host; with counts of hosts, or a network, they are hosts. If a name may mean
several parts, the first one in the catalog is taken, with a warning. Unknown figures stay unknown, also with a warning.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import replace

from meshwise.hardware.catalog import NOT_CONFIRMED, CatalogPart, PartLink, networks, nominal, parts
from meshwise.spec.devices import DEVICE_KINDS
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import DEVICE, HOST, MOST_DEVICES, NODE, Device, Host, Link, Machine
from meshwise.spec.units import bandwidth_text

_FORMS = ("sxm", "pcie", "nvl", "oam", "gcd")
_VENDORS = re.compile(r"^(nvidia|amd|geforce|tesla|instinct|quadro)+")
_WRITE = "Write hosts x devices x device name @ network rate, such as 8xH100, 2x8xA100-80GB@200Gb or 4xcpu."


def machine_from_words(words: str) -> Machine:
    """Return the machine that `words` describe. Raises UsageError if they cannot be read, if a part is unknown, or if a
    count is too large."""
    text = words.strip()
    if len(text) > 200:
        raise UsageError(f"machine '{words[:60]}…': {len(words):,} characters are too many for a description. {_WRITE}")
    named, at, behind = text.partition("@")
    groups = [_group(words, group) for group in named.split("+")]
    rate = _network(words, behind) if at else None
    parts_, warnings = [group[2] for group in groups], [warning for group in groups for warning in group[3]]
    if len({part.kind for part in parts_}) > 1:
        raise UsageError(f"machine '{words}': a run cannot have both CPU workers and GPUs. {_WRITE}")
    apart = at or any(hosts > 1 for hosts, *_ in groups)
    on_hosts = [[part] * each for hosts, each, part, _ in groups for _ in range(hosts)]
    if not apart:
        on_hosts = [[part for own in on_hosts for part in own]]
    hosts, count = len(on_hosts), sum(map(len, on_hosts))
    if count > MOST_DEVICES:
        raise UsageError(f"machine '{words}': {count:,} devices are too many. The limit is {MOST_DEVICES:,}.")
    links = [*class_links(_slowest_link(parts_, bool(apart), warnings), count > hosts)]
    if rate is not None and hosts == 1:
        warnings.append(f"'@{behind.strip()}' is a rate between hosts. It is not used, because there is only one host.")
    if hosts > 1:
        origin = "" if rate is None else f"'@{behind.strip()}', {bandwidth_text(rate)} a host, one way"
        links.append(Link(NODE, NODE, "network", rate, origin=origin))
        if rate is None:
            warnings.append(
                f"The network between the {hosts} hosts is unknown. Write what one host can send, one way, after @: "
                f"{text}@200Gb (Gbit/s), or measure it with `meshwise bench --hosts`."
            )
    devices = tuple(device_of(part, i, host) for host, own in enumerate(on_hosts) for i, part in enumerate(own))
    return Machine(text, devices, tuple(links), (Host(),) * hosts, warnings=tuple(warnings))


def device_of(part: CatalogPart, index: int, host: int = 0) -> Device:
    """Return a `Device` of this model in the catalog, with the model's nominal figures.

    index: the device's number on its host.
    """
    return Device(f"{part.kind}:{index}", host=host, **nominal(part))


def class_links(device_parts: list[CatalogPart], several_on_a_host: bool) -> tuple[Link, ...]:
    """Return the links of a machine whose devices are all of the same model: the links between the host and any device,
    and between any two devices."""
    if len({part.name for part in device_parts}) != 1:
        return ()
    part = device_parts[0]
    return (*_host_links(part), *(_device_links(part) if several_on_a_host else ()))


def _slowest_link(device_parts: list[CatalogPart], apart: bool, warnings: list[str]) -> list[CatalogPart]:
    """Reduce different models to the one with the slowest link, with a warning. On one host, they copy through it."""
    if len({part.name for part in device_parts}) == 1:
        return device_parts

    def rate(part: CatalogPart) -> float:
        link = (apart and part.link) or part.host_link
        return link.pair if link else math.inf

    slowest = min(device_parts, key=rate)
    warnings.append(f"All links are assumed to be those of {slowest.name}. Use a machine file for other links.")
    return [slowest if apart else replace(slowest, link=None, peer=False)]


def _group(words: str, text: str) -> tuple[int, int, CatalogPart, list[str]]:
    """Parse `2x8xA100` as (hosts, devices per host, model, warnings)."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"machine '{words}' names no device. {_WRITE}")
    counts = [_count(words, digits) for digits in found.group(1, 2) if digits is not None]
    hosts, each = (1, *counts)[-2:] if counts else (1, 1)
    return hosts, each, *_named(words, found[3])


def _count(words: str, digits: str) -> int:
    if len(digits) > 9 or not 0 < int(digits) <= MOST_DEVICES:
        raise UsageError(
            f"machine '{words[:60]}': the count {digits[:12]} must be from 1 to {MOST_DEVICES:,}. {_WRITE}"
        )
    return int(digits)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _named(words: str, name: str) -> tuple[CatalogPart, list[str]]:
    """Find the first model that a name may mean. Warn of other such models and of doubtful figures."""
    plain = _plain(name)
    exact = [part for part in parts() if plain in map(_plain, (part.name, *part.aliases))]
    found = exact or [part for part in parts() if _means(plain, part)]
    if not found:
        raise UsageError(f"machine '{words}': '{name}' is not a known device.{_near(plain)} {_WRITE}")
    part = found[0]
    warnings = []
    if len(found) > 1:
        others = ", ".join(other.name for other in found[1:])
        warnings.append(f"{name} is taken as {part.name}. If you mean another one, write its full name: {others}.")
    if part.note:
        warnings.append(f"{part.name}: {part.note}.")
    unsure = sorted(figure for figure, origin in part.origins.items() if origin.endswith(NOT_CONFIRMED))
    if unsure:
        warnings.append(f"{part.name}: no source confirms {', '.join(unsure)}. Check before you rely on these figures.")
    return part, warnings


def _plain(name: str) -> str:
    """Reduce a name to lower-case letters and digits, and remove a vendor's name from its beginning."""
    plain = _letters(name)
    return _VENDORS.sub("", plain) or plain


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _means(plain: str, part: CatalogPart) -> bool:
    """Return whether a name is the model's family, with or without its memory size and form."""
    if part.memory is None:
        return False
    family, size = _plain(part.family), part.memory // 2**30
    forms = [rf"{form}\d?" for form in _FORMS if form in _plain(part.name).removeprefix(family)]
    return re.fullmatch(f"{family}({'|'.join([rf'{size}(gi?b?)?', *forms])})*", plain) is not None


def _near(plain: str) -> str:
    known = {_plain(name): part.name for part in parts() for name in (part.name, part.family, *part.aliases)}
    if plain == "gpu" or plain in DEVICE_KINDS:
        return " Write a model such as H100; `meshwise devices` shows what is here."
    close = difflib.get_close_matches(plain, list(known), n=5, cutoff=0.5)
    names = list(dict.fromkeys(known[name] for name in close))[:3]
    nearby = f" Nearest are {', '.join(names)}." if names else f" Known are {', '.join(p.name for p in parts())}."
    return f"{nearby} To use another device, describe it in a machine file."


# ---- Links -----------------------------------------------------------------------------------------------------------


def _host_links(part: CatalogPart) -> tuple[Link, ...]:
    link = part.host_link
    if link is None:
        return ()
    return tuple(Link(*ends, link.kind, **link.full) for ends in ((HOST, DEVICE), (DEVICE, HOST)))


def _device_links(part: CatalogPart) -> tuple[Link, ...]:
    """Return one link that stands for every pair of devices of a host."""
    if part.kind == "cpu":
        return (Link(DEVICE, DEVICE, "process"),)
    link: PartLink | None = part.link or part.host_link
    if link is None:
        return ()
    full = link.full | {
        "bandwidth": link.pair,
        "origin": link.origin + (", one link of each pair" if link.mesh else ""),
    }
    if link.mesh:
        full["full_width"] = 1
    peer, crosses = (True, "") if part.link else (part.peer, "bridge")
    return (Link(DEVICE, DEVICE, link.kind, peer=peer, crosses=crosses, **full),)


def _network(words: str, rate: str) -> float:
    """Parse a network rate, `200Gb`, `25GB`, `8xInfiniBand-NDR` or `DGX-H100`, as bytes/s."""
    sold = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([KMGT])(bit|bits|bps|b|B|Bps)(?:/s|ps)?", rate.strip())
    if sold:
        value = float(sold[1]) * {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[sold[2]] / (1 if sold[3][0] == "B" else 8)
        if value > 0:
            return value
    known = {_letters(name): speed for name, speed in networks().items()}
    known |= {name.removeprefix("infiniband"): speed for name, speed in known.items()}
    ports = re.fullmatch(r"(?:(\d{1,3})\s*[x×*]\s*)?(.+)", rate.strip())
    if ports and _letters(ports[2]) in known and int(ports[1] or 1) > 0:
        return known[_letters(ports[2])] * int(ports[1] or 1)
    raise UsageError(
        f"machine '{words}': '@{rate}' is not a network rate.{nearest(rate, networks())} Write @200Gb (Gbit/s), @25GB "
        "(GB/s), or by name: @8xInfiniBand-NDR, @DGX-H100."
    )
