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
"""Ends of a link that mean any: a host's memory, any device of one host, any host of the machine."""


MOST_DEVICES = 131_072
"""More than any machine ever built: a typing error must not fill the memory."""


@dataclass(frozen=True)
class Matmul:
    """One measured matrix product, (m × k) by (k × n)."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Device:
    """One device. name: `cuda:0`, `cpu:1`, as its own host counts; part: the catalog's name, or the driver's.

    memory in bytes; memory_bandwidth in bytes/s and peak in dense FLOP/s are the part's nominal figures, achievable the
    best share of the peak that anyone has reached, by dtype. memory_rate (bytes/s, read and written), matmuls and
    launch (seconds a kernel) were measured on this very device. origins: where each figure came from, by field name.
    """

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
        """Its kind: `cuda`, `cpu`, `xpu`."""
        return self.name.split(":")[0]

    @property
    def best_rates(self) -> dict[str, float]:
        """The best measured FLOP/s by dtype, over the shapes."""
        found: dict[str, float] = {}
        for product in self.matmuls:
            found[product.dtype] = max(product.rate, found.get(product.dtype, 0.0))
        return found


@dataclass(frozen=True)
class Link:
    """From `source` to `target`, one way: device names, or HOST, DEVICE, NODE for any of them.

    kind: `pcie`, `nvlink`, `xgmi`, `c2c`, `memory`, `network` or `process`. bandwidth (bytes/s): nominal, as the parts
    at both ends support it. generation and width (PCIe lanes, or NVLink and xGMI links) were found, full_ is
    what the parts support. peer: one device reads the other's memory without the host. crosses: what lies between,
    `` (nothing but a switch), `bridge` (the host's PCIe bridge) or `socket`. timings: measured, by path: `pinned`,
    `pageable`, `peer`, `staged`, `gloo`, `nccl`, followed by ` both ways` if both directions ran at once.
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
    """Measured times of one collective: kind (`all-reduce`), the number of ranks, the backend (`nccl`, `gloo`).

    Sizes are of the full tensor, as nccl-tests count them.
    """

    kind: str
    ranks: int
    backend: str
    timings: Timings


@dataclass(frozen=True)
class Host:
    """One host: its processor, the cores and the bytes that this process may use there, and its limits.

    limits: bytes or counts by name: `shared memory`, `open files`, `locked memory`.
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
    """Hosts, devices, links. measured: date and versions of the measurement, empty for a described machine.

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
    """Return the device's name, with its host's number in front if there are several hosts."""
    return device.name if len(machine.hosts) < 2 else f"node{device.host} {device.name}"


def link_between(machine: Machine, source: str, target: str) -> Link | None:
    """Return the link from `source` to `target`: this very one, else the one for any such pair; None if unknown.

    Ends are device names of one host, HOST, or `node0` and so on for a whole host.
    """
    by_ends = {(link.source, link.target): link for link in reversed(machine.links)}  # of two alike the first
    return by_ends.get((source, target)) or by_ends.get((_any(source), _any(target)))


def _any(end: str) -> str:
    if end == HOST:
        return HOST
    return NODE if end.startswith(NODE) else DEVICE
