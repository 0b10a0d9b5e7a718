"""Read NVIDIA devices through NVML: names, memory, links, peer access.

nvidia-ml-py is optional. Links are PCIe and NVLink; peer access says which device can read whose memory.

NVML does not look at CUDA_VISIBLE_DEVICES, counts in the order of PCI addresses, and makes no CUDA context.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from meshwise.hardware.discovery.host_facts import Sockets
from meshwise.hardware.discovery.sysfs import displays, pci_facts
from meshwise.hardware.discovery.topology import Accelerator, Between, Found
from meshwise.workers.control_groups import read_text

INSTALL = "pip install nvidia-ml-py"
VENDOR, NAMELESS = "0x10de", "NVIDIA device"
# Constants of nvml.h. They are not imported, since nvidia-ml-py has a tuple for NVML_P2P_CAPS_INDEX_READ by mistake.
P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_OK = 0, 1, 2, 0
NVLINK_TO_DEVICE, MOST_NVLINKS = 0, 36
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVLink generations by nvmlNvlinkVersion_t. Its values 1 to 8 stand for 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 and 6.0."""
HOST_BRIDGE, OTHER_NODE = 30, 50
"""Values of nvmlGpuTopologyLevel_t: from 30 on, copies cross a host bridge, and from 50 on, they cross NUMA nodes."""


def read_nvidia(sys: Path, nvml: Any, sockets: Sockets) -> Found:
    """Find all NVIDIA devices of this host, and how they are connected."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return _without_nvml(sys, f"nvidia-ml-py is not installed ({INSTALL})")
    except Exception as error:
        return _without_nvml(sys, f"NVML does not start ({error})")
    asked = _Nvml(nvml)
    try:
        return _ask(asked, sys, sockets)
    except Exception as error:
        return _without_nvml(sys, f"NVML failed ({type(error).__name__}: {error})")
    finally:
        asked("Shutdown")


class _Nvml:
    """A wrapper of NVML. A call returns None if the NVML function is missing or fails. This can happen with any
    function, depending on the device, the driver and the version of the library."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the function `nvml<name>`. Returns None if the function is missing or fails."""
        try:
            return getattr(self.library, f"nvml{name}")(*arguments)
        except Exception:
            return None

    def handles(self) -> list[Any]:
        """Return a handle of each device. Raises NVML's error if NVML fails."""
        count = self.library.nvmlDeviceGetCount()
        return [self.library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _ask(nvml: _Nvml, sys: Path, sockets: Sockets) -> Found:
    handles = nvml.handles()
    devices = tuple(_device(nvml, handle, sys) for handle in handles)
    places = {device.pci: place for place, device in enumerate(devices)}
    nvlinks = [_nvlinks(nvml, handle, places) for handle in handles]
    between = {}
    for one, other in permutations(range(len(handles)), 2):
        pair = (handles[one], handles[other])
        own = [sockets.get(devices[at].numa) for at in (one, other)]
        links = _links_between(nvml, pair, (nvlinks[one], nvlinks[other]), other)
        crosses = "" if links else _crosses(nvml, pair, own[0] is not None and own[0] == own[1])
        generation = nvlinks[one].get("generation") if links else None
        between[one, other] = Between(links, generation, _peer(nvml, *pair), crosses)
    driver = _text(nvml("SystemGetDriverVersion"))
    return Found(devices, between, {"driver": driver} if driver else {})


def _device(nvml: _Nvml, handle: Any, sys: Path) -> Accelerator:
    pci = _address(nvml.library.nvmlDeviceGetPciInfo(handle))
    facts = pci_facts(sys, pci)
    # NVML reports the maximum lanes of the slot. Only /sys has the maximum of the card.
    generation = nvml("DeviceGetGpuMaxPcieLinkGeneration", handle) or facts.most[0]
    lanes = facts.most[1] or nvml("DeviceGetMaxPcieLinkWidth", handle)
    memory = nvml("DeviceGetMemoryInfo", handle)
    return Accelerator(
        _text(nvml("DeviceGetName", handle)) or NAMELESS,
        pci,
        int(memory.total) if memory is not None else None,
        facts.numa,
        (nvml("DeviceGetCurrPcieLinkGeneration", handle), nvml("DeviceGetCurrPcieLinkWidth", handle)),
        (generation or nvml("DeviceGetMaxPcieLinkGeneration", handle), lanes),
    )


def _nvlinks(nvml: _Nvml, handle: Any, places: Mapping[str, int]) -> dict[Any, int]:
    """Return how many active NVLinks lead to each device index, `switch` or `elsewhere`, and their `generation`."""
    found: dict[Any, int] = {}
    for link in range(MOST_NVLINKS):
        state = nvml("DeviceGetNvLinkState", handle, link)
        if state is None:
            break  # this device has no such link
        if not state:
            continue
        found["generation"] = NVLINK_GENERATIONS.get(nvml("DeviceGetNvLinkVersion", handle, link) or 0, 0)
        remote = nvml("DeviceGetNvLinkRemotePciInfo", handle, link)
        kind = nvml("DeviceGetNvLinkRemoteDeviceType", handle, link)
        place = places.get(_address(remote)) if remote is not None else None
        # A virtual machine may hide the other end. An unknown end counts as a switch.
        end: Any = place if place is not None else "elsewhere" if kind == NVLINK_TO_DEVICE else "switch"
        found[end] = found.get(end, 0) + 1
    return {key: value for key, value in found.items() if value}


def _links_between(
    nvml: _Nvml, pair: tuple[Any, Any], nvlinks: tuple[dict[Any, int], dict[Any, int]], second: int
) -> int:
    """Return how many NVLinks connect a pair, directly or over a switch."""
    direct = nvlinks[0].get(second, 0)
    if direct:
        return direct
    switched = min(nvlinks[0].get("switch", 0), nvlinks[1].get("switch", 0))
    return switched if switched and nvml("DeviceGetP2PStatus", *pair, P2P_NVLINK) in (P2P_OK, None) else 0


def _peer(nvml: _Nvml, one: Any, other: Any) -> bool | None:
    status = [nvml("DeviceGetP2PStatus", one, other, what) for what in (P2P_READ, P2P_WRITE)]
    return None if None in status else all(found == P2P_OK for found in status)


def _crosses(nvml: _Nvml, pair: tuple[Any, Any], same_socket: bool) -> str:
    level = nvml("DeviceGetTopologyCommonAncestor", *pair)
    if level is None or level < HOST_BRIDGE:
        return ""
    return "socket" if level >= OTHER_NODE and not same_socket else "bridge"


def _without_nvml(sys: Path, why: str) -> Found:
    """Read PCIe links from /sys. Names, memory, NVLinks and peer access stay unknown."""
    facts = {address: pci_facts(sys, address) for address in displays(sys, VENDOR)}
    devices = [Accelerator(NAMELESS, at, numa=own.numa, now=own.now, own=own.most) for at, own in facts.items()]
    warning = f"Names, memory, NVLinks and peer access of the NVIDIA devices are unknown, because {why}."
    driver = read_text(sys / "module/nvidia/version")
    versions = {"driver": driver} if driver else {}
    return Found(tuple(devices), versions=versions, warnings=(warning,) if devices else ())


def _address(pci: Any) -> str:
    """Convert an address from NVML's form `00000000:3B:00.0` to the form of sysfs, `0000:3b:00.0`."""
    domain, _, rest = _text(pci.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: Any) -> str:
    """Return a value from NVML as text. Old versions of nvidia-ml-py return bytes. None becomes ""."""
    return value.decode() if isinstance(value, bytes) else str(value or "")
