"""sysfs and /proc of a machine that is not here, as files under a folder.

Contents follow the kernel's own words (Documentation/ABI/testing/sysfs-bus-pci, drivers/gpu/drm/amd/amdkfd and
ROCm's description of /sys/class/kfd): `16.0 GT/s PCIe`, `max 100000`, `node_from 2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SPEEDS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}


@dataclass(frozen=True)
class Pci:
    """A PCI device: now and most are (generation, width). root: its root complex; above: bridges over it, from there.

    vendor: of its bridges and itself.
    """

    bus: str
    root: str = "0000:00"
    numa: int = 0
    now: tuple[int, int] = (4, 16)
    most: tuple[int, int] = (4, 16)
    above: tuple[str, ...] = ()
    vendor: str = "0x10de"
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Computer:
    """The host: nodes are the core lists of its NUMA nodes, packages say on which socket each of them is."""

    processor: str
    nodes: tuple[str, ...]
    packages: tuple[int, ...]
    memory: int
    cores_each: int = 1

    @property
    def cores(self) -> int:
        return sum(len(cores_of(node)) for node in self.nodes)


def cores_of(text: str) -> list[int]:
    """`0-2,8` as [0, 1, 2, 8]."""
    parts = [part.split("-") for part in text.split(",")]
    return [core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def plant_computer(root: Path, computer: Computer) -> None:
    """proc/cpuinfo, proc/meminfo and sys/devices/system of the host."""
    package_of = {
        core: package
        for node, package in zip(computer.nodes, computer.packages, strict=True)
        for core in cores_of(node)
    }
    blocks = [
        f"processor\t: {core}\nvendor_id\t: GenuineIntel\nmodel name\t: {computer.processor}\n"
        f"physical id\t: {package_of[core]}\ncore id\t\t: {core}\n"
        for core in sorted(package_of)
    ]
    write(root, "proc/cpuinfo", "\n".join(blocks))
    write(root, "proc/meminfo", f"MemTotal:       {computer.memory // 1024} kB\nMemFree:        1024 kB")
    for index, node in enumerate(computer.nodes):
        distance = ["10" if other == index else "20" for other in range(len(computer.nodes))]
        write(root, f"sys/devices/system/node/node{index}/cpulist", node)
        write(root, f"sys/devices/system/node/node{index}/distance", " ".join(distance))


def plant_pci(root: Path, devices: Sequence[Pci], computer: Computer) -> None:
    """sys/devices/pci*/… with the bridges above each device, and the links to them in sys/bus/pci/devices."""
    for device in devices:
        path = f"sys/devices/pci{device.root}"
        for bridge in device.above:
            path += f"/{bridge}"
            _plant(root, path, device, {"class": "0x060400"})
        _plant(root, f"{path}/{device.bus}", device, {"class": "0x030200", **device.files})
        local = computer.nodes[device.numa] if device.numa >= 0 else f"0-{computer.cores - 1}"
        write(root, f"{path}/{device.bus}/local_cpulist", local)


def _plant(root: Path, path: str, device: Pci, files: dict[str, str]) -> None:
    name = path.rpartition("/")[2]
    texts = {
        "numa_node": str(device.numa),
        "vendor": device.vendor,
        "current_link_speed": SPEEDS[device.now[0]],
        "current_link_width": str(device.now[1]),
        "max_link_speed": SPEEDS[device.most[0]],
        "max_link_width": str(device.most[1]),
    }
    for file, text in {**texts, **files}.items():
        write(root, f"{path}/{file}", text)
    link = root / "sys/bus/pci/devices" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(root / path)
