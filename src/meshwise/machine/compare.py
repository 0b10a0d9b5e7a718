"""Two measurements of one machine: what is gone, what is new, and which path, collective or device changed its speed.

A change of speed is clear when it is above 10 % and lies outside the spread of both measurements: the slower median is
above the other's 95th percentile. Without percentiles, the 10 % alone decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import Collective, Device, Link, Machine
from meshwise.spec.timings import Timings
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, seconds_text

CLEAR = 0.10
"""A smaller change of speed than this is told as none."""


@dataclass(frozen=True)
class Change:
    """what: `host -> cuda:0, pinned, 1.0 GiB`. old and new: as people read them, empty for what is not there.

    kind: `better`, `worse`, `changed` (neither, such as a version), `gone`, `new` or `same`. speed: new over old, above
    1 is faster; None for what has no speed.
    """

    what: str
    old: str
    new: str
    kind: str
    speed: float | None = None

    @property
    def clear(self) -> bool:
        """Whether something changed beyond the noise."""
        return self.kind != "same"


def compare(old: Machine, new: Machine) -> list[Change]:
    """What changed from `old` to `new`, and what was compared without a clear change (kind `same`)."""
    return [
        *_devices(old, new),
        *_links(old, new),
        *_collectives(old, new),
        *_texts("version of ", old.versions, new.versions),
    ]


def _devices(old: Machine, new: Machine) -> Iterator[Change]:
    before, after = ({(d.host, d.name): d for d in machine.devices} for machine in (old, new))
    for key in [*before, *(key for key in after if key not in before)]:
        name = key[1] if len(old.hosts) < 2 and len(new.hosts) < 2 else f"node{key[0]} {key[1]}"
        if key not in after:
            yield Change(name, before[key].part, "", "gone")
        elif key not in before:
            yield Change(name, "", after[key].part, "new")
        else:
            yield from _device(name, before[key], after[key])


def _device(name: str, old: Device, new: Device) -> Iterator[Change]:
    if old.part != new.part:
        yield Change(f"{name}, part", old.part, new.part, "changed")
    if old.memory is not None and new.memory is not None and old.memory != new.memory:
        yield Change(f"{name}, memory", bytes_text(old.memory), bytes_text(new.memory), "changed")
    if old.memory_rate is not None and new.memory_rate is not None:
        rates = (old.memory_rate, new.memory_rate)
        yield _speed(f"{name}, memory rate", bandwidth_text(rates[0]), bandwidth_text(rates[1]), rates[1] / rates[0])
    if old.launch and new.launch:
        yield _speed(f"{name}, launch", seconds_text(old.launch), seconds_text(new.launch), old.launch / new.launch)
    best = [_best_products(device) for device in (old, new)]
    for dtype in best[0]:
        if dtype in best[1]:
            before, after = best[0][dtype], best[1][dtype]
            yield _speed(f"{name}, {dtype} matmul", flops_text(before), flops_text(after), after / before)


def _best_products(device: Device) -> dict[str, float]:
    """The best rate by dtype over the shapes."""
    found: dict[str, float] = {}
    for product in device.matmuls:
        found[product.dtype] = max(product.rate, found.get(product.dtype, 0.0))
    return found


def _links(old: Machine, new: Machine) -> Iterator[Change]:
    before, after = ({(link.source, link.target): link for link in machine.links} for machine in (old, new))
    for key in [*before, *(key for key in after if key not in before)]:
        name = f"{key[0]} -> {key[1]}"
        if key not in after:
            yield Change(f"{name}, link", _link_text(before[key]), "", "gone")
        elif key not in before:
            yield Change(f"{name}, link", "", _link_text(after[key]), "new")
        else:
            yield from _link(name, before[key], after[key])


def _link_text(link: Link) -> str:
    """`pcie 5 x16`, as far as it is known."""
    number = f" {link.generation}" if link.generation is not None else ""
    return f"{link.kind or 'unknown'}{number}{f' x{link.width}' if link.width is not None else ''}"


def _link(name: str, old: Link, new: Link) -> Iterator[Change]:
    if _link_text(old) != _link_text(new):
        yield Change(f"{name}, link", _link_text(old), _link_text(new), _lanes(old, new))
    if old.peer is not None and new.peer is not None and old.peer != new.peer:
        words = {True: "on", False: "off"}
        kind = "better" if new.peer else "worse"
        yield Change(f"{name}, peer access", words[old.peer], words[new.peer], kind)
    for path, timings in old.timings.items():
        if path in new.timings:
            yield from _path(f"{name}, {path}", timings, new.timings[path])
        else:
            yield Change(f"{name}, {path}", "measured", "", "gone")
    for path in new.timings:
        if path not in old.timings:
            yield Change(f"{name}, {path}", "", "measured", "new")


def _lanes(old: Link, new: Link) -> str:
    """Whether generation and width became better or worse; `changed` where they do not both say the same."""
    before, after = (old.generation, old.width), (new.generation, new.width)
    if old.kind != new.kind or None in before or None in after:
        return "changed"
    more = [b > a for a, b in zip(before, after, strict=True) if a is not None and b is not None and a != b]
    return "better" if all(more) else "worse" if not any(more) else "changed"


def _collectives(old: Machine, new: Machine) -> Iterator[Change]:
    before, after = ({(c.kind, c.ranks, c.backend): c for c in machine.collectives} for machine in (old, new))
    for key, collective in before.items():
        name = f"{key[0]}, {key[1]} ranks, {key[2]}"
        if key in after:
            yield from _path(name, collective.timings, after[key].timings, collective)
        else:
            yield Change(name, "measured", "", "gone")
    for key in after:
        if key not in before:
            yield Change(f"{key[0]}, {key[1]} ranks, {key[2]}", "", "measured", "new")


def _path(name: str, old: Timings, new: Timings, collective: Collective | None = None) -> Iterator[Change]:
    """The time of the smallest size that both have, and the rate of the largest."""
    sizes = sorted(set(old.sizes) & set(new.sizes))
    if not sizes:
        yield Change(f"{name}, sizes", bytes_text(old.sizes[-1]), bytes_text(new.sizes[-1]), "changed")
        return
    for size in dict.fromkeys((sizes[-1], sizes[0])):
        before, after = (timings.seconds[timings.sizes.index(size)] for timings in (old, new))
        if size == sizes[-1]:
            kind, ranks = (collective.kind, collective.ranks) if collective is not None else ("copy", 1)
            texts = [bandwidth_text(bus_bandwidth(kind, ranks, size, seconds)) for seconds in (before, after)]
        else:
            texts = [seconds_text(seconds) for seconds in (before, after)]
        within = after <= _p95(old, size) if after > before else before <= _p95(new, size)
        yield _speed(f"{name}, {bytes_text(size)}", texts[0], texts[1], before / after, within)


def _p95(timings: Timings, size: int) -> float:
    """The 95th percentile at a size; 0 where it was not kept, so that nothing lies within it."""
    return timings.p95[timings.sizes.index(size)] if timings.p95 else 0.0


def _speed(what: str, old: str, new: str, speed: float, within_spread: bool = False) -> Change:
    if within_spread or 1 / (1 + CLEAR) <= speed <= 1 + CLEAR:
        return Change(what, old, new, "same", speed)
    return Change(what, old, new, "better" if speed > 1 else "worse", speed)


def _texts(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            kind = "gone" if key not in new else "new" if key not in old else "changed"
            yield Change(f"{name}{key}", old.get(key, ""), new.get(key, ""), kind)
