"""Look up nominal and reached rates of known devices and links.

The figures are read from `catalog.toml`, which gives the source of each. A part that is not in this file stays unknown.
A name that merely looks similar is not accepted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from meshwise.hardware.file_keys import FIGURES, read_table
from meshwise.hardware.quantity import read_quantity
from meshwise.spec.machine import DEVICE, HOST, NODE, Link, Machine

NOT_CONFIRMED = " (from memory, not confirmed)"
"""Appended to the origin of a figure that nobody has looked up in a source yet."""
LANES = {"pcie": 16, "nvlink": 1}
"""For each generation, the catalog gives the rate of 16 PCIe lanes together, and of a single NVLink."""
ARCHITECTURES = (
    ("volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    ("cdna2", "cdna3", "cdna4"),
)
"""Device generations, one tuple per vendor, oldest first. `achievable` uses them to find the nearest generation."""


@dataclass(frozen=True)
class PartLink:
    """The link of a device model in the catalog, such as the NVLinks of an H100."""

    kind: str
    bandwidth: float
    generation: int | None = None
    width: int | None = None
    mesh: bool = False
    origin: str = ""

    @property
    def pair(self) -> float:
        """One-way bytes/s between two devices. In a mesh, this is the bandwidth of a single link."""
        return self.bandwidth / self.width if self.mesh and self.width else self.bandwidth

    @property
    def full(self) -> dict[str, Any]:
        """The nominal bandwidth, generation and width of this link, as keyword arguments of a `Link`."""
        return {
            "bandwidth": self.bandwidth,
            "full_generation": self.generation,
            "full_width": self.width,
            "origin": self.origin,
        }


@dataclass(frozen=True, eq=False)  # compared by identity, so that parts can be dict keys
class CatalogPart:
    """A device model in the catalog.

    kind: the name that torch uses for this kind of device.
    memory: in bytes.
    memory_bandwidth: in bytes/s.
    multiprocessors: the number of SMs or compute units, over which the tiles of a matmul are distributed.
    peak: dense FLOP/s by dtype.
    achievable: the highest share of the peak that a matmul reached, by dtype.
    link: the link between devices.
    bridge: a link between devices that is sold separately.
    host_link: the link to the host.
    peer: False if the vendor disabled peer access, or None if unknown.
    origins: the source of each figure, by names such as `memory`, `peak.bf16` and `link`.
    """

    name: str
    family: str
    architecture: str
    kind: str = "cuda"
    aliases: tuple[str, ...] = ()
    driver: tuple[str, ...] = ()
    memory: int | None = None
    memory_bandwidth: float | None = None
    multiprocessors: int | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    achievable: Mapping[str, float] = field(default_factory=dict)
    link: PartLink | None = None
    bridge: PartLink | None = None
    host_link: PartLink | None = None
    peer: bool | None = None
    note: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    def link_of(self, kind: str) -> PartLink | None:
        """Return the link of this device model that is of the given kind, such as `nvlink`."""
        links = (self.link, self.bridge, self.host_link)
        return next((link for link in links if link is not None and link.kind == kind), None)


def parts() -> tuple[CatalogPart, ...]:
    """Return all device models in the catalog, such as `H100-SXM`, in the order of the catalog."""
    return tuple(_parts().values())


def part(name: str) -> CatalogPart | None:
    """Return the part with exactly this name in the catalog, or None."""
    return _parts().get(name)


@cache
def part_of_driver_name(name: str, memory: int | None) -> CatalogPart | None:
    """Return the device model in the catalog for a name that a driver reports, such as `NVIDIA H100 80GB HBM3`."""
    bare = re.sub(r"\s+", " ", name.strip())
    bare = re.sub(r"^(NVIDIA|AMD) ", "", bare, flags=re.IGNORECASE)
    named = [p for p in parts() if any(re.fullmatch(pattern, bare, re.IGNORECASE) for pattern in p.driver)]
    if memory is not None:
        named = [p for p in named if p.memory is None or 0.85 * p.memory <= memory <= 1.02 * p.memory]
    return named[0] if len(named) == 1 else None


@cache
def field_origins(part: CatalogPart) -> Mapping[str, str]:
    """Return the source of each figure of a device model, such as the data sheet from which the memory was read."""
    found: dict[str, str] = {}
    for figure, origin in part.origins.items():
        field = figure.split(".")[0]
        if field in ("memory", "memory_bandwidth", "peak", "achievable") and found.setdefault(field, origin) != origin:
            found[figure] = origin
    return found


def nominal(part: CatalogPart) -> dict[str, Any]:
    """Return the name and the nominal figures of a device model, such as its peak FLOP/s, as keyword arguments of a
    `Device`."""
    return {"part": part.name, **{name: getattr(part, name) for name in FIGURES}, "origins": field_origins(part)}


def nominal_rate(kind: str, generation: int | None, width: int | None) -> float | None:
    """Return the one-way bytes/s of `width` PCIe lanes or NVLinks of a generation."""
    rate = _generations(kind).get(generation or 0) if kind in LANES else None
    return None if rate is None or not width else rate * width / LANES[kind]


@cache
def networks() -> Mapping[str, float]:
    """Return the one-way bytes/s of each kind of network."""
    rates = _text()["network"]["rates"]
    return {name: read_quantity(rate, "bytes/s", f"catalog.toml, {name}") for name, rate in rates.items()}


def reached(kind: str, generation: int | None, path: str) -> float | None:
    """Return which share of a link's nominal bandwidth was reached in the catalog's measurements. Return None if there
    is no measurement of this path on this kind of link.

    kind: the kind of link, such as `nvlink`.
    path: the kind of copy that was measured, such as `pair`, or a collective such as `all-reduce`.

    If this generation was not measured, the nearest measured generation is used. Of two equally near generations, the
    older generation is used.
    """
    found = {r.get("generation"): r[path] for r in _text()["reached"] if r["kind"] == kind and path in r}
    best = min(found, key=lambda measured: (_apart(measured, generation), measured or 0), default=None)
    return found.get(best)


def achievable(device_part: CatalogPart, dtype: str) -> float | None:
    """Return the share of the peak FLOP/s that matmuls of this dtype reach on a device model.

    The share is the first of these that is known:
    1. the share of this dtype on this device model. bf16 and fp16 run on the same units, so the share of bf16 is used
    for fp16, and vice versa.
    2. the share of this dtype on a device of the nearest generation of the same vendor.
    3. the share of another dtype on this device model.

    Returns None if no such share is known.
    """
    alike = {"fp16": "bf16", "bf16": "fp16"}
    for known in (dtype, alike.get(dtype, dtype)):
        if known in device_part.achievable:
            return device_part.achievable[known]
    line = next((line for line in ARCHITECTURES if device_part.architecture in line), ())
    near = [p for p in parts() if p.architecture in line and {dtype, alike.get(dtype)} & p.achievable.keys()]
    if near:
        place = line.index(device_part.architecture)
        other = min(near, key=lambda p: abs(line.index(p.architecture) - place))
        return other.achievable[dtype if dtype in other.achievable else alike[dtype]]
    return next(iter(device_part.achievable.values()), None)


def _apart(generation: int | None, wanted: int | None) -> int:
    return 0 if generation is None or generation == wanted else abs(generation - wanted) if wanted else 9


@cache
def _text() -> dict[str, Any]:
    return tomllib.loads(resources.files("meshwise.hardware").joinpath("catalog.toml").read_text(encoding="utf-8"))


@cache
def _generations(kind: str) -> Mapping[int, float]:
    rates = _text()[kind]["generations"]
    return {int(name): read_quantity(rate, "bytes/s", f"catalog.toml, {kind} {name}") for name, rate in rates.items()}


@cache
def _parts() -> Mapping[str, CatalogPart]:
    return {name: _part(name, entry) for name, entry in _text()["part"].items()}


def _part(name: str, entry: Mapping[str, Any]) -> CatalogPart:
    where = f"catalog.toml, {name}"
    plain = ("memory", "memory_bandwidth", "multiprocessors", "link", "bridge", "host", "peer")
    figures = [key for key in plain if key in entry]
    figures += [f"{table}.{key}" for table in ("peak", "achievable") for key in entry.get(table, ())]
    origins = {figure: _origin(entry, figure) for figure in figures}
    links: dict[str, Any] = {key: _link(entry, key, origins, where) for key in ("link", "bridge", "host")}
    return CatalogPart(
        name,
        entry.get("family", name),
        entry["architecture"],
        kind="cpu" if entry["architecture"] == "cpu" else "cuda",
        aliases=tuple(entry.get("aliases", ())),
        driver=tuple(entry.get("driver", ())),
        host_link=links.pop("host"),
        origins=origins,
        **links,
        **{key: entry[key] for key in ("multiprocessors", "peer", "note") if key in entry},
        **read_table({key: entry[key] for key in FIGURES if key in entry}, FIGURES, where),
    )


def _origin(entry: Mapping[str, Any], figure: str) -> str:
    """Return the source of a figure such as `peak.fp8` or, if there is none, of its table (`peak`)."""
    sources = entry["sources"]
    key = sources.get(figure) or sources[figure.split(".")[0]]
    origin: str = _text()["sources"][key]
    return origin + (NOT_CONFIRMED if figure in entry.get("unconfirmed", ()) else "")


def _link(entry: Mapping[str, Any], key: str, origins: Mapping[str, str], where: str) -> PartLink | None:
    if key not in entry:
        return None
    link = dict(entry[key])
    if "bandwidth" in link:
        bandwidth = read_quantity(link["bandwidth"], "bytes/s", f"{where}, {key}")
    else:
        bandwidth = _generations(link["kind"])[link["generation"]] * link["width"] / LANES[link["kind"]]
    return PartLink(
        link["kind"], bandwidth, link.get("generation"), link.get("width"), link.get("mesh", False), origins[key]
    )


def nominal_of(link: Link) -> tuple[float | None, int | None]:
    """Return (bytes/s one way, generation) that the parts at both ends of a link support, even if the link was found
    slower. None if unknown."""
    rate = link.bandwidth or nominal_rate(link.kind, link.full_generation, link.full_width)
    return rate, link.full_generation


def expected_collective(machine: Machine, kind: str, ranks: int) -> tuple[float | None, float | None]:
    """Return the bus bandwidth that a collective on one host should reach, and its nominal bandwidth, in bytes/s. The
    devices form a ring, and the slowest link of the ring limits the rate. The result is the nominal rate of this link,
    times the share of the nominal rate that was reached in the catalog's measurements. None if unknown.

    kind: the collective, such as `all-reduce`.
    """
    on_one_host = sum(device.host == 0 for device in machine.devices)
    found = [
        (*_ring(machine, link, ranks), link.kind)
        for link in machine.links
        if HOST not in (link.source, link.target) and not link.source.startswith(NODE) and link.kind != "process"
    ]
    rates = [(rate, generation, link) for rate, generation, link in found if rate is not None]
    if not rates or len(rates) < len(found) or not 1 < ranks <= on_one_host:
        return None, None
    rate, generation, link = min(rates, key=lambda known: known[0])
    share = reached(link, generation, kind) or reached(link, generation, "all-reduce")
    return None if share is None else rate * share, rate


def _ring(machine: Machine, link: Link, ranks: int) -> tuple[float | None, int | None]:
    """Return (bytes/s, generation) of a ring over links like `link`. In a mesh, several rings run at once."""
    rate, generation = nominal_of(link)
    names = {device.part for device in machine.devices if link.source in (device.name, DEVICE)}
    end = part(names.pop()) if len(names) == 1 else None
    own = None if end is None else end.link_of(link.kind)
    if own is not None and own.mesh:
        return min(own.bandwidth, own.pair * max(ranks - 1, link.width or 1)), generation
    return rate, generation
