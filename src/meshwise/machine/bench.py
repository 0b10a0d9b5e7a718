"""Gather a machine's measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from meshwise.machine.measure.result import DeviceResult, PathResult
from meshwise.spec.machine import HOST, Collective, Device, Link, Machine, link_between

COPY = "copy"


@dataclass(frozen=True)
class Stop:
    """Why a bench ended before everything was measured, and the exit code for it."""

    why: str
    code: int


@dataclass(frozen=True)
class Bench:
    """The result of `meshwise.bench`: the measurements of a machine.

    machine: its devices, links and collectives with all measurements, as `meshwise bench --save` writes them.
    results: every path and collective with its times by size, including those that corrupt data.
    seconds: how long the bench took.
    stopped: why the bench ended early. None if everything was measured.
    """

    machine: Machine
    results: tuple[PathResult, ...]
    seconds: float
    stopped: Stop | None = None

    @property
    def wrong(self) -> tuple[PathResult, ...]:
        """The paths and collectives that delivered wrong bytes."""
        return tuple(result for result in self.results if result.wrong is not None)

    @property
    def exit_code(self) -> int:
        """The exit code of the bench. 1: a path corrupts data. The code of `stopped`: the bench was stopped early.
        0: neither. If both apply, the first counts."""
        return 1 if self.wrong else 0 if self.stopped is None else self.stopped.code


def bench_of(
    machine: Machine,
    results: Sequence[PathResult],
    computed: Iterable[DeviceResult],
    *,
    measured: str,
    seconds: float,
    stopped: Stop | None = None,
) -> Bench:
    """Add measurements to a machine. Measurements of paths that corrupt data are not added.

    measured: the date and the versions, for the machine file.
    """
    rates = {
        one.device: {"memory_rate": one.memory_rate, "matmuls": one.matmuls, "launch": one.launch}
        for one in map(_rounded, computed)
    }
    devices = tuple(replace(device, **rates.get(device.name, {})) for device in machine.devices)
    right = [_rounded(result) for result in results if result.wrong is None]  # what corrupts data has no speed
    found = replace(
        machine,
        devices=devices,
        links=_with_copies(machine, right),
        collectives=tuple(
            Collective(result.operation, result.ranks, result.path, result.timings)
            for result in right
            if result.operation != COPY
        ),
        measured=measured,
    )
    return Bench(found, tuple(results), seconds, stopped)


def only_devices(machine: Machine, names: Sequence[str]) -> Machine:
    """Return the machine with only the named devices, in the order of `names`, and the links between these devices.

    CPU workers share the only CPU device of the host, so `cpu:1` may be named even if the machine has only `cpu:0`.
    """
    known = {device.name: device for device in machine.devices}
    cpu = known.get("cpu:0", Device("cpu:0", machine.hosts[0].processor or "cpu"))
    devices = tuple(known[name] if name in known else replace(cpu, name=name) for name in names)
    kept = {"host", "device", "node", *names}
    links = tuple(link for link in machine.links if link.source in kept and link.target in kept)
    return replace(machine, name=f"{len(names)}x{devices[0].kind}", devices=devices, links=links)


def under_load(machine: Machine, lanes: Mapping[str, tuple[int | None, int | None]]) -> Machine:
    """Replace the generation and the number of lanes of each PCIe link to the host by the values that were seen during
    copies. An idle link may report lower values.

    lanes: (generation, lanes) by the name of the device. With None, the machine's value is kept.
    """
    links = []
    for link in machine.links:
        seen = next((lanes[end] for end in (link.source, link.target) if end in lanes), None)
        if seen is not None and HOST in (link.source, link.target) and link.kind == "pcie":
            link = replace(link, generation=seen[0] or link.generation, width=seen[1] or link.width)
        links.append(link)
    return replace(machine, links=tuple(links))


def merged(machines: Sequence[Machine]) -> Machine:
    """Merge several machines, each with one host, into one machine without links. Each device gets the number of its
    host."""
    first = machines[0]
    devices = tuple(replace(d, host=at) for at, machine in enumerate(machines) for d in machine.devices)
    hosts = tuple(machine.hosts[0] for machine in machines)
    warnings = tuple(
        f"node{at} has {name} {machine.versions.get(name, 'unknown')}, node0 has {version}: make them equal"
        for at, machine in enumerate(machines)
        for name, version in first.versions.items()
        if machine.versions.get(name) != version
    )
    every = tuple(dict.fromkeys(warning for machine in machines for warning in machine.warnings))
    name = f"{len(hosts)} hosts"
    return replace(first, name=name, devices=devices, links=(), hosts=hosts, warnings=every + warnings)


def _rounded(value: Any) -> Any:
    """Round every figure to four digits. Measurements are not more precise, and a machine file should be easy to
    read."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rounded(getattr(value, field.name)) for field in fields(value)})
    return value


def _with_copies(machine: Machine, results: Sequence[PathResult]) -> tuple[Link, ...]:
    """Return the machine's links, with the times of the measured copies added to the link that each copy used. If the
    machine has no link yet between the two devices of a copy, a new link is added."""
    measured: dict[tuple[str, str], Link] = {(link.source, link.target): link for link in machine.links}
    for result in results:
        if result.operation != COPY:
            continue
        ends = (result.source, result.target)
        if ends not in measured:
            measured[ends] = _unlisted(machine, *ends)
        measured[ends] = replace(measured[ends], timings={**measured[ends].timings, result.path: result.timings})
    return tuple(measured.values())


def _unlisted(machine: Machine, source: str, target: str) -> Link:
    known = link_between(machine, source, target) or link_between(machine, target, source)
    if known is not None:
        return replace(known, source=source, target=target, timings={})
    kind = "process" if source.startswith("cpu") else "network" if source.startswith("node") else ""
    return Link(source, target, kind)
