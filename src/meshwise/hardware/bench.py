"""Measure a machine's devices and paths, and the links between hosts."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.find import accelerators, find_devices
from meshwise.hardware.machines import find_machine
from meshwise.hardware.measure.copies import keep_busy, measure_in_process
from meshwise.hardware.measure.processes import device_names, measure_alone, measure_hosts, measure_processes
from meshwise.hardware.measure.result import (
    DEFAULT,
    SILENT,
    Bench,
    DeviceResult,
    PathResult,
    Stop,
    bench_of,
    fitting,
    merged,
    only_devices,
    read_sizes,
)
from meshwise.hardware.measure.result import Progress as Progress
from meshwise.hardware.memory import free_bytes
from meshwise.hardware.views.bench import bench_text
from meshwise.spec.devices import WorkerSlot, has_streams, parse_devices
from meshwise.spec.errors import WorkerFailed
from meshwise.spec.machine import Machine
from meshwise.terminal.notebook import shown_by
from meshwise.transfer.collectives import gather_objects
from meshwise.workers.join import join

shown_by(Bench, bench_text)
WHAT = ("compute", "links", "collectives")
SECONDS_ON_CPU, SECONDS, SECONDS_OF_HOSTS = 40.0, 90.0, 60.0
"""Default seconds of measuring in `bench`: on CPUs, on other devices, between hosts. Starting workers adds to them."""
MOST_WORKERS = 4
BUFFERS = 4
"""How many buffers a rank holds at once: to send, to receive, to check the received bytes, and inside the backend."""


@dataclass
class Measured:
    """Collects the results of a bench while it runs, and reports each result to the caller of the bench."""

    reported: Progress
    began: float = field(default_factory=time.perf_counter)
    results: list[PathResult] = field(default_factory=list)
    devices: list[DeviceResult] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)

    @property
    def progress(self) -> Progress:
        return Progress(self.reported.starts, self._done, self.machines.extend)

    def _done(self, result: PathResult | DeviceResult) -> None:
        if isinstance(result, PathResult):
            self.results.append(result)
        else:
            self.devices.append(result)
        self.reported.done(result)

    def bench(self, machine: Machine, stopped: Stop | None) -> Bench:
        """Return the results so far as a `Bench`."""
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC" + (f", {versions}" if versions else "")
        seconds = time.perf_counter() - self.began
        return bench_of(machine, self.results, self.devices, measured=when, seconds=seconds, stopped=stopped)


def bench(
    devices: str | None = None,
    *,
    what: Sequence[str] = WHAT,
    sizes: str | None = None,
    seconds: float | None = None,
    progress: Progress = SILENT,
) -> Bench:
    """Measure devices and the paths between them, and check every byte.

    devices: the devices, as for `meshwise run`. By default all accelerators, or else CPU workers on the cores of this
        process.
    what: what to measure, any of `compute`, `links`, `collectives`.
    sizes: the sizes of messages, such as `1K:1G`.
    seconds: how long to measure, in all.
    progress: callbacks for what is measured now and for each result.

    A Ctrl-C ends the bench early. Results so far are kept, and `stopped` says why it ended. Raises UsageError for sizes
    that exceed the memory.
    """
    measured, stopped = Measured(progress), None
    slots = find_devices(parse_devices(default_devices() if devices is None else devices))
    chosen = sizes_for(slots, sizes)
    keep_busy(device_names(slots))  # the driver reports too few lanes for an idle PCIe link
    machine = only_devices(find_machine(), device_names(slots))
    try:
        _measure(slots, what, chosen, seconds, measured.progress)
    except (KeyboardInterrupt, WorkerFailed) as error:
        stopped = stop_by(error)
    return measured.bench(machine, stopped)


def stop_by(error: KeyboardInterrupt | WorkerFailed) -> Stop:
    """Return why a bench stopped, with the exit code: by Ctrl-C, by another signal (KeyboardInterrupt(number)), or by a
    failed worker."""
    if isinstance(error, WorkerFailed):
        return Stop(str(error), error.exit_code)
    number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    return Stop(f"by {name} before all was measured; the lines above are complete", 128 + number)


def default_devices() -> str:
    """Return `all` if there is an accelerator, or else some CPU workers, such as `4xcpu`."""
    return "all" if accelerators()[1] else f"{min(max(len(allowed_cores()), 2), MOST_WORKERS)}xcpu"


def sizes_for(slots: Sequence[WorkerSlot], words: str | None) -> tuple[int, ...]:
    """Return the message sizes that `words` names and that fit into memory."""
    sizes, asked, host = read_sizes(words or DEFAULT), words is not None, free_bytes(torch.device("cpu"))
    if slots[0].device == "cpu":
        return fitting(sizes, host // len(slots), BUFFERS, asked)
    # In an all-to-one copy, one device holds a buffer for every other device. Pinned buffers use the host's memory.
    free = min(free_bytes(torch.device(slot.name)) for slot in slots)
    return fitting(fitting(sizes, host, BUFFERS, asked), free, max(BUFFERS, len(slots) + 1), asked)


def _measure(
    slots: Sequence[WorkerSlot],
    what: Sequence[str],
    sizes: tuple[int, ...],
    seconds: float | None,
    progress: Progress,
) -> None:
    """Run each part of the bench, in order."""
    alone, together = "compute" in what, [part for part in what if part != "compute"]
    on_cpu = slots[0].device == "cpu"
    copies = "links" in what and not on_cpu
    processes = len(slots) > 1 and bool(together)
    budget = (seconds or (SECONDS_ON_CPU if on_cpu else SECONDS)) / max(alone + copies + processes, 1)
    if alone:
        progress.starts(f"each of {len(slots)} devices alone")
        measure_alone(slots, budget, progress)
    if copies:
        measure_in_process(device_names(slots), sizes, budget, progress)
    if processes:
        measure_processes(slots, sizes, budget, together, progress)


def bench_hosts(*, what: Sequence[str], sizes: str | None, seconds: float | None, progress: Progress) -> Bench | None:
    """Measure the paths between hosts, check every byte, and judge the results. Only rank 0 returns them."""
    # There is one worker per host, on the first accelerator or on all cores.
    kind, _ = accelerators()
    slot = find_devices(parse_devices(f"{kind}:0" if has_streams(kind) else "1xcpu"))[0]
    message_sizes, measured, world = sizes_for([slot], sizes), Measured(progress), join().world
    shown = measured.progress if world.rank == 0 else SILENT
    facts = gather_objects((world.local_rank, find_machine()))
    shown.found([machine for local_rank, machine in facts if local_rank == 0])
    measure_hosts(message_sizes, seconds or SECONDS_OF_HOSTS, what, shown)
    return measured.bench(merged(measured.machines), None) if world.rank == 0 else None
