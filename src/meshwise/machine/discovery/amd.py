"""Read AMD devices from /sys alone, without libraries.

It reads the kernel's own table of nodes and links (class/kfd), and PCI. amdsmi names the rest.

Fields as ROCm describes them for /sys/class/kfd/kfd/topology.

Tested in tests/machine/test_discover.py and test_discover_odd.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.machine.discovery.found import Accelerator, Between, Found
from meshwise.machine.discovery.sysfs import narrowest, pci_facts
from meshwise.workers.control_groups import read_text

PCIE, XGMI = 2, 11
"""CRAT_IOLINK_TYPE_PCIEXPRESS and CRAT_IOLINK_TYPE_XGMI of the kernel (drivers/gpu/drm/amd/amdkfd/kfd_crat.h)."""
DIRECT = 15
"""The `weight` that the Linux kernel reports for an xGMI link of one hop (ROCm/rocm-systems#7372). Two hops: 30."""
NAMES = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""Names of devices that have no `product_name`, by PCI device number (pci-ids.ucw.cz, vendor 1002)."""
UNNAMED = "AMD device"
INSTALL = "pip install amdsmi, in the version of your ROCm"


def read_amd(sys: Path, amdsmi: Any = None) -> Found:
    """Return all AMD devices that can compute, in the kernel's order. Never raises an exception."""
    nodes = _nodes(sys / "class/kfd/kfd/topology/nodes")
    if not nodes:
        return Found()
    devices, warnings = [_device(sys, node, facts) for node, facts in nodes.items()], []
    if any(device.name.startswith(UNNAMED) for device in devices):
        named = _smi_names(amdsmi)
        devices = [replace(device, name=named.get(device.pci, device.name)) for device in devices]
    for device in devices:
        if device.name.startswith(UNNAMED):
            warnings.append(f"{device.name} at {device.pci} cannot be identified. Use {INSTALL}.")
    between = _between(sys, dict(zip(nodes, devices, strict=True)))
    version = read_text(sys / "module/amdgpu/version")
    return Found(tuple(devices), between, {"driver": version} if version else {}, tuple(warnings))


def _nodes(folder: Path) -> dict[int, Mapping[str, int]]:
    """Return the properties of each accelerator that the kernel's driver for AMD devices lists, by the driver's node
    number. The driver also lists CPUs as nodes. They are left out, because they have no compute units.

    folder: the folder with one subfolder per node, class/kfd/kfd/topology/nodes.
    """
    if not folder.is_dir():
        return {}
    numbers = sorted(int(node.name) for node in folder.iterdir() if node.name.isdecimal())
    found = {number: _properties(folder / str(number) / "properties") for number in numbers}
    return {number: facts for number, facts in found.items() if facts.get("simd_count", 0) > 0}


def _device(sys: Path, node: int, facts: Mapping[str, int]) -> Accelerator:
    place = facts.get("location_id", 0)
    bus, device, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place & 0x7
    address = f"{facts.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
    pci = pci_facts(sys, address)
    banks = sorted((sys / f"class/kfd/kfd/topology/nodes/{node}/mem_banks").glob("*/properties"))
    memory = sum(_properties(bank).get("size_in_bytes", 0) for bank in banks)
    number = facts.get("device_id", 0)
    name = read_text(sys / "bus/pci/devices" / address / "product_name") or NAMES.get(number)
    return Accelerator(
        name or f"{UNNAMED} {number:#06x}",
        address,
        f"{facts.get('unique_id', 0):x}",
        memory or None,
        pci.numa,
        narrowest(sys, pci),
        own=pci.most,
        vendor="amd",
    )


def _between(sys: Path, devices: Mapping[int, Accelerator]) -> dict[tuple[int, int], Between]:
    found = {}
    places = {node: place for place, node in enumerate(devices)}
    for node, device in devices.items():
        links: dict[int, dict[str, int]] = {}
        for file in sorted((sys / f"class/kfd/kfd/topology/nodes/{node}").glob("*_links/*/properties")):
            link = _properties(file)
            links.setdefault(link.get("node_to", -1), link)
        for other, second in devices.items():
            if other == node:
                continue
            known = links.get(other)
            xgmi = known is not None and known.get("type") == XGMI
            found[places[node], places[other]] = Between(
                _xgmi_links(known) if xgmi and known is not None else 0,
                peer=True if known is not None else None,
                crosses="" if xgmi else _crosses(sys, device, second),
            )
    return found


def _xgmi_links(link: Mapping[str, int]) -> int | None:
    """Return how many xGMI links connect two devices: the bandwidth of all links, divided by the bandwidth of one link.
    Return 1 if the kernel does not report bandwidths, and None if the devices are more than one hop apart."""
    if link.get("weight", DIRECT) > DIRECT:
        return None
    one, all_of_them = link.get("min_bandwidth", 0), link.get("max_bandwidth", 0)
    return max(1, all_of_them // one) if one else 1


def _crosses(sys: Path, one: Accelerator, other: Accelerator) -> str:
    """Return what lies on the path of a copy between two devices: `socket` if their NUMA nodes differ, `bridge` if they
    share no PCI bridge below the root complex, and "" otherwise."""
    if one.numa is not None and other.numa is not None and one.numa != other.numa:
        return "socket"
    paths = [pci_facts(sys, device.pci).path for device in (one, other)]
    shared = [a for a, b in zip(*paths, strict=False) if a == b]
    return "" if len(shared) > 1 else "bridge"


def _properties(file: Path) -> dict[str, int]:
    """Read the numbers in a properties file, which has lines such as `simd_count 1216`."""
    lines = (line.split() for line in read_text(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}


def _smi_names(amdsmi: Any) -> Mapping[str, str]:
    """Return device names by PCI address from the library amdsmi. Empty if the library is missing or fails."""
    try:
        if amdsmi is None:
            import amdsmi  # type: ignore[import-not-found, no-redef, unused-ignore]
        amdsmi.amdsmi_init()
    except Exception:
        return {}
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        names = {
            str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower(): amdsmi.amdsmi_get_gpu_asic_info(handle)
            for handle in handles
        }
        return {address: str(facts["market_name"]) for address, facts in names.items() if facts.get("market_name")}
    except Exception:
        return {}
    finally:
        amdsmi.amdsmi_shut_down()
