"""NVIDIA devices by NVML (nvidia-ml-py, optional): names, memory, PCIe links, NVLinks, who can read whose memory.

NVML does not look at CUDA_VISIBLE_DEVICES, counts in the order of PCI addresses, and makes no CUDA context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwise.machine.discovery.found import Accelerator, Between, Found
from meshwise.machine.discovery.sysfs import displays, pci_facts, read_text

INSTALL = "pip install nvidia-ml-py"
VENDOR = "0x10de"
# NVML's numbers, as nvml.h has them. Written out: nvidia-ml-py makes a tuple of NVML_P2P_CAPS_INDEX_READ by a comma.
P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_OK = 0, 1, 2, 0
NVLINK_TO_DEVICE, MOST_NVLINKS = 0, 36
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""nvmlNvlinkVersion_t is a count of versions (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0), not the version."""
HOST_BRIDGE, OTHER_NODE = 30, 50
"""nvmlGpuTopologyLevel_t: from the first on, a pair goes through the host's bridge; the second is another NUMA node."""


def read_nvidia(
    sys: Path, proc: Path, nvml: Any = None, same_socket: Callable[[int, int], bool] | None = None
) -> Found:
    """All NVIDIA devices. nvml: the module to ask, None: pynvml where it is installed. Never raises.

    same_socket: whether two NUMA nodes lie on one socket, so that `SYS` between them crosses a bridge only.
    Without NVML, what the driver writes to /proc must do, with a warning that says what to install.
    """
    present = displays(sys, VENDOR) or _listed(proc)
    if nvml is None:
        nvml = _installed()
    if nvml is None:
        return _without_nvml(sys, proc, f"nvidia-ml-py is not installed: {INSTALL}") if present else Found()
    try:
        nvml.nvmlInit()
    except Exception as error:
        return _without_nvml(sys, proc, f"NVML does not start ({error})") if present else Found()
    try:
        return _ask(nvml, sys, same_socket or (lambda one, other: False))
    except Exception as error:
        return _without_nvml(sys, proc, f"NVML failed ({type(error).__name__}: {error})")
    finally:
        _try(nvml.nvmlShutdown)


def pcie_now(nvml: Any = None) -> Mapping[str, tuple[int | None, int | None]]:
    """(generation, lanes) of each NVIDIA device's PCIe link at this moment, by PCI address; ask while bytes move.

    Empty where NVML cannot be asked.
    """
    nvml = nvml or _installed()
    try:
        nvml.nvmlInit()
    except Exception:
        return {}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {_address(nvml.nvmlDeviceGetPciInfo(handle)): _now(nvml, handle) for handle in handles}
    except Exception:
        return {}
    finally:
        _try(nvml.nvmlShutdown)


def _installed() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _ask(nvml: Any, sys: Path, same_socket: Callable[[int, int], bool]) -> Found:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = tuple(_device(nvml, handle, sys) for handle in handles)
    places = {device.pci: place for place, device in enumerate(devices)}
    nvlinks = [_nvlinks(nvml, handle, places) for handle in handles]
    between = {}
    for one, first in enumerate(handles):
        for other, second in enumerate(handles):
            if one != other:
                links = _links_between(nvml, (first, second), (nvlinks[one], nvlinks[other]), (one, other))
                between[one, other] = Between(
                    links,
                    nvlinks[one].get("generation") if links else None,
                    _peer(nvml, first, second),
                    "" if links else _crosses(nvml, first, second, devices[one], devices[other], same_socket),
                )
    versions = {"driver": _text(_try(nvml.nvmlSystemGetDriverVersion))}
    return Found(devices, between, {name: text for name, text in versions.items() if text})


def _device(nvml: Any, handle: Any, sys: Path) -> Accelerator:
    pci = _address(nvml.nvmlDeviceGetPciInfo(handle))
    facts = pci_facts(sys, pci)
    system = (
        _try(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        _try(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )
    # NVML's most lanes are those of the slot; the card's own stand in /sys alone.
    most = facts.most if facts else (None, None)
    own = (_try(getattr(nvml, "nvmlDeviceGetGpuMaxPcieLinkGeneration", None), handle) or most[0], most[1])
    memory = _try(nvml.nvmlDeviceGetMemoryInfo, handle)
    mig = _try(getattr(nvml, "nvmlDeviceGetMigMode", None), handle)
    return Accelerator(
        _text(nvml.nvmlDeviceGetName(handle)),
        pci,
        _text(_try(nvml.nvmlDeviceGetUUID, handle)),
        int(memory.total) if memory is not None else None,
        facts.numa if facts else None,
        _now(nvml, handle),
        system,
        (own[0] or system[0], own[1] or system[1]),
        bool(mig and mig[0]),
    )


def _now(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    return (
        _try(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        _try(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
    )


def _nvlinks(nvml: Any, handle: Any, places: Mapping[str, int]) -> dict[Any, int]:
    """How many links are up to each device, by its place, and to a switch (`switch`); and their `generation`."""
    found: dict[Any, int] = {}
    for link in range(MOST_NVLINKS):
        state = _try(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # this device has no such link
        if not state:
            continue
        found["generation"] = NVLINK_GENERATIONS.get(_try(nvml.nvmlDeviceGetNvLinkVersion, handle, link) or 0, 0)
        remote = _try(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        kind = _try(getattr(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", None), handle, link)
        place = places.get(_address(remote)) if remote is not None else None
        # A virtual machine may hide what is at the other end: what is no device that we know is taken for a switch.
        end: Any = place if place is not None else "elsewhere" if kind == NVLINK_TO_DEVICE else "switch"
        found[end] = found.get(end, 0) + 1
    return {key: value for key, value in found.items() if value}


def _links_between(
    nvml: Any, handles: tuple[Any, Any], nvlinks: tuple[dict[Any, int], dict[Any, int]], places: tuple[int, int]
) -> int:
    direct = nvlinks[0].get(places[1], 0)
    if direct:
        return direct
    switched = min(nvlinks[0].get("switch", 0), nvlinks[1].get("switch", 0))
    if switched and _try(nvml.nvmlDeviceGetP2PStatus, *handles, P2P_NVLINK) in (P2P_OK, None):
        return switched
    return 0


def _peer(nvml: Any, one: Any, other: Any) -> bool | None:
    status = [_try(nvml.nvmlDeviceGetP2PStatus, one, other, what) for what in (P2P_READ, P2P_WRITE)]
    return None if None in status else all(found == P2P_OK for found in status)


def _crosses(
    nvml: Any,
    one: Any,
    other: Any,
    first: Accelerator,
    second: Accelerator,
    same_socket: Callable[[int, int], bool],
) -> str:
    level = _try(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    if level is None or level < HOST_BRIDGE:
        return ""
    nodes = (first.numa, second.numa)
    if level >= OTHER_NODE and not (None not in nodes and same_socket(nodes[0] or 0, nodes[1] or 0)):
        return "socket"
    return "bridge"


def _without_nvml(sys: Path, proc: Path, why: str) -> Found:
    """Names by /proc/driver/nvidia, links by /sys. Memory, NVLinks and peer access stay unknown."""
    addresses = _listed(proc) or displays(sys, VENDOR)
    devices = []
    for address in addresses:
        text = read_text(proc / "driver/nvidia/gpus" / address / "information")
        model = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        facts = pci_facts(sys, address)
        devices.append(
            Accelerator(
                model[1].strip() if model else "NVIDIA device",
                address,
                numa=facts.numa if facts else None,
                now=facts.now if facts else (None, None),
                own=facts.most if facts else (None, None),
            )
        )
    warning = f"Memory, NVLinks and peer access of the NVIDIA devices are unknown: {why}."
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", read_text(proc / "driver/nvidia/version"))
    return Found(tuple(devices), versions={"driver": version[1]} if version else {}, warnings=(warning,))


def _listed(proc: Path) -> list[str]:
    folder = proc / "driver/nvidia/gpus"
    return sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []


def _address(pci: Any) -> str:
    """`00000000:3B:00.0` of NVML as `0000:3b:00.0`, as sysfs writes it."""
    domain, _, rest = _text(pci.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: Any) -> str:
    """Old versions of the library give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _try(ask: Any, *arguments: Any) -> Any:
    """What NVML answers; None where this device, driver or library cannot tell."""
    if ask is None:
        return None
    try:
        return ask(*arguments)
    except Exception:
        return None
