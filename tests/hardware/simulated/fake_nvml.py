"""What nvidia-ml-py would answer on a machine that is not here: its names, numbers and errors, from a vendor's listing.

A `FakeNvml` stands for the module `pynvml`. Functions that the real library does not have are missing here too, and
what real hardware does not support raises here too. Numbers are those of nvidia-ml-py 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
"""NVML_TOPOLOGY_SINGLE and so on, by the symbols of `nvidia-smi topo -m`."""
STATUS = {"OK": 0, "CNS": 1, "GNS": 2, "TNS": 3, "DR": 4, "NS": 5, "U": 6}
"""NVML_P2P_STATUS_*, by the symbols of `nvidia-smi topo -p2p r`."""
SWITCHES = "0000:05:00.0"


class NVMLError(Exception):
    """As in pynvml: the number of the error in `value`."""

    value = 999

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.value}"


class NVMLError_InvalidArgument(NVMLError):
    value = 2


class NVMLError_NotSupported(NVMLError):
    value = 3


class NVMLError_DriverNotLoaded(NVMLError):
    value = 9


class NVMLError_LibraryNotFound(NVMLError):
    value = 12


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device. memory in MiB as nvidia-smi shows it; bus as sysfs writes it.

    pcie: (generation, width) now. system: the most that NVML says, which the slot limits too. own: what the card
    could do in a better slot (NVML's GpuMax generation, sysfs's max_link_width). nvlink: NVML's number of the version.
    """

    name: str
    bus: str
    memory: int
    numa: int = 0
    pcie: tuple[int, int] = (4, 16)
    system: tuple[int, int] = (4, 16)
    own: tuple[int, int] = (4, 16)
    nvlink: int | None = None
    mig: bool | None = None
    above: tuple[str, ...] = ()


@dataclass
class FakeNvml:
    """topology: rows of `nvidia-smi topo -m`; peers: rows of `nvidia-smi topo -p2p r`, None: all OK."""

    gpus: Sequence[Gpu]
    topology: str = ""
    peers: str | None = None
    switched: bool = False
    driver: str = "550.54.15"
    error: type[NVMLError] | None = None
    opened: int = 0
    matrix: list[list[str]] = field(default_factory=list)

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_P2P_CAPS_INDEX_READ = (0,)  # a stray comma in nvidia-ml-py makes this a tuple; ctypes refuses it
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __post_init__(self) -> None:
        self.matrix = [line.split()[1:] for line in self.topology.strip().splitlines()]

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise self.error
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self.gpus):
            raise NVMLError_InvalidArgument
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.gpus[handle].name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-0000-4000-8000-{handle:012x}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        total = self.gpus[handle].memory * 2**20
        return SimpleNamespace(total=total, used=2**20, free=total - 2**20)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        domain, bus, rest = self.gpus[handle].bus.split(":")
        return SimpleNamespace(
            busId=f"0000{domain}:{bus}:{rest}".upper(), domain=int(domain, 16), bus=int(bus, 16), device=0
        )

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self.gpus[handle].pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].system[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self.gpus[handle].system[1]

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].own[0]

    def nvmlDeviceGetNumaNodeId(self, handle: int) -> int:
        raise NVMLError_NotSupported  # the node of the device's own memory, as only GH200 and GB200 have one

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.gpus[handle].mig is None:
            raise NVMLError_NotSupported
        return [int(bool(self.gpus[handle].mig))] * 2

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        word = self.matrix[one][other]
        if word.startswith("NV"):
            return 40 if self.gpus[one].numa == self.gpus[other].numa else 50
        return LEVELS[word]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        if not isinstance(index, int):
            raise TypeError(f"expected an integer, not {index!r}")
        if index == 2:
            return STATUS["OK" if self.matrix[one][other].startswith("NV") else "NS"]
        if self.peers is None:
            return STATUS["OK"]
        return STATUS[self.peers.strip().splitlines()[one].split()[1:][other]]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._link(handle, link)
        return 1

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        self._link(handle, link)
        return self.gpus[handle].nvlink or 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        self._link(handle, link)
        return 2 if self.switched else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        other = self._link(handle, link)
        return SimpleNamespace(busId=f"0000{SWITCHES}") if self.switched else self.nvmlDeviceGetPciInfo(other)

    def _link(self, handle: int, link: int) -> int:
        """The device at the other end of a link; raises where there is no such link, as real hardware does."""
        if self.gpus[handle].nvlink is None:
            raise NVMLError_NotSupported
        row = [(other, word) for other, word in enumerate(self.matrix[handle]) if word.startswith("NV")]
        ends = [other for other, word in row[: 1 if self.switched else None] for _ in range(int(word[2:]))]
        if link >= len(ends):
            raise NVMLError_InvalidArgument
        return ends[link]
