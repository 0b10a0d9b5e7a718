"""Ask torch for versions, device numbers and peer access.

NVML numbers devices by PCI address and sees every device. torch numbers devices as CUDA does, and sees only those that
the environment leaves visible. Devices of both are matched by PCI address. torch's names are kept, since programs use
these names.

torch is imported when `read_torch` is called, not with this module, so other callers do not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

from meshwise.hardware.discovery.sysfs import address_of
from meshwise.hardware.discovery.topology import Accelerator, Between, Found, and_more
from meshwise.hardware.find import accelerators

LEAST_WHOLE = 0.85
"""A device is a slice (MIG) if torch reports less than this share of the memory that the driver reports."""
UNLISTED = -1  # the index of a device that the driver does not list
INSTALL = "https://pytorch.org/get-started/locally"


def read_torch() -> Found:
    """Read the versions and the devices that torch reports."""
    import torch

    told = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "rocm": torch.version.hip}
    versions = {name: version for name, version in told.items() if version}
    if len(versions) > 1 and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        kind, count = accelerators()
        if kind is None:
            return Found(versions=versions)
        module = torch.get_device_module(kind)
        facts = [module.get_device_properties(index) for index in range(count)]
    except RuntimeError:  # raised if the driver fails to start
        return Found(versions=versions)
    if numbers := sorted({f"{each.major}.{each.minor}" for each in facts if hasattr(each, "major")}):
        versions["compute capability"] = ", ".join(numbers)
    found = tuple(
        Accelerator(each.name, address_of(each), memory=int(each.total_memory), label=f"{kind}:{index}")
        for index, each in enumerate(facts)
    )
    pairs = permutations(range(count), 2)
    peers = {(a, b): module.can_device_access_peer(f"{kind}:{a}", f"{kind}:{b}") for a, b in pairs}
    return Found(found, {pair: Between(peer=peer) for pair, peer in peers.items()}, versions)


def as_torch_sees(found: Found, torch: Found) -> Found:
    """Return the devices that torch sees, in torch's order and with torch's names."""
    devices, versions, warnings = found.accelerators, {**found.versions, **torch.versions}, [*found.warnings]
    if not torch.accelerators:
        missing = [_no_device(torch.versions, len(devices))] if devices else []
        return replace(found, versions=versions, warnings=(*warnings, *missing))
    places = {device.pci: at for at, device in enumerate(devices) if device.pci}
    known = [places.get(device.pci, UNLISTED) for device in torch.accelerators]
    seen = len(known) - known.count(UNLISTED)
    if seen < len(devices):
        warnings.append(f"torch sees {seen} of the {len(devices)} devices that the driver has.")
    between: dict[tuple[int, int], Between] = {}
    lost = []
    for a, b in permutations(range(len(known)), 2):
        told, own = found.between.get((known[a], known[b])), torch.between.get((a, b))
        if told is None and own is None:
            continue
        between[a, b] = replace(told or Between(), peer=(own or told or Between()).peer)
        if told is not None and told.peer and not between[a, b].peer and a < b:
            lost.append(f"{torch.accelerators[a].label} and {torch.accelerators[b].label}")
    if lost:
        warnings.append(
            f"{lost[0]}{and_more(lost, 'pair')}: the driver reports peer access, but torch cannot use it. A virtual "
            "machine, an IOMMU or MIG can cause this."
        )
    both = zip(torch.accelerators, known, strict=True)
    accelerators = tuple(_joined(one, None if at == UNLISTED else devices[at]) for one, at in both)
    return Found(accelerators, between, versions, tuple(warnings))


def _joined(seen: Accelerator, known: Accelerator | None) -> Accelerator:
    """Merge what torch and the driver report about a device. For a slice (MIG), torch's name and memory are kept."""
    if known is None:
        return replace(seen, told_by="torch", listed=False)
    if known.memory is not None and (seen.memory or known.memory) >= LEAST_WHOLE * known.memory:
        return replace(known, label=seen.label)
    return replace(known, name=seen.name, memory=seen.memory, told_by="torch", label=seen.label)


def _no_device(versions: Mapping[str, str], devices: int) -> str:
    many = f"{devices} device{'s are' if devices > 1 else ' is'} here"
    version = versions["torch"]
    if "cuda" not in versions and "rocm" not in versions:
        return f"{many}, but torch {version} is a build for CPUs only. Install a build for devices: {INSTALL}."
    return (
        f"{many}, but torch {version} can use none. The driver may be too old for torch's CUDA "
        f"{versions.get('cuda', '')}. Install a newer driver, or a torch for this driver: {INSTALL}."
    )
