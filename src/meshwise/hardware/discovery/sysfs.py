"""Read PCI devices, their links, and NUMA nodes from /sys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwise.hardware.allowance import core_list
from meshwise.workers.control_groups import read_text

GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""PCIe generations by the GT/s of a lane, which sysfs writes as `16.0 GT/s PCIe` (PCI-SIG base specifications)."""
DISPLAY, ACCELERATOR = "0x03", "0x12"


@dataclass(frozen=True)
class PciFacts:
    """What /sys says about one PCI device. Values that are unknown are None."""

    numa: int | None = None
    now: tuple[int | None, int | None] = (None, None)
    most: tuple[int | None, int | None] = (None, None)


def pci_facts(sys: Path, address: str) -> PciFacts:
    """Read what /sys says about the PCI device at an address such as `0000:3b:00.0`."""
    folder = sys / "bus/pci/devices" / address.lower()
    node = read_text(folder / "numa_node")
    numa = int(node) if node.isdecimal() else None  # the file says -1 if the firmware does not know the node
    return PciFacts(numa, _link(folder, "current"), _link(folder, "max"))


def is_there(sys: Path, address: str) -> bool:
    """Return whether the PCI device at this address still answers on its bus. Returns True if that cannot be
    determined."""
    folder = sys / "bus/pci/devices" / address.lower()
    if not address or not folder.parent.is_dir():
        return True
    try:
        return (folder / "config").read_bytes()[:4] != b"\xff" * 4  # a device that fell off the bus reads as all ones
    except FileNotFoundError:
        return folder.is_dir()
    except OSError:
        return True


def address_of(properties: object) -> str:
    """Return the PCI address in torch's properties of a device, such as `0000:3b:00.0`."""
    numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*map(int, numbers))  # type: ignore[arg-type]


def displays(sys: Path, vendor: str) -> list[str]:
    """Return the PCI addresses of a vendor's display and accelerator devices, in order."""
    folder = sys / "bus/pci/devices"
    if not folder.is_dir():
        return []
    return [
        device.name
        for device in sorted(folder.iterdir())
        if read_text(device / "vendor") == vendor and read_text(device / "class").startswith((DISPLAY, ACCELERATOR))
    ]


def node_cores(sys: Path) -> Mapping[int, frozenset[int]]:
    """Return the cores of each NUMA node that has cores."""
    found = {}
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        text = read_text(folder / "cpulist")
        if text:
            found[int(folder.name.removeprefix("node"))] = frozenset(core_list(text))
    return found


def _link(folder: Path, which: str) -> tuple[int | None, int | None]:
    """Read (generation, lanes). which: `current` or `max`. 0 and 255 lanes mean that there is no link."""
    speed, width = (read_text(folder / f"{which}_link_{what}") for what in ("speed", "width"))
    generation = GENERATIONS.get(speed.partition(" ")[0].removesuffix(".0"))
    return generation, int(width) if width.isdecimal() and 0 < int(width) < 64 else None
