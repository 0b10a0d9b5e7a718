"""Discover the machine from NVML, /sys and /proc in milliseconds.

It needs no torch and writes nothing.

What cannot be found stays unknown, with a warning that says what would be needed; a file or a library that is missing
is no error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.machine.allowance import bound_cores
from meshwise.machine.catalog import nominal, part_of_driver_name
from meshwise.machine.discovery.found import Accelerator, Found
from meshwise.machine.discovery.host_facts import host_facts, node_sockets
from meshwise.machine.discovery.nvml import read_nvidia
from meshwise.machine.discovery.sysfs import node_cores
from meshwise.machine.discovery.topology import Named, and_more, device_links, host_links, link_warnings
from meshwise.spec.machine import HOST, Device, Host, Link, Machine

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(found: Found, environ: Mapping[str, str]) -> Found:
    """Select the accelerators that environment variables such as CUDA_VISIBLE_DEVICES leave visible to this process.
    They are returned in the order of the variable.

    As in CUDA, an entry of the variable that names no device ends the list (CUDA programming guide, environment
    variables). CUDA numbers the fastest device first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. This function always
    numbers devices by PCI address. If the NVIDIA devices have different names, torch may number them differently, and a
    warning says so.
    """
    devices = found.accelerators
    order = list(range(len(devices)))
    notes = []
    if devices and VISIBLE in environ:
        order = _chosen(environ[VISIBLE], devices)
        if len(order) < len(devices):
            notes.append(
                f"{VISIBLE}={environ[VISIBLE]}: this process can use only {len(order)} of {len(devices)} devices."
            )
    if len({device.name for device in devices}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "The devices differ. CUDA numbers the fastest device first, but without torch, this list is in the order "
            "of PCI addresses. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same."
        )
    return kept(replace(found, warnings=(*found.warnings, *notes)), order)


def kept(found: Found, order: list[int]) -> Found:
    """Keep only the accelerators at the indices `order`, in that order."""
    places = {old: new for new, old in enumerate(order)}
    return replace(
        found,
        accelerators=tuple(found.accelerators[at] for at in order),
        between={
            (places[one], places[other]): between
            for (one, other), between in found.between.items()
            if one in places and other in places
        },
    )


def _chosen(text: str, devices: tuple[Accelerator, ...]) -> list[int]:
    chosen: list[int] = []
    for word in text.split(","):
        word = word.strip()
        if word.isdecimal() and int(word) < len(devices):
            chosen.append(int(word))
        elif word.startswith(("GPU-", "MIG-")) and (at := _by_uuid(word, devices)) is not None:
            chosen.append(at)
        else:
            break
    return list(dict.fromkeys(chosen))


def _by_uuid(word: str, devices: tuple[Accelerator, ...]) -> int | None:
    """Return the index in `devices` of the only device whose UUID begins with `word`. Return None if several devices
    match, or none. CUDA finds devices in the same way.

    word: the beginning of a UUID. For a MIG slice in the form `MIG-GPU-.../1/0`, the device that contains the slice is
        found. The form `MIG-...` does not contain the UUID of a device, so it is not found.
    """
    start = word.removeprefix("MIG-").split("/")[0]
    matching = [at for at, device in enumerate(devices) if device.uuid.startswith(start)]
    return matching[0] if len(matching) == 1 else None


DRIVER = "as the driver reports it"


def discover(
    nvml: Any = None,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    *,
    affinity: Sequence[int] | None = None,
    limits: Mapping[str, float] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Machine:
    """Discover the machine as this process may use it. A machine without accelerators has one CPU device.

    Missing information does not raise an exception.

    nvml: the library to ask. The default is the installed one.
    sys, proc: the folders to read instead of /sys and /proc.
    affinity, limits: the cores and the limits of this process. The default is to ask the system.
    environ: the environment variables, among them CUDA_VISIBLE_DEVICES.
    """
    host = host_facts(sys, proc, affinity, limits)
    sockets = node_sockets(sys, proc)
    found = visible(read_nvidia(sys, proc, nvml, sockets), environ)
    if not found.accelerators:
        return _cpu_machine(host, found)
    named = [
        Named(f"cuda:{index}", device, part_of_driver_name(device.name, device.memory))
        for index, device in enumerate(found.accelerators)
    ]
    cores = bound_cores() if affinity is None else affinity
    own = {sockets.get(node) for node, members in node_cores(sys).items() if members.intersection(cores)}

    def far(device: Accelerator) -> bool:
        return bool(own) and None not in own and sockets.get(device.numa) not in {None, *own}

    links = [*host_links(named, far), *device_links(named, found.between)]
    devices = tuple(map(described, named))
    warnings = (
        *found.warnings,
        *_part_warnings(named),
        *link_warnings(links, named),
        *_host_warnings(sys, host),
        *_far_warnings(links),
    )
    return Machine(
        machine_name([device.part for device in devices]),
        devices,
        tuple(links),
        (host,),
        versions=found.versions,
        warnings=warnings,
    )


def unknown_part(name: str) -> str:
    """Return the warning for a part that the catalog does not have."""
    return (
        f"{name} is not in the catalog: its peak and the bandwidth of its memory and links are unknown. "
        "meshwise bench measures them. Write figures that you know into a machine file."
    )


def _cpu_machine(host: Host, found: Found) -> Machine:
    """Return a machine with one CPU device. Its figures are unknown, as the catalog has no processors."""
    device = Device("cpu:0", host.processor or "unknown processor", memory=host.memory)
    warnings = (*found.warnings, unknown_part(device.part))
    return Machine("1xcpu", (device,), (), (host,), versions=found.versions, warnings=warnings)


def described(one: Named, teller: str = DRIVER) -> Device:
    """Convert a discovered accelerator to a `Device`. If the catalog knows the device model, the `Device` also gets the
    model's nominal figures, such as its peak FLOP/s.

    teller: who reported the amount of memory, such as "torch". A reported amount replaces the nominal amount, and
        `teller` is recorded as its source.
    """
    found = one.device
    made = Device(one.name, found.name, numa=found.numa, pci=found.pci)
    made = made if one.part is None else replace(made, **nominal(one.part))
    if found.memory is None:
        return made
    return replace(made, memory=found.memory, origins={**made.origins, "memory": teller})


def machine_name(names: Sequence[str]) -> str:
    """Name a machine after its parts: `8xH100-SXM`, or `2xRTX-4090 + 1xNVIDIA T4` if the parts differ."""
    return " + ".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))


def _part_warnings(found: Sequence[Named]) -> list[str]:
    unknown = dict.fromkeys(one.device.name for one in found if one.part is None)
    warnings = [unknown_part(name) for name in unknown]
    if any(one.device.sliced for one in found):
        warnings.append("MIG is on, so programs get slices of these devices. To list the slices, leave out --no-torch.")
    return warnings


def _host_warnings(sys: Path, host: Host) -> list[str]:
    """Warn of a limit on locked memory if the host has InfiniBand. NCCL's guide asks for `--ulimit memlock=-1`."""
    ports = sys / "class/infiniband"
    if "locked memory" in host.limits and ports.is_dir() and any(ports.iterdir()):
        return ["Locked memory is limited, but InfiniBand needs it. Use ulimit -l unlimited or --ulimit memlock=-1."]
    return []


def _far_warnings(links: Sequence[Link]) -> list[str]:
    far = [link.target for link in links if link.source == HOST and link.crosses == "socket"]
    if not far:
        return []
    return [
        f"{far[0]}{and_more(far, 'device')}: this process may not use the cores of the socket that the device is on, "
        "so copies from the host are slower. Give the process cores of that socket."
    ]
