"""Hold measured times and verified bytes of paths, rates of devices.

Tested in tests/machine/test_processes.py and test_bench.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.machine.measure.timing import Sample
from meshwise.spec.machine import Matmul
from meshwise.spec.timings import Timings, fitted


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


def result_of(spec: PathSpec, samples: Mapping[int, Sample], wrong: str | None, note: str) -> PathResult:
    """Build the `PathResult` of a measured path or collective.

    samples: the median and the percentiles of the measured times, by message size in bytes.
    wrong: where received data was wrong, or None.
    """
    seconds, p95, p99 = zip(*((sample.seconds, sample.p95, sample.p99) for sample in samples.values()), strict=True)
    in_step = [sample.in_step for sample in samples.values() if sample.in_step is not None]
    timings = fitted(list(samples), seconds, p95, p99, in_step)
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
