"""Gather a machine's measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from meshwise.machine.measure.result import DeviceResult, PathResult
from meshwise.spec.machine import Collective, Device, Link, Machine, link_between

COPY = "copy"
RATES = ("memory_rate", "matmuls", "launch")


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
    rates = {one.device: {key: _rounded(vars(one)[key]) for key in RATES} for one in computed}
    links = {(link.source, link.target): link for link in machine.links}
    collectives = []
    for result in results:
        if result.wrong is not None:
            continue  # what corrupts data has no speed
        timings, ends = _rounded(result.timings), (result.source, result.target)
        if result.operation == COPY:
            link = links.get(ends) or _unlisted(machine, *ends)
            links[ends] = replace(link, timings={**link.timings, result.path: timings})
        else:
            collectives.append(Collective(result.operation, result.ranks, result.path, timings))
    found = replace(
        machine,
        devices=tuple(replace(device, **rates.get(device.name, {})) for device in machine.devices),
        links=tuple(links.values()),
        collectives=tuple(collectives),
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
    """Round every figure to four digits: measurements are not more precise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rounded(getattr(value, field.name)) for field in fields(value)})
    return value


def _unlisted(machine: Machine, source: str, target: str) -> Link:
    known = link_between(machine, source, target) or link_between(machine, target, source)
    if known is not None:
        return replace(known, source=source, target=target, timings={})
    kind = "process" if source.startswith("cpu") else "network" if source.startswith("node") else ""
    return Link(source, target, kind)
