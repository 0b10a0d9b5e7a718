"""The simulated machines: what NVML, sysfs and /proc would say there. What must be found of them is in `expected.py`.

Matrices are copied from listings that people posted; where a machine has no listing of its own, it says what was
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hardware.simulated.fake_nvml import FakeNvml, Gpu, NVMLError_LibraryNotFound
from tests.hardware.simulated.tree import Computer, Pci, plant_computer, plant_pci, write

GIB = 2**30


@dataclass(frozen=True)
class Simulated:
    """What `discover` is given: the NVML module and the folders that stand for /sys and /proc."""

    nvml: FakeNvml
    sys: Path
    proc: Path


def _of(root: Path, computer: Computer, nvml: FakeNvml, devices: list[Pci]) -> Simulated:
    plant_computer(root, computer)
    plant_pci(root, devices, computer)
    write(root, "sys/fs/cgroup/cpu.max", "max 100000")
    write(root, "sys/fs/cgroup/memory.max", "max")
    write(root, "proc/self/cgroup", "0::/")
    return Simulated(nvml, root / "sys", root / "proc")


def _pci(gpu: Gpu, root: str = "0000:00", above: tuple[str, ...] = ()) -> Pci:
    return Pci(gpu.bus, root, gpu.numa, gpu.pcie, gpu.own, above)


# vllm-project/vllm#13855, "DGX machines": NV18 between all, cores 0-55,112-167 on node 0 and 56-111,168-223 on node 1.
# Addresses 1b to df: NVIDIA DGX H100/H200 User Guide.
H100_TOPOLOGY = """
GPU0  X    NV18 NV18 NV18 NV18 NV18 NV18 NV18
GPU1  NV18 X    NV18 NV18 NV18 NV18 NV18 NV18
GPU2  NV18 NV18 X    NV18 NV18 NV18 NV18 NV18
GPU3  NV18 NV18 NV18 X    NV18 NV18 NV18 NV18
GPU4  NV18 NV18 NV18 NV18 X    NV18 NV18 NV18
GPU5  NV18 NV18 NV18 NV18 NV18 X    NV18 NV18
GPU6  NV18 NV18 NV18 NV18 NV18 NV18 X    NV18
GPU7  NV18 NV18 NV18 NV18 NV18 NV18 NV18 X
"""


def dgx_h100(root: Path) -> Simulated:
    buses = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
    gpus = [
        Gpu("NVIDIA H100 80GB HBM3", f"0000:{bus}:00.0", 81559, at // 4, (5, 16), (5, 16), (5, 16), nvlink=6, mig=False)
        for at, bus in enumerate(buses)
    ]
    computer = Computer("Intel(R) Xeon(R) Platinum 8480C", ("0-55,112-167", "56-111,168-223"), (0, 1), 2048 * GIB)
    pci = [
        _pci(gpu, f"0000:{int(gpu.bus[5:7], 16) - 2:02x}", (f"0000:{int(gpu.bus[5:7], 16) - 1:02x}:01.0",))
        for gpu in gpus
    ]
    return _of(root, computer, FakeNvml(gpus, H100_TOPOLOGY, switched=True), pci)


# No listing of eight A100 PCIe was found. Groups of four behind one switch: axolotl-ai-cloud/axolotl#536 (PIX); the
# other socket and the addresses 4e..51 and ce..d1: NVIDIA/nccl-tests#307, eight cards in a server of two sockets.
A100_TOPOLOGY = """
GPU0  X   PIX PIX PIX SYS SYS SYS SYS
GPU1  PIX X   PIX PIX SYS SYS SYS SYS
GPU2  PIX PIX X   PIX SYS SYS SYS SYS
GPU3  PIX PIX PIX X   SYS SYS SYS SYS
GPU4  SYS SYS SYS SYS X   PIX PIX PIX
GPU5  SYS SYS SYS SYS PIX X   PIX PIX
GPU6  SYS SYS SYS SYS PIX PIX X   PIX
GPU7  SYS SYS SYS SYS PIX PIX PIX X
"""


def a100_pcie(root: Path) -> Simulated:
    buses = ["4e", "4f", "50", "51", "ce", "cf", "d0", "d1"]
    gpus = [
        Gpu("NVIDIA A100 80GB PCIe", f"0000:{bus}:00.0", 81920, at // 4, (4, 16), (4, 16), (4, 16), mig=False)
        for at, bus in enumerate(buses)
    ]
    computer = Computer("AMD EPYC 7763 64-Core Processor", ("0-63,128-191", "64-127,192-255"), (0, 1), 1024 * GIB)
    pci = [
        _pci(gpu, "0000:4a" if gpu.numa == 0 else "0000:ca", (f"0000:{'4b' if gpu.numa == 0 else 'cb'}:00.0",))
        for gpu in gpus
    ]
    return _of(root, computer, FakeNvml(gpus, A100_TOPOLOGY), pci)


# aikitoria/open-gpu-kernel-modules#1: four devices, PHB between all, cores 0-15 on node 0 (two of them were 4090). Peer
# access as GeForce drivers of the vendor list it: noonghunna/club-3090#1124, "GNS, GPU not supported". An idle 4090
# runs its link at 2.5 GT/s and x16 where it could do 16 GT/s: janhq/jan#183, lspci.
RTX4090_TOPOLOGY = """
GPU0  X   PHB PHB PHB
GPU1  PHB X   PHB PHB
GPU2  PHB PHB X   PHB
GPU3  PHB PHB PHB X
"""
RTX4090_PEERS = """
GPU0  X   GNS GNS GNS
GPU1  GNS X   GNS GNS
GPU2  GNS GNS X   GNS
GPU3  GNS GNS GNS X
"""


def rtx4090(root: Path) -> Simulated:
    gpus = [
        Gpu("NVIDIA GeForce RTX 4090", f"0000:{bus}:00.0", 24564, 0, (1, 16), (4, 16), (4, 16))
        for bus in ("01", "21", "41", "61")
    ]
    computer = Computer("AMD Ryzen Threadripper PRO 5955WX 16-Cores", ("0-31",), (0,), 256 * GIB)
    pci = [_pci(gpu, "0000:00", (f"0000:00:0{at + 1}.1",)) for at, gpu in enumerate(gpus)]
    return _of(root, computer, FakeNvml(gpus, RTX4090_TOPOLOGY, RTX4090_PEERS), pci)


# One card on one socket: gist ashwin/e139748bdba15f5af63f0146d01ee4c3 ("GPU topology examples"), first listing. The
# slot has eight lanes, so NVML's maximum is 8 as well, while the card's own max_link_width stays 16.
def v100_x8(root: Path) -> Simulated:
    gpu = Gpu("Tesla V100-PCIE-16GB", "0000:3b:00.0", 16160, 0, (3, 8), (3, 8), (3, 16))
    computer = Computer("Intel(R) Xeon(R) Silver 4110 CPU @ 2.10GHz", ("0-7",), (0,), 96 * GIB)
    pci = [_pci(gpu, "0000:3a", ("0000:3a:00.0",))]
    return _of(root, computer, FakeNvml([gpu], "GPU0 X", driver="470.129.06"), pci)


# DGX-1 with V100: gist ashwin/e139748bdba15f5af63f0146d01ee4c3, third listing (SOC, of an old driver, is SYS now).
DGX1_TOPOLOGY = """
GPU0  X   NV1 NV1 NV2 NV2 SYS SYS SYS
GPU1  NV1 X   NV2 NV1 SYS NV2 SYS SYS
GPU2  NV1 NV2 X   NV2 SYS SYS NV1 SYS
GPU3  NV2 NV1 NV2 X   SYS SYS SYS NV1
GPU4  NV2 SYS SYS SYS X   NV1 NV1 NV2
GPU5  SYS NV2 SYS SYS NV1 X   NV2 NV1
GPU6  SYS SYS NV1 SYS NV1 NV2 X   NV2
GPU7  SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
DGX1_PEERS = DGX1_TOPOLOGY.replace("NV1", "OK").replace("NV2", "OK").replace("SYS", "TNS")


def dgx1_v100(root: Path) -> Simulated:
    buses = ["06", "07", "0a", "0b", "85", "86", "89", "8a"]
    gpus = [
        Gpu("Tesla V100-SXM2-32GB", f"0000:{bus}:00.0", 32510, at // 4, (3, 16), (3, 16), (3, 16), nvlink=2)
        for at, bus in enumerate(buses)
    ]
    computer = Computer("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", ("0-19,40-59", "20-39,60-79"), (0, 1), 512 * GIB)
    pci = [_pci(gpu, "0000:00" if gpu.numa == 0 else "0000:80", (f"0000:{gpu.bus[5:7]}:1f.0",)) for gpu in gpus]
    return _of(root, computer, FakeNvml(gpus, DGX1_TOPOLOGY, DGX1_PEERS), pci)


# Names as vllm-project/vllm#9293 lists a laptop: i9-13950HX and "NVIDIA GeForce RTX 4070 Laptop GPU". Eight lanes is
# all that this part has.
def laptop_gpu(root: Path) -> Simulated:
    gpu = Gpu("NVIDIA GeForce RTX 4070 Laptop GPU", "0000:01:00.0", 8188, -1, (4, 8), (4, 8), (4, 8))
    computer = Computer("13th Gen Intel(R) Core(TM) i9-13950HX", ("0-31",), (0,), 32 * GIB)
    return _of(root, computer, FakeNvml([gpu], "GPU0 X", driver="551.88"), [_pci(gpu, above=("0000:00:01.0",))])


def laptop(root: Path) -> Simulated:
    computer = Computer("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", ("0-15",), (0,), 32 * GIB)
    return _of(root, computer, FakeNvml([], error=NVMLError_LibraryNotFound), [])


MACHINES: dict[str, Callable[[Path], Simulated]] = {
    "dgx_h100": dgx_h100,
    "a100_pcie": a100_pcie,
    "rtx4090": rtx4090,
    "v100_x8": v100_x8,
    "dgx1_v100": dgx1_v100,
    "laptop_gpu": laptop_gpu,
    "laptop": laptop,
}
