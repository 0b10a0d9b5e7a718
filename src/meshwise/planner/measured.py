"""Measure operators at their shapes on this processor, and cache times.

Each operator is run with real tensors (timing.py). Its time is cached in the user's cache folder, keyed by torch's
version, the processor, the number of threads, the number of workers and the call. The memory that an operator allocates
internally is measured with it. What Python, modules and autograd add to an operator is measured once for all operators.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.discovery.host_facts import host_facts
from meshwise.hardware.measure.compute import memory_rate
from meshwise.planner import timing
from meshwise.planner.fakes.world import fake_world
from meshwise.planner.prices import Prices
from meshwise.planner.timing import median_of, threads_set
from meshwise.planner.work import Operation, Work
from meshwise.records.files import write_text
from meshwise.spec.machine import Machine

ADAM = 7
"""How many operators torch's Adam runs in a step for one parameter without weight decay: lerp_, mul_, addcmul_, sqrt,
div, add_, addcdiv_."""
MEMORY_RATE = "bytes a second of a copy"
PROGRAM, DTENSOR = "what a program adds to an operator", "what DTensor adds to an operator"


class OperatorTimes:
    """Measured seconds of operators on this CPU, cached in a file. An instance can be passed as `known` to
    `kernel_seconds`."""

    def __init__(self, threads: int | None = None, folder: Path | None = None, workers: int = 1) -> None:
        """threads: the number of threads of a worker."""
        self.threads, self.workers = threads or torch.get_num_threads(), workers
        facts = {"torch": torch.__version__, "processor": host_facts().processor, "threads": self.threads}
        facts |= {"workers": workers, "capability": torch.backends.cpu.get_cpu_capability()}
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"operators-{name}.json"
        self._facts = facts
        self._seconds, self._inside = _read(self.path)
        self.ended: dict[str, str] = {}
        """For each call whose measurement crashed: a sentence for the user."""

    def __call__(self, operation: Operation) -> float | None:
        """Return the measured seconds of an operator, or None if it was not measured."""
        return self._seconds.get(operation.call) if operation.call else None

    def inside(self, operation: Operation) -> Sequence[int]:
        """Return what an operator allocates internally, as `timing.timed` measures it. Empty if it was not measured."""
        return self._inside.get(operation.call, ())

    def memory_rate(self) -> float:
        """Return how many bytes per second a memory copy reads and writes. This rate is measured in the first call."""
        if MEMORY_RATE not in self._seconds:
            with threads_set(self.threads):
                self._remember({MEMORY_RATE: memory_rate(torch.device("cpu"), 0.1)})
        return self._seconds[MEMORY_RATE]

    @property
    def program(self) -> float | None:
        """The seconds that Python, modules and autograd add to each operator. None until measured."""
        return self._seconds.get(PROGRAM)

    @property
    def dtensor(self) -> float | None:
        """The seconds that DTensor adds to each operator of an optimizer. None until measured."""
        return self._seconds.get(DTENSOR)

    def measure(self, works: Iterable[Work], budget: float = 20.0) -> int:
        """Measure the operators of these steps that have not been measured yet, the most expensive first, for about
        `budget` seconds. Return how many are left."""
        works, known = list(works), {**self._seconds, **self.ended}
        waiting = [operation for operation in _most_first(works) if operation.call not in known]
        if waiting and budget:
            timing.timed("", 1)  # start the timing process: its startup does not count toward the budget
        end = time.perf_counter() + budget
        found: dict[str, float] = {}
        inside: dict[str, Sequence[int]] = {}
        left = len(waiting)
        with threads_set(self.threads), torch.no_grad():
            if self.program is None:
                found[PROGRAM] = program_seconds()
            if self.dtensor is None and any(work.dtensors for work in works):
                found[DTENSOR] = dtensor_seconds()
            for operation in waiting:
                if time.perf_counter() > end:
                    break
                left -= 1
                seconds, taken, how = timing.timed(operation.call, self.threads, self.workers - 1)
                if how:
                    self.ended[operation.call] = f"{operation.name} crashed the process that measured its time ({how})"
                if seconds is not None:
                    found[operation.call] = seconds
                if taken:
                    inside[operation.call] = taken
        self._remember(found, inside)
        return left

    def _remember(self, found: dict[str, float], inside: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Add measurements to the cache file. Keep measurements that another process has written to it meanwhile."""
        seconds, bytes_inside = _read(self.path)
        self._seconds = {**seconds, **self._seconds, **found}
        self._inside = {**bytes_inside, **self._inside, **inside}
        if found:
            table = {"measured on": self._facts, "seconds": self._seconds, "inside": self._inside}
            with contextlib.suppress(OSError):  # if this fails, the next process measures again
                write_text(self.path, json.dumps(table, indent=0))


def prices_here(
    machine: Machine,
    works: Sequence[Work],
    budget: float = 20.0,
    folder: Path | None = None,
    workers: int | None = None,
) -> Prices:
    """Return the estimated times of operators and collectives on a machine of CPU workers."""
    device = machine.devices[0]
    if device.part not in ("cpu", host_facts().processor):
        return Prices(machine)
    workers = workers or sum(other.host == device.host for other in machine.devices)
    cores = machine.hosts[device.host].cores or len(allowed_cores())
    times = OperatorTimes(max(cores // workers, 1), folder, min(workers, cores))
    times.measure(works, budget)
    rate = device.memory_rate or times.memory_rate()
    devices = tuple(each if each.memory_rate else replace(each, memory_rate=rate) for each in machine.devices)
    described, crowd = replace(machine, devices=devices), max(workers / cores, 1.0)
    return Prices(
        described, {device.part: times}, times.program, times.dtensor, crowd, times.inside, crash_notes(times, works)
    )


def crash_notes(times: OperatorTimes, works: Iterable[Work]) -> tuple[str, ...]:
    """Return a sentence for each operator in `works` that crashed the process which measured its time."""
    calls = {launch.what.call for work in works for launch in work.launches if isinstance(launch.what, Operation)}
    return tuple(
        dict.fromkeys(
            f"{why}. Its time is estimated from its bytes." for call, why in times.ended.items() if call in calls
        )
    )


def cache_folder() -> Path:
    """Return the cache folder: `$XDG_CACHE_HOME/meshwise`, or `~/.cache/meshwise` if the variable is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise"


def program_seconds() -> float:
    """Measure the overhead of Python, modules and autograd, in seconds per operator."""
    torch.manual_seed(0)
    width, depth = 16, 24
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    model = torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.ReLU())))
    batch = torch.rand(4, width)
    with torch.enable_grad():
        step = median_of(lambda: model(batch).sum().backward(), 30)
    # Per layer, the forward launches the first two of `each`, the backward the others. Views count as program time.
    left, bias = torch.rand(width, width), torch.rand(width)
    each = [
        lambda: torch.ops.aten.addmm.default(bias, batch, left),
        lambda: torch.ops.aten.relu.default(batch),
        lambda: torch.ops.aten.threshold_backward.default(batch, batch, 0),
        lambda: torch.ops.aten.mm.default(batch, left),
        lambda: torch.ops.aten.mm.default(batch.t(), batch),
        lambda: torch.ops.aten.sum.dim_IntList(batch, [0], True),
        lambda: torch.ops.aten.add_.Tensor(left, left),
    ]
    alone = sum(median_of(call, 30) for call in each)
    return max(step / depth - alone, 0.0) / len(each)


def dtensor_seconds() -> float:
    """Measure how many more seconds per operator an optimizer takes on DTensors than on plain tensors."""
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))

        def seconds(made: Callable[[], torch.Tensor]) -> float:
            parameter = torch.nn.Parameter(made())
            parameter.grad = made()
            optimizer = torch.optim.Adam([parameter], foreach=False)
            return median_of(optimizer.step, 30)

        part = torch.rand(16)
        return max(seconds(lambda: DTensor.from_local(part, mesh, [Shard(0)])) - seconds(part.clone), 0.0) / ADAM


def _most_first(works: Iterable[Work]) -> list[Operation]:
    """Return the distinct operators in `works` that can be measured here, the most expensive first."""
    counts = Counter(launch.what for work in works for launch in work.launches if isinstance(launch.what, Operation))
    callable_here = [operation for operation in counts if operation.call]
    return sorted(callable_here, key=lambda one: -counts[one] * (one.flops / 10 + one.read + one.written))


def _read(path: Path) -> tuple[dict[str, float], dict[str, Sequence[int]]]:
    """Return the seconds and the internal allocations of each call in a cache file.
    Both are empty if unreadable."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        seconds = {str(call): float(value) for call, value in table["seconds"].items()}
        return seconds, {str(call): tuple(map(int, sizes)) for call, sizes in table["inside"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}
