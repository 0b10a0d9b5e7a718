"""Compare two measurements of one machine.

It tells what is gone, what is new, and which path, collective or device changed its speed.

A change of speed is clear when it is above 10 % and lies outside the spread of both measurements: the slower median is
above the other's 95th percentile. Without percentiles, the 10 % alone decide.

Tested in tests/machine/test_machine_compare.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import Collective, Device, Link, Machine, device_label
from meshwise.spec.timings import Timings
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, seconds_text

Value = TypeVar("Value")
CLEAR = 0.10
"""The smallest relative change of a measured speed that is reported as better or worse."""


@dataclass(frozen=True)
class Change:
    """One difference between two measurements of a machine.

    what: what changed, such as `host -> cuda:0, pinned, 1.0 GiB`.
    old, new: the values as text, or "" for a value that is missing.
    kind: `better`, `worse`, `changed` (neither, such as a version), `gone`, `new` or `same`.
    speed: the new speed divided by the old speed, so that above 1 is faster. None for values without a speed.
    """

    what: str
    old: str
    new: str
    kind: str
    speed: float | None = None


def compare(old: Machine, new: Machine) -> list[Change]:
    """Compare two measurements of a machine. Speeds that did not clearly change are included, with the kind `same`."""
    several = old if len(old.hosts) > 1 else new
    both = (old, new)
    devices = [{device_label(several, device): device for device in machine.devices} for machine in both]
    links = [{f"{link.source} -> {link.target}": link for link in machine.links} for machine in both]
    collectives = [{f"{c.kind}, {c.ranks} ranks, {c.backend}": c for c in machine.collectives} for machine in both]
    versions = [{f"version of {name}": version for name, version in machine.versions.items()} for machine in both]
    return [
        *_changes(devices, lambda device: device.part, _device),
        *_changes(links, _link_text, _link, suffix=", link"),
        *_changes(collectives, _measured, _collective),
        *_changes(versions, str, _version),
    ]


def _changes(
    both: Sequence[Mapping[str, Value]],
    text: Callable[[Value], str],
    of_both: Callable[[str, Value, Value], Iterator[Change]],
    suffix: str = "",
) -> Iterator[Change]:
    """Compare two tables of items, such as links by their names, and yield the differences. Items that are missing in
    one table are reported as gone or new.

    both: the table of the older measurement, then the table of the newer measurement. The keys are names of items.
    text: describes an item that is gone or new.
    of_both: yields the differences of an item that is in both tables.
    suffix: appended to the name of an item that is gone or new.
    """
    old, new = both
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield Change(name + suffix, text(old[name]), "", "gone")
        elif name not in old:
            yield Change(name + suffix, "", text(new[name]), "new")
        else:
            yield from of_both(name, old[name], new[name])


def _measured(value: object) -> str:
    return "measured"


def _device(name: str, old: Device, new: Device) -> Iterator[Change]:
    if old.part != new.part:
        yield Change(f"{name}, part", old.part, new.part, "changed")
    if old.memory is not None and new.memory is not None and old.memory != new.memory:
        yield Change(f"{name}, memory", bytes_text(old.memory), bytes_text(new.memory), "changed")
    before, after = _rates(old), _rates(new)
    for what in [what for what in before if what in after]:
        yield _speed(f"{name}, {what}", before[what][1], after[what][1], after[what][0] / before[what][0])


def _rates(device: Device) -> dict[str, tuple[float, str]]:
    """Return the measured rates of a device, by the name of the rate, such as `memory rate`. Each rate is a pair: the
    rate as a number, and its text for the user. A larger number always means faster. The number for `launch` is
    therefore 1 / seconds, although the text shows seconds."""
    found = {}
    if device.memory_rate is not None:
        found["memory rate"] = (device.memory_rate, bandwidth_text(device.memory_rate))
    if device.launch:
        found["launch"] = (1 / device.launch, seconds_text(device.launch))
    return found | {f"{dtype} matmul": (rate, flops_text(rate)) for dtype, rate in device.best_rates.items()}


def _link_text(link: Link) -> str:
    """Format a link as `pcie 5 x16`, without the values that are unknown."""
    number = f" {link.generation}" if link.generation is not None else ""
    return f"{link.kind or 'unknown'}{number}{f' x{link.width}' if link.width is not None else ''}"


def _link(name: str, old: Link, new: Link) -> Iterator[Change]:
    if _link_text(old) != _link_text(new):
        yield Change(f"{name}, link", _link_text(old), _link_text(new), _lanes(old, new))
    if old.peer is not None and new.peer is not None and old.peer != new.peer:
        words = {True: "on", False: "off"}
        kind = "better" if new.peer else "worse"
        yield Change(f"{name}, peer access", words[old.peer], words[new.peer], kind)
    paths = [{f"{name}, {path}": timings for path, timings in link.timings.items()} for link in (old, new)]
    yield from _changes(paths, _measured, _path)


def _lanes(old: Link, new: Link) -> str:
    """Return whether a link's generation and width became `better` or `worse`. If this is unknown, or if one became
    better and the other worse, return `changed`."""
    before, after = (old.generation, old.width), (new.generation, new.width)
    if old.kind != new.kind or None in before or None in after:
        return "changed"
    more = [b > a for a, b in zip(before, after, strict=True) if a is not None and b is not None and a != b]
    return "better" if all(more) else "worse" if not any(more) else "changed"


def _collective(name: str, old: Collective, new: Collective) -> Iterator[Change]:
    return _path(name, old.timings, new.timings, old.kind, old.ranks)


def _path(name: str, old: Timings, new: Timings, kind: str = "copy", ranks: int = 1) -> Iterator[Change]:
    """Compare two measurements of a path: the rates at the largest common message size, and the times at the
    smallest."""
    sizes = sorted(set(old.sizes) & set(new.sizes))
    if not sizes:
        yield Change(f"{name}, sizes", bytes_text(old.sizes[-1]), bytes_text(new.sizes[-1]), "changed")
        return
    for size in dict.fromkeys((sizes[-1], sizes[0])):
        before, after = (timings.seconds[timings.sizes.index(size)] for timings in (old, new))
        if size == sizes[-1]:
            texts = [bandwidth_text(bus_bandwidth(kind, ranks, size, seconds)) for seconds in (before, after)]
        else:
            texts = [seconds_text(seconds) for seconds in (before, after)]
        within = after <= _p95(old, size) if after > before else before <= _p95(new, size)
        yield _speed(f"{name}, {bytes_text(size)}", texts[0], texts[1], before / after, within)


def _p95(timings: Timings, size: int) -> float:
    """Return the 95th percentile of the measured times for a message size, in seconds. Return 0 if percentiles were not
    recorded.

    A slower median up to this time counts as equal speed.
    """
    return timings.p95[timings.sizes.index(size)] if timings.p95 else 0.0


def _speed(what: str, old: str, new: str, speed: float, within_spread: bool = False) -> Change:
    if within_spread or 1 / (1 + CLEAR) <= speed <= 1 + CLEAR:
        return Change(what, old, new, "same", speed)
    return Change(what, old, new, "better" if speed > 1 else "worse", speed)


def _version(name: str, old: str, new: str) -> Iterator[Change]:
    if old != new:
        yield Change(name, old, new, "changed")
