"""Add torch's facts to a discovered machine: versions, device numbers, peer access.

NVML numbers devices by PCI address and sees every device. torch numbers devices as CUDA does, and sees only those that
the environment leaves visible. Devices of both are matched by PCI address. torch's names are kept, since programs use
these names.

torch is imported when its facts are read, not when this module is imported. Callers that do not need torch do not wait
for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.machine.catalog import part_of_driver_name
from meshwise.machine.discovery.discover import described, machine_name, unknown_part
from meshwise.machine.discovery.found import Accelerator
from meshwise.machine.discovery.sysfs import address_of
from meshwise.machine.discovery.topology import Named, and_more
from meshwise.machine.find import accelerators
from meshwise.spec.machine import HOST, Device, Link, Machine

LEAST_WHOLE = 0.85
"""A device is a slice (MIG) if torch reports less than this share of the memory that the driver reports."""
INSTALL = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class TorchDevice:
    """One device as torch sees it.

    name: such as `cuda:0`.
    model: the driver's name of the device.
    memory: in bytes.
    pci: the PCI address, or "" if unknown.
    """

    name: str
    model: str
    memory: int | None = None
    pci: str = ""
    capability: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports about itself and the devices.

    versions: the versions of `torch`, `cuda` or `rocm`, and `nccl`.
    peers: for each pair of devices, whether the first can read the memory of the second.
    """

    versions: Mapping[str, str]
    devices: tuple[TorchDevice, ...] = ()
    peers: Mapping[tuple[str, str], bool] = field(default_factory=dict)


def with_torch_facts(machine: Machine) -> Machine:
    """Add what torch reports to the discovered machine. A driver that fails to start is not an error."""
    return joined(machine, read_torch())


def read_torch() -> TorchFacts:
    """Read the versions and the devices that torch reports. If there is a CUDA driver, this starts the driver in this
    process."""
    import torch

    kits = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    built_for = {name: version for name, version in kits.items() if version}
    versions = {"torch": str(torch.__version__), **built_for}
    if built_for and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        kind, count = accelerators()
        devices = tuple(_device(torch, kind, index) for index in range(count)) if kind is not None else ()
    except RuntimeError:  # a driver that is there and does not start
        return TorchFacts(versions)
    return TorchFacts(versions, devices, _peers(torch, devices))


def joined(machine: Machine, facts: TorchFacts) -> Machine:
    """Return a machine with the devices that torch sees, in torch's order and with torch's names. What was discovered
    about a device is kept."""
    versions = {**machine.versions, **facts.versions}
    if capabilities := sorted({device.capability for device in facts.devices if device.capability}):
        versions["compute capability"] = ", ".join(capabilities)
    accelerators = [device for device in machine.devices if device.kind != "cpu"]
    if not facts.devices:
        missing = (_no_device(facts, len(accelerators)),) if accelerators else ()
        return replace(machine, versions=versions, warnings=machine.warnings + missing)
    known = {device.pci: device for device in accelerators if device.pci}
    devices = tuple(_one(device, known.get(device.pci)) for device in facts.devices)
    names = {known[device.pci].name: device.name for device in facts.devices if device.pci in known}
    links = [
        _renamed(link, names, facts.peers)
        for link in machine.links
        if all(end in names or end == HOST for end in (link.source, link.target))
    ]
    listed = {(link.source, link.target) for link in links}
    links += [Link(*pair, "", peer=peer) for pair, peer in facts.peers.items() if pair not in listed]
    warnings = [_renumbered(warning, names) for warning in machine.warnings] if accelerators else []
    if len(names) < len(accelerators):
        warnings.append(f"torch sees {len(names)} of the {len(accelerators)} devices that the driver has.")
    warnings += _peers_lost(machine, names, facts.peers)
    before = {device.part for device in accelerators}
    seen = zip(devices, facts.devices, strict=True)
    unknown = [device.part for device, torchs in seen if device.part == torchs.model and device.part not in before]
    warnings += [unknown_part(part) for part in dict.fromkeys(unknown)]
    return Machine(
        machine_name([device.part for device in devices]),
        devices,
        tuple(links),
        machine.hosts,
        versions=versions,
        warnings=tuple(warnings),
    )


def _device(torch: Any, kind: str, index: int) -> TorchDevice:
    name, known = f"{kind}:{index}", torch.get_device_module(kind)
    if not hasattr(known, "get_device_properties"):  # Apple's one GPU
        return TorchDevice(name, "Apple GPU", int(known.recommended_max_memory()))
    facts = known.get_device_properties(index)
    capability = f"{facts.major}.{facts.minor}" if hasattr(facts, "major") else ""
    return TorchDevice(name, facts.name, int(facts.total_memory), address_of(facts), capability)


def _peers(torch: Any, devices: tuple[TorchDevice, ...]) -> Mapping[tuple[str, str], bool]:
    pairs = [(one.name, other.name) for one in devices for other in devices if one != other]
    return {pair: torch.get_device_module(pair[0]).can_device_access_peer(*pair) for pair in pairs}


def _one(seen: TorchDevice, known: Device | None) -> Device:
    """Return a `Device` for a device that torch sees, with torch's name for it, such as `cuda:0`.

    known: the same device as it was discovered without torch, or None. The result keeps the figures of `known`.

    If torch sees only a slice of the device (MIG), the result has the memory that torch reports. It then has no nominal
    figures such as peak FLOP/s, because they hold for the whole device.
    """
    whole = known is not None and (
        seen.memory is None or known.memory is None or seen.memory >= LEAST_WHOLE * known.memory
    )
    if known is not None and whole and (known.peak or known.memory is not None):
        return replace(known, name=seen.name, memory=seen.memory if known.memory is None else known.memory)
    found = Accelerator(seen.model, seen.pci, memory=seen.memory, numa=known.numa if known else None)
    return described(Named(seen.name, found, part_of_driver_name(seen.model, seen.memory)), "torch")


def _renamed(link: Link, names: Mapping[str, str], peers: Mapping[tuple[str, str], bool]) -> Link:
    """Rename the ends of a link to torch's device names. What torch says about peer access replaces what the driver
    says."""
    ends = (names.get(link.source, link.source), names.get(link.target, link.target))
    return replace(link, source=ends[0], target=ends[1], peer=peers.get(ends, link.peer))


def _peers_lost(machine: Machine, names: Mapping[str, str], peers: Mapping[tuple[str, str], bool]) -> list[str]:
    """Return a warning if pairs have peer access according to the driver, but not according to torch."""
    ends = [(names.get(link.source, ""), names.get(link.target, "")) for link in machine.links if link.peer]
    lost = [pair for pair in ends if peers.get(pair) is False and pair[0] < pair[1]]
    if not lost:
        return []
    return [
        f"{lost[0][0]} and {lost[0][1]}{and_more(lost, 'pair')}: the driver reports peer access, but torch cannot use "
        "it, so copies go through the host's memory. A virtual machine, an IOMMU or MIG can cause this."
    ]


def _renumbered(warning: str, names: Mapping[str, str]) -> str:
    """Replace device names in a warning by torch's names.

    names: the new name for each old name.
    """
    return re.sub(r"\S+?(?=[:,.]*(?:\s|$))", lambda word: names.get(word[0], word[0]), warning)


def _no_device(facts: TorchFacts, devices: int) -> str:
    many = f"{devices} device{'s are' if devices > 1 else ' is'} here"
    version = facts.versions["torch"]
    if "cuda" not in facts.versions and "rocm" not in facts.versions:
        return f"{many}, but torch {version} is a build for CPUs only. Install a build for devices: {INSTALL}."
    return (
        f"{many}, but torch {version} can use none. The driver may be too old for torch's CUDA "
        f"{facts.versions.get('cuda', '')}. Install a newer driver, or a torch for this driver: {INSTALL}."
    )
