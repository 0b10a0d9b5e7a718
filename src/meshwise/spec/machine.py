"""Describe a machine: its devices and the links between them.

A described machine (`8xH100`, a file) and a measured one have the same type.

Values that are not known are None or empty, and nothing is guessed. Bandwidths are for one direction, in bytes/s. A
peak is the dense FLOP/s of a dtype, such as `bf16`. The source of every figure is given in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.spec.timings import Timings

HOST, DEVICE, NODE = "host", "device", "node"
"""Ends of a link that stand for more than one device: a host's memory, any device of a host, or any host."""


MOST_DEVICES = 131_072
"""The largest number of devices to accept. No machine has that many, and a typing error must not fill the memory."""


@dataclass(frozen=True)
class Matmul:
    """One measured matrix product, (m × k) by (k × n), and the seconds that it took."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        """The measured FLOP/s: 2 * m * n * k operations divided by `seconds`."""
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Device:
    """One device of a machine.

    name: the name on its host, such as `cuda:0` or `cpu:1`.
    part: the name of the product, as in the catalog or as the driver gives it.
    memory: the size of the memory in bytes.
    memory_bandwidth: the nominal bandwidth of the memory, in bytes/s.
    peak: the nominal dense FLOP/s, by dtype.
    achievable: the best share of the peak that was ever reached, by dtype.
    memory_rate: the measured bytes/s of the memory, read and written.
    matmuls: the measured matrix products.
    launch: the measured seconds to launch a kernel.
    origins: the source of each figure, by field name.
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
    """A link in one direction.

    source, target: the two ends of the link. An end is the name of a device, such as `cuda:0`, or HOST, DEVICE or NODE.
    kind: `pcie`, `nvlink`, `xgmi`, `c2c`, `memory`, `network` or `process`.
    bandwidth: the nominal bytes/s that the parts at both ends support.
    generation, width: the generation, and the number of PCIe lanes, NVLink links or xGMI links, that are now in use.
    full_generation, full_width: the generation and the width that the parts support.
    peer: whether one device can read the memory of the other device without the host.
    crosses: what is between the ends: empty (at most a switch), `bridge` (the host's PCIe bridge) or `socket`.
    timings: the measured times by path: `pinned`, `pageable`, `peer`, `staged`, `gloo` or `nccl`.
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
    """The measured times of one kind of collective, such as `all-reduce`, over `ranks` ranks.

    backend: `nccl` or `gloo`.
    timings: the times by size. The size is the size of the full tensor, as in nccl-tests.
    """

    kind: str
    ranks: int
    backend: str
    timings: Timings


@dataclass(frozen=True)
class Host:
    """One host of a machine.

    cores, memory: the number of processor cores and the bytes of memory that this process may use.
    cores_present, memory_present: the number of processor cores and the bytes of memory that the host has.
    limits: limits of this process, as bytes or counts: `shared memory`, `open files`, `locked memory`.
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
    """A machine: its hosts, devices and links.

    measured: the date and the versions of the measurement. Empty if the machine was not measured.
    versions: the versions of torch, the driver and so on, by name.
    warnings: what is unknown or looks wrong, each with what to do.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Host, ...] = (Host(),)
    collectives: tuple[Collective, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    measured: str = ""


def link_between(machine: Machine, source: str, target: str) -> Link | None:
    """Return the link from `source` to `target`.

    If the machine does not list this link, return its link between ends of the same kinds: for HOST and `cuda:0`, the
    link from HOST to DEVICE. Return None if the machine lists neither link.

    source, target: HOST, the name of a device (both on the same host), or `node0` and so on for a whole host.
    """
    # Reversed, so that the first of several links between the same ends is used.
    by_ends = {(link.source, link.target): link for link in reversed(machine.links)}
    return by_ends.get((source, target)) or by_ends.get((_any(source), _any(target)))


def _any(end: str) -> str:
    if end == HOST:
        return HOST
    return NODE if end.startswith(NODE) else DEVICE
