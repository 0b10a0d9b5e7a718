"""Estimate the time of each launch of a step.

Equal launches are estimated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.planner.collective_price import collective_seconds
from meshwise.planner.constants import FIGURES
from meshwise.planner.price import (
    LAUNCH,
    MEASURED,
    MODEL,
    Known,
    Priced,
    copy_seconds,
    fused_share,
    kernel_seconds,
    launch_seconds,
    priced,
    times,
)
from meshwise.planner.work import CollectiveOperation, Copy, Operation, What, Work
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Device, Machine
from meshwise.spec.units import plural


@dataclass(frozen=True)
class Overlap:
    """How much computing and communication slow each other while both run on a device."""

    compute: float
    communication: float
    inside: Overlap | None = None


def overlap_of(device: Device, end: int = 0) -> Overlap:
    """Return how much computing and communication slow each other on this kind of device."""
    if device.kind != "cpu":
        return _overlap("gpu", end)
    return replace(_overlap("cpu", end), inside=_overlap("cpu.inside", end))


def _overlap(kind: str, end: int) -> Overlap:
    figures = (FIGURES[f"overlap.{what}.{kind}"] for what in ("compute", "communication"))
    compute, communication = (max(figure.value * figure.spread**end, 1.0) for figure in figures)
    return Overlap(compute, communication)


class Prices:
    """Estimates the times of launches on the devices of one machine. If a launch occurs several times, it is estimated
    once."""

    def __init__(
        self,
        machine: Machine,
        known: Mapping[str, Known] | None = None,
        program: float | None = None,
        dtensor: float | None = None,
        crowd: float = 1.0,
        inside: Callable[[Operation], Sequence[int]] = lambda operation: (),
        notes: tuple[str, ...] = (),
        compiled: bool = False,
    ) -> None:
        """known: for each device model, a function that returns measured seconds of operators. program: the seconds
        that Python, modules and autograd add to each operator of a CPU worker. dtensor: the seconds that DTensor adds
        to each operator of an optimizer. crowd: the number of workers per core, at least 1. inside: returns how many
        bytes an operator allocates and frees while it runs, as measured. notes: remarks for the user. compiled: whether
        the plan compiles blocks on accelerators (`Plan.compile`)."""
        self.machine, self._crowd, self.inside, self.notes = machine, crowd, inside, notes
        self._program, self._dtensor, self.compiled = program, dtensor or 0.0, compiled
        self._known = known or {}
        self._asked: dict[tuple[int, What], Priced | None] = {}
        self._objects: dict[tuple[int, int], tuple[What, Priced | None]] = {}
        self._hosts: dict[tuple[int, type, str, bool], Priced] = {}
        alike: dict[str, int] = {}
        self._alike = [alike.setdefault(speed_of(device), len(alike)) for device in machine.devices]

    def of(self, what: What, rank: int) -> Priced | None:
        """Return the estimated time of an operator, collective or copy on a rank, without the time that it waits."""
        key = self._alike[rank], id(what)  # by identity: equal calls are one object in a trace
        found = self._objects.get(key)
        if found is None:
            alike = self._alike[rank], what
            if alike not in self._asked:
                self._asked[alike] = self._ask(what, self.machine.devices[rank])
            found = self._objects[key] = what, self._asked[alike]
        return found[1]

    def _ask(self, what: What, device: Device) -> Priced | None:
        if isinstance(what, Copy):
            return copy_seconds(what, device, self.machine)
        if isinstance(what, CollectiveOperation):
            return collective_seconds(what, self.machine)
        seconds = kernel_seconds(what, device, self._known.get(device.part))
        if self.compiled and seconds is not None and device.kind != "cpu":
            seconds = times(seconds, fused_share(what))
        return None if seconds is None else times(seconds, self._crowd)

    def host(self, what: What, rank: int, phase: str = "other", dtensors: bool = False) -> Priced:
        """Return the estimated time that a rank's host takes to launch `what` in this phase."""
        key = self._alike[rank], type(what), phase, dtensors
        if key not in self._hosts:
            self._hosts[key] = self._host(what, self.machine.devices[rank], phase, dtensors)
        return self._hosts[key]

    def _host(self, what: What, device: Device, phase: str, dtensors: bool) -> Priced:
        if device.kind != "cpu":
            if isinstance(what, CollectiveOperation):
                figure = FIGURES["launch.collective"]
                return priced(figure.value, figure.spread, MODEL, LAUNCH)
        elif self._program is not None and isinstance(what, Operation):
            seconds = self._program + (self._dtensor if dtensors and phase == "optimizer" else 0.0)
            return priced(seconds * self._crowd, FIGURES["measured.program"].spread, MEASURED, LAUNCH)
        found = launch_seconds(device, phase)
        if self.compiled and device.kind != "cpu" and phase != "optimizer":
            found = times(found, FIGURES["compile.launch"].value)
        return found


def missing(works: Sequence[Work], prices: Prices) -> tuple[str, ...]:
    """Return a sentence for each kind of launch whose time cannot be estimated with `prices`."""
    machine = prices.machine
    unknown: Counter[str] = Counter()
    for work in works:
        if work.ranks > len(machine.devices):
            raise UsageError(
                f"machine '{machine.name}': this machine has {plural(len(machine.devices), 'device')}, but the plan "
                f"needs {work.ranks}. Name a machine with at least that many, such as {work.ranks}xH100."
            )
        for launch in work.launches:
            if prices.of(launch.what, work.rank) is None:
                unknown[_named(launch.what, machine.devices[work.rank])] += 1
    return tuple(f"no figure is known for {what} ({plural(count, 'time')})" for what, count in unknown.most_common())


def _named(what: What, device: Device) -> str:
    if isinstance(what, Operation):
        dtype = what.dtypes[0] if what.dtypes else "no dtype"
        return f"{what.name} in {dtype} on {device.part}"
    if isinstance(what, Copy):
        return f"copies between {device.part} and its host"
    return f"{what.kind} of {plural(len(what.ranks), 'rank')}"


def speed_of(device: Device) -> str:
    """Return a text that describes how fast a device is, so that equal devices can be recognized."""
    return repr(
        (device.kind, device.part, device.memory, device.peak, device.matmuls, device.memory_rate, device.launch)
    )
