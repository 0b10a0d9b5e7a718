"""Measure a machine: its devices, the paths between them, and whether each is as good as its parts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from meshwise.api.machines import find_machine
from meshwise.machine.bench import Bench, Stop, bench_of, only_devices, under_load
from meshwise.machine.cores import allowed_cores
from meshwise.machine.find import accelerators, find_devices
from meshwise.machine.measure.alone import Compute, device_names, measure_alone
from meshwise.machine.measure.in_process import Lanes, measure_in_process
from meshwise.machine.measure.processes import measure_processes
from meshwise.machine.measure.result import PathResult
from meshwise.machine.measure.sizes import DEFAULT, fitting, read_sizes
from meshwise.machine.memory import free_bytes
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import WorkerFailed
from meshwise.spec.machine import Machine

WHAT = ("compute", "links", "collectives")
SECONDS = {"cpu": 40.0, "cuda": 90.0}
"""Of measuring by default; starting workers and checking bytes comes on top."""
MOST_WORKERS = 4
BUFFERS = 4
"""Of a message's size in each rank at once: what is sent, what is received, the pattern, and one for the backend."""


Tell = Callable[[str], None]
"""Hears in words what is measured now."""
Done = Callable[[PathResult | Compute], None]
"""Hears of each path and device when it has been measured."""


@dataclass
class Heard:
    """What is known so far, while a bench goes on."""

    done: Done
    results: list[PathResult] = field(default_factory=list)
    computed: list[Compute] = field(default_factory=list)
    lanes: dict[str, Lanes] = field(default_factory=dict)

    def path(self, result: PathResult) -> None:
        self.results.append(result)
        self.done(result)

    def device(self, computed: Compute) -> None:
        self.computed.append(computed)
        self.done(computed)


def bench(
    devices: str | None = None,
    *,
    what: Sequence[str] = WHAT,
    sizes: str | None = None,
    seconds: float | None = None,
    tell: Tell = lambda text: None,
    done: Done = lambda result: None,
) -> Bench:
    """Measure devices and the paths between them, check every byte, and judge.

    devices: as for `meshwise run`; default: all accelerators, else CPU workers on the cores of this process. what:
    some of `compute`, `links`, `collectives`. sizes: `1K:1G`. seconds: of measuring, in all. A Ctrl-C ends it early:
    what was measured is kept, and `stopped` says so. Raises UsageError for sizes that do not fit in memory.
    """
    began = time.perf_counter()
    slots = find_devices(parse_devices(devices or default_devices()))
    names, kind = device_names(slots), slots[0].device
    chosen = sizes_for(slots, sizes)
    machine = only_devices(find_machine(), names)
    heard, stopped = Heard(done), None
    try:
        for part in _parts(slots, what, chosen, seconds or SECONDS.get(kind, SECONDS["cuda"]), heard, tell):
            part()
    except (KeyboardInterrupt, WorkerFailed) as error:
        stopped = stop_by(error)
    took = time.perf_counter() - began
    machine = under_load(machine, heard.lanes)
    return bench_of(machine, heard.results, heard.computed, measured=stamp(machine), seconds=took, stopped=stopped)


def stop_by(error: KeyboardInterrupt | WorkerFailed) -> Stop:
    """A Ctrl-C, another signal that was raised as KeyboardInterrupt(number), or a worker that failed."""
    if isinstance(error, WorkerFailed):
        return Stop(str(error), error.exit_code)
    number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    return Stop(f"by {name} before all was measured; what is above is whole", 128 + number)


def stamp(machine: Machine) -> str:
    """When, and with which versions, as the machine file keeps it."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC" + (f", {versions}" if versions else "")


def default_devices() -> str:
    """All accelerators; without one as many CPU workers as cores, from two to four."""
    return "all" if accelerators()[1] else f"{min(max(len(allowed_cores()), 2), MOST_WORKERS)}xcpu"


def sizes_for(slots: Sequence[WorkerSlot], words: str | None) -> tuple[int, ...]:
    """The sizes that are asked, or those of the default that fit. Raises UsageError where an asked one does not fit."""
    sizes, asked, host = read_sizes(words or DEFAULT), words is not None, free_bytes(torch.device("cpu"))
    if slots[0].device == "cpu":
        return fitting(sizes, host // len(slots), BUFFERS, asked)
    # All-to-one has a buffer of each other device on one of them; pinned buffers are the host's memory.
    free = min(free_bytes(torch.device(slot.name)) for slot in slots)
    return fitting(fitting(sizes, host, BUFFERS, asked), free, max(BUFFERS, len(slots) + 1), asked)


def _parts(
    slots: Sequence[WorkerSlot], what: Sequence[str], sizes: tuple[int, ...], seconds: float, heard: Heard, tell: Tell
) -> Iterator[Callable[[], object]]:
    """What is done one after the other; time is shared equally."""
    alone, together = "compute" in what, [part for part in what if part != "compute"]
    copies = "links" in what and slots[0].device != "cpu"
    processes = len(slots) > 1 and bool(together)
    budget = seconds / max(alone + copies + processes, 1)
    if alone:
        tell(f"each of {len(slots)} devices alone")
        yield lambda: measure_alone(slots, budget, heard.device)
    if copies:
        yield lambda: heard.lanes.update(measure_in_process(device_names(slots), sizes, budget, heard.path, tell))
    if processes:
        yield lambda: measure_processes(slots, sizes, budget, together, heard.path, tell)
