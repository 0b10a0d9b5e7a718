"""Hold what is measured, and tell who asked as it comes.

Tested in tests/machine/test_processes.py and test_bench.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median, quantiles

from meshwise.spec.machine import Machine, Matmul
from meshwise.spec.timings import Timings, fitted
from meshwise.workers.channel import Message, WorkerChannel
from meshwise.workers.watched import Listeners


@dataclass(frozen=True)
class PathSpec:
    """A path or a collective to measure.

    operation: `copy`, `one-to-all`, `all-to-one`, or a collective such as `all-reduce`.
    source, target: the name of a device, `host`, or a name such as `node0` for a host. Empty for a collective.
    path: `pinned`, `pageable`, `peer`, `staged`, `gloo` or `nccl`.
    ranks: the number of devices that take part.
    """

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
    """What was measured of a path or a collective.

    timings: the measured times by message size in bytes. The size of a copy is the number of bytes in one direction.
        The size of a collective is the number of bytes of the full tensor.
    wrong: where received bytes were wrong, or None if all bytes were right.
    note: another remark, such as that the time was used up before the largest size.
    """

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
    """The measurements of one device.

    memory_rate: bytes/s, counting both the bytes read and the bytes written.
    launch: the seconds that it takes to launch a kernel.
    """

    device: str
    memory_rate: float | None = None
    matmuls: tuple[Matmul, ...] = ()
    launch: float | None = None


# ---- Told while it is measured ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Functions that are called during a bench.

    starts: called with a name before each measurement.
    done: called with each result of a path or a device.
    found: called with the machines of all hosts, before links between hosts are measured.
    """

    starts: Callable[[str], object] = lambda text: None
    done: Callable[[PathResult | DeviceResult], object] = lambda result: None
    found: Callable[[Sequence[Machine]], object] = lambda machines: None


SILENT = Progress()


def sent_over(channel: WorkerChannel | None) -> Progress:
    """Return callbacks with which a worker reports the progress of its measurement to its launcher. In the launcher,
    the function `listeners` makes the object that receives these reports.

    channel: the connection to the launcher. If it is None, the callbacks do nothing.
    """
    if channel is None:
        return SILENT

    def sender(event: str) -> Callable[[object], None]:
        return lambda value: channel.send("measuring", event=event, value=pickle.dumps(value).hex())

    return Progress(*(sender(field.name) for field in fields(Progress)))


def listeners(progress: Progress) -> Listeners:
    """Return the functions with which a launcher listens to its workers during a bench. They call the functions of
    `progress` with what the workers send."""

    def received(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            getattr(progress, message["event"])(pickle.loads(bytes.fromhex(message["value"])))

    return Listeners(message=received)
