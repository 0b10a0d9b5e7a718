"""Describe a machine: its devices and the links between them.

It has the same type whether it is described (`8xH100`, a file) or measured.

What is not known is None or empty; nothing is guessed. Bandwidths are one way, in bytes/s; a peak is dense, in FLOP/s,
by dtype word (`bf16`). Every figure has its origin in words.

Tested in tests/machine/test_judge.py and test_machine_file.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.spec.timings import Timings

HOST, DEVICE, NODE = "host", "device", "node"
"""Ends of a link that are no single device: the memory of a host, any device of a host, any host of the machine."""


MOST_DEVICES = 131_072
"""The largest number of devices to accept, more than any machine has: a typing error must not fill the memory."""


@dataclass(frozen=True)
class Matmul:
    """The measured seconds of a matrix product, (m × k) by (k × n)."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        """The measured FLOP/s: 2mnk over the seconds."""
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Device:
    """One device. name: `cuda:0`, `cpu:1`, as counted on its host. part: the product, as the catalog names it, or as
    the driver does.
    memory: bytes. memory_bandwidth (bytes/s) and peak (dense FLOP/s by dtype): nominal. achievable: the best share of
    the peak that was ever reached, by dtype. memory_rate (bytes/s, read and written), matmuls and launch (seconds per
    kernel): measured on this device. origins: the source of each figure, by field name."""

    name: str
    part: str
    host: int = 0
    memory: int | None = None
    memory_bandwidth: float | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    achievable: Mapping[str, float] = field(default_factory=dict)
    memory_rate: float | None = None
    matmuls: tuple[Matmul, ...] = ()
    launch: float | None = None
    numa: int | None = None
    pci: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of device: `cuda`, `cpu`, `xpu`."""
        return self.name.split(":")[0]

    @property
    def best_rates(self) -> dict[str, float]:
        """The best measured FLOP/s of matrix products, by dtype."""
        found: dict[str, float] = {}
        for product in self.matmuls:
            found[product.dtype] = max(product.rate, found.get(product.dtype, 0.0))
        return found


@dataclass(frozen=True)
class Link:
    """A link in one direction. source, target: device names, or HOST, DEVICE, NODE for any of them.

    kind: `pcie`, `nvlink`, `xgmi`, `c2c`, `memory`, `network` or `process`. bandwidth: nominal bytes/s, as the parts at
    both ends support. generation, width (PCIe lanes, or number of NVLink or xGMI links): as found; full_generation,
    full_width: what the parts support. peer: whether one device reads the other's memory without the host. crosses:
    what is between: empty (at most a switch), `bridge` (the host's PCIe bridge), `socket`. timings: measured, by path:
    `pinned`, `pageable`, `peer`, `staged`, `gloo`, `nccl`; with ` both ways` if both directions ran at once.
    """

    source: str
    target: str
    kind: str
    bandwidth: float | None = None
    latency: float | None = None
    generation: int | None = None
    width: int | None = None
    full_generation: int | None = None
    full_width: int | None = None
    peer: bool | None = None
    crosses: str = ""
    timings: Mapping[str, Timings] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True)
class Collective:
    """Measured times of one kind of collective (`all-reduce`) over `ranks` ranks by a backend (`nccl`, `gloo`).

    The sizes in `timings` are those of the full tensor, as in nccl-tests.
    """

    kind: str
    ranks: int
    backend: str
    timings: Timings


@dataclass(frozen=True)
class Host:
    """One host. cores, memory (bytes): what this process may use of cores_present and memory_present.

    limits: of this process, as bytes or counts, by name: `shared memory`, `open files`, `locked memory`.
    """

    name: str = ""
    processor: str = ""
    cores: int | None = None
    cores_present: int | None = None
    sockets: int | None = None
    numa_nodes: int | None = None
    memory: int | None = None
    memory_present: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """A machine: hosts, devices, links. measured: date and versions of the measurement; empty if not measured.

    versions: of torch, the driver and so on, by name. warnings: what is unknown or looks wrong, each with what to do.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Host, ...] = (Host(),)
    collectives: tuple[Collective, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    measured: str = ""


def device_label(machine: Machine, device: Device) -> str:
    """Return the device's name; if the machine has several hosts, with its host's in front: `node1 cuda:0`."""
    return device.name if len(machine.hosts) < 2 else f"node{device.host} {device.name}"


def link_between(machine: Machine, source: str, target: str) -> Link | None:
    """Return the link from `source` to `target`; if there is none, the link for any such ends; else None.

    The ends are two device names of the same host, HOST, or `node0` and so on for a whole host.
    """
    by_ends = {(link.source, link.target): link for link in reversed(machine.links)}  # of two alike the first
    return by_ends.get((source, target)) or by_ends.get((_any(source), _any(target)))


def _any(end: str) -> str:
    if end == HOST:
        return HOST
    return NODE if end.startswith(NODE) else DEVICE
