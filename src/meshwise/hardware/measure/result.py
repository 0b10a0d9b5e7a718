"""Hold measurements, and report each one to the caller."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from statistics import median, quantiles
from typing import Any

from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Collective, Device, Link, Machine, Matmul, link_between
from meshwise.spec.timings import Timings, fitted
from meshwise.spec.units import bytes_text
from meshwise.workers.channel import Message, WorkerChannel
from meshwise.workers.watched import Listeners


@dataclass(frozen=True)
class PathSpec:
    """A path or a collective to measure."""

    operation: str
    source: str
    target: str
    path: str
    ranks: int

    def __str__(self) -> str:
        ends = f" {self.source} -> {self.target}" if self.source else ""
        return f"{self.operation}{ends}, {self.path}"


@dataclass(frozen=True)
class PathResult(PathSpec):
    """The measurements of a path or a collective."""

    timings: Timings
    wrong: str | None = None
    note: str = ""


def result_of(
    spec: PathSpec,
    samples: Mapping[int, Sequence[float]],
    wrong: str | None,
    note: str,
    in_step: Sequence[float] = (),
) -> PathResult:
    """Build the `PathResult` of a measured path or collective."""
    cuts = [quantiles(seconds, n=100, method="inclusive") for seconds in samples.values()]
    p95, p99 = ([each[at] for each in cuts] for at in (94, 98))
    timings = fitted(list(samples), list(map(median, samples.values())), p95, p99, in_step)
    return PathResult(spec.operation, spec.source, spec.target, spec.path, spec.ranks, timings, wrong, note)


@dataclass(frozen=True)
class DeviceResult:
    """The measurements of one device."""

    device: str
    memory_rate: float | None = None
    matmuls: tuple[Matmul, ...] = ()
    launch: float | None = None


# ---- Reported during a bench -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Functions that are called during a bench."""

    starts: Callable[[str], object] = lambda text: None
    done: Callable[[PathResult | DeviceResult], object] = lambda result: None
    found: Callable[[Sequence[Machine]], object] = lambda machines: None


SILENT = Progress()


def sent_over(channel: WorkerChannel | None) -> Progress:
    """Return callbacks with which a worker reports the progress of its measurement to its launcher."""
    if channel is None:
        return SILENT

    def sender(event: str) -> Callable[[object], None]:
        return lambda value: channel.send("measuring", event=event, value=pickle.dumps(value).hex())

    return Progress(*(sender(field.name) for field in fields(Progress)))


def listeners(progress: Progress) -> Listeners:
    """Return the functions with which a launcher listens to its workers during a bench."""

    def received(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            getattr(progress, message["event"])(pickle.loads(bytes.fromhex(message["value"])))

    return Listeners(message=received)


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
    """Return a `Bench` of these results, and of `machine` with the measurements added."""
    rates = {one.device: {key: _rounded(vars(one)[key]) for key in RATES} for one in computed}
    links = {(link.source, link.target): link for link in machine.links}
    collectives = []
    for result in results:
        if result.wrong is not None:
            continue  # the speed of a path that corrupts data is not recorded
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
    """Merge several machines, each with one host, into one machine without links."""
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


DEFAULT = "1K:1G"
FACTOR = 4
SHARE_OF_MEMORY = 0.8
"""The share of free memory that may be used for buffers. The program needs the rest."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"(\d{1,16})\s*([KMGT]?)(?:i?B)?"
_RANGE = re.compile(rf"{_SIZE}(?:\s*:\s*{_SIZE}(?:\s*:\s*(\d{{1,9}}))?)?", re.IGNORECASE)
_WRITE = "Write --sizes 1K:1G, one size (64M), or 1K:1G:2 to double from size to size."


def read_sizes(words: str) -> tuple[int, ...]:
    """Parse a range of sizes such as `1K:1G`, and return its sizes in bytes."""
    found = _RANGE.fullmatch(words.strip())
    if found is None:
        raise UsageError(f"--sizes {words} is not a range of sizes. {_WRITE}")
    number, unit, end, end_unit, by = found.groups()
    first = int(number) * _UNITS[unit.upper()]
    last, factor = int(end) * _UNITS[end_unit.upper()] if end else first, int(by or FACTOR)
    if not 1 <= first <= last <= 1 << 50 or factor < 2:
        raise UsageError(f"--sizes {words}: sizes must grow, up to 1024T, by a factor of at least 2. {_WRITE}")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes) if sizes[-1] == last else (*sizes, last)


def fitting(sizes: tuple[int, ...], free: int, buffers: int, asked: bool) -> tuple[int, ...]:
    """Return the sizes for which there is enough memory. Raises UsageError if the user asked for a larger one."""
    most = int(free * SHARE_OF_MEMORY) // buffers
    small = tuple(size for size in sizes if size <= most)
    if asked and len(small) < len(sizes):
        most_word = _word(most) if sizes[0] > most else f"{_word(sizes[0])}:{_word(most)}"
        raise UsageError(
            f"--sizes: to measure {bytes_text(sizes[-1])}, {buffers} buffers with {bytes_text(sizes[-1] * buffers)} in "
            f"all are needed, but only {bytes_text(free)} are free. Write at most --sizes {most_word}."
        )
    return small or sizes[:1]


def _word(size: int) -> str:
    """Round a size down to a power of two, and format it for --sizes, such as `64M`."""
    power = 1 << max(size.bit_length() - 1, 0)
    unit = next((unit for unit in "TGMK" if power >= _UNITS[unit]), "")
    return f"{power // _UNITS[unit]}{unit}"
