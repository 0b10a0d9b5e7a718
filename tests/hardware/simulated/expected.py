"""What must be found of each simulated machine, and what must be said of figures measured there. Written by hand, from
the vendors' listings named in `machines.py`, before the code that finds it.

The figures are of real machines: PCIe 5 and NVLink 4 pairs and the all-reduce of an H200 server (stas00/ml-engineering
744d01e, network), NVLink pairs of an H100 server, 376 GB/s with peer access (NVIDIA/nccl#1264), PCIe 4 host copies of
26.0 GB/s (nvbandwidth v0.8 README), 19.9 GB/s between two cards on different NUMA nodes (NVIDIA/cuda-samples#284), two
NVLink 2 of 48 GB/s and one of 24 (DGX-1, p2pBandwidthLatencyTest), 47 GB/s an xGMI link (TransferBench v1.52's limit
for MI300 is 48). Half of a PCIe 3 x16 link is what eight lanes give: 6.1 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
MIB = 2**20


@dataclass(frozen=True)
class Facts:
    """A link as it must be found. bandwidth in GB/s, nominal, one way."""

    kind: str
    generation: int | None
    width: int | None
    full_generation: int | None
    full_width: int | None
    bandwidth: float | None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Expected:
    """devices: name, part, memory in MiB, NUMA node, PCI address. host: of every device. pairs: a letter for each pair.

    says: what a warning must contain, each in one of its own; silent: what none may contain.
    """

    devices: tuple[tuple[str, str, int, int | None, str], ...]
    host: Facts | None
    pairs: str
    links: dict[str, Facts]
    processor: str
    cores: int
    sockets: int
    nodes: int
    says: tuple[tuple[str, ...], ...] = ()
    silent: tuple[str, ...] = ()


def _eight(part: str, memory: int, buses: str) -> tuple[tuple[str, str, int, int | None, str], ...]:
    """Eight alike, the first four on node 0, the others on node 1."""
    return tuple((f"cuda:{i}", part, memory, i // 4, f"0000:{bus}:00.0") for i, bus in enumerate(buses.split()))


ALL = """
. N N N N N N N
N . N N N N N N
N N . N N N N N
N N N . N N N N
N N N N . N N N
N N N N N . N N
N N N N N N . N
N N N N N N N .
"""
NVLINK4 = Facts("nvlink", 4, 18, 4, 18, 450, True)

EXPECTED: dict[str, Expected] = {
    "dgx_h100": Expected(
        devices=_eight("H100-SXM", 81559, "1b 43 52 61 9d c3 d1 df"),
        host=Facts("pcie", 5, 16, 5, 16, 63),
        pairs=ALL,
        links={"N": NVLINK4},
        processor="Intel(R) Xeon(R) Platinum 8480C",
        cores=224,
        sockets=2,
        nodes=2,
        silent=("PCIe", "unknown", "pip install", "idle", "NVLink"),
    ),
    "a100_pcie": Expected(
        devices=_eight("A100-PCIe-80GB", 81920, "4e 4f 50 51 ce cf d0 d1"),
        host=Facts("pcie", 4, 16, 4, 16, 31.5),
        pairs="""
. P P P S S S S
P . P P S S S S
P P . P S S S S
P P P . S S S S
S S S S . P P P
S S S S P . P P
S S S S P P . P
S S S S P P P .
""",
        links={
            "P": Facts("pcie", 4, 16, 4, 16, 31.5, True, ""),
            "S": Facts("pcie", 4, 16, 4, 16, 31.5, True, "socket"),
        },
        processor="AMD EPYC 7763 64-Core Processor",
        cores=256,
        sockets=2,
        nodes=2,
        silent=("unknown", "idle", "lanes"),
    ),
    "rtx4090": Expected(
        devices=(
            ("cuda:0", "RTX-4090", 24564, 0, "0000:01:00.0"),
            ("cuda:1", "RTX-4090", 24564, 0, "0000:21:00.0"),
            ("cuda:2", "RTX-4090", 24564, 0, "0000:41:00.0"),
            ("cuda:3", "RTX-4090", 24564, 0, "0000:61:00.0"),
        ),
        host=Facts("pcie", 1, 16, 4, 16, 31.5),
        pairs="""
. B B B
B . B B
B B . B
B B B .
""",
        links={"B": Facts("pcie", 1, 16, 4, 16, 31.5, False, "bridge")},
        processor="AMD Ryzen Threadripper PRO 5955WX 16-Cores",
        cores=32,
        sockets=1,
        nodes=1,
        says=(("idle", "generation 1", "generation 4", "meshwise bench"), ("peer", "through the host's memory")),
        silent=("lanes", "narrow", "slot"),
    ),
    "v100_x8": Expected(
        devices=(("cuda:0", "V100-PCIe-16GB", 16160, 0, "0000:3b:00.0"),),
        host=Facts("pcie", 3, 8, 3, 16, 15.8),
        pairs=".",
        links={},
        processor="Intel(R) Xeon(R) Silver 4110 CPU @ 2.10GHz",
        cores=8,
        sockets=1,
        nodes=1,
        says=(("cuda:0", "8 of 16 lanes"),),
        silent=("idle", "unknown"),
    ),
    "dgx1_v100": Expected(
        devices=_eight("V100-SXM2-32GB", 32510, "06 07 0a 0b 85 86 89 8a"),
        host=Facts("pcie", 3, 16, 3, 16, 15.8),
        pairs="""
. 1 1 2 2 S S S
1 . 2 1 S 2 S S
1 2 . 2 S S 1 S
2 1 2 . S S S 1
2 S S S . 1 1 2
S 2 S S 1 . 2 1
S S 1 S 1 2 . 2
S S S 1 2 1 2 .
""",
        links={
            "1": Facts("nvlink", 2, 1, 2, 1, 25, True),
            "2": Facts("nvlink", 2, 2, 2, 2, 50, True),
            "S": Facts("pcie", 3, 16, 3, 16, 15.8, False, "socket"),
        },
        processor="Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz",
        cores=80,
        sockets=2,
        nodes=2,
        silent=("lanes", "idle", "NVLinks are"),
    ),
    "laptop_gpu": Expected(
        devices=(("cuda:0", "NVIDIA GeForce RTX 4070 Laptop GPU", 8188, None, "0000:01:00.0"),),
        host=Facts("pcie", 4, 8, 4, 8, 15.75),
        pairs=".",
        links={},
        processor="13th Gen Intel(R) Core(TM) i9-13950HX",
        cores=32,
        sockets=1,
        nodes=1,
        says=(("NVIDIA GeForce RTX 4070 Laptop GPU", "catalog", "machine file"),),
        silent=("lanes", "idle"),
    ),
    "laptop": Expected(
        devices=(("cpu:0", "AMD Ryzen 7 7840U w/ Radeon 780M Graphics", 32768, None, ""),),
        host=None,
        pairs=".",
        links={},
        processor="AMD Ryzen 7 7840U w/ Radeon 780M Graphics",
        cores=16,
        sockets=1,
        nodes=1,
        says=(("AMD Ryzen 7 7840U", "catalog"),),
        silent=("lanes", "idle", "nvidia-ml-py"),
    ),
}
