"""What is here, as a Machine: from NVML, /sys and /proc, without torch, in some milliseconds, writing nothing.

What cannot be found stays unknown, with a warning that says what would be needed; a file or a library that is missing
is no error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.machine.catalog import Part, field_origins, part_of_driver_name
from meshwise.machine.discovery.amd import read_amd
from meshwise.machine.discovery.found import Accelerator, Found
from meshwise.machine.discovery.host_facts import allowed, core_packages, host_facts
from meshwise.machine.discovery.nvml import read_nvidia
from meshwise.machine.discovery.sysfs import node_cores
from meshwise.machine.discovery.topology import and_more, device_links, host_links, link_warnings
from meshwise.machine.discovery.visible import visible
from meshwise.spec.machine import HOST, Device, Host, Link, Machine

DRIVER = "as the driver reports it"


def discover(
    nvml: Any = None,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    *,
    amdsmi: Any = None,
    affinity: Sequence[int] | None = None,
    limits: Mapping[str, float] | None = None,
    environ: Mapping[str, str] = os.environ,
    part_of: Callable[[str, int | None], Part | None] = part_of_driver_name,
) -> Machine:
    """The machine that this process runs on; without an accelerator, one CPU worker. Never raises for what is missing.

    nvml, amdsmi: the libraries to ask, None: those that are installed. sys, proc: where /sys and /proc are. affinity
    and limits: of this process, None: ask the system. environ: for CUDA_VISIBLE_DEVICES and the like. part_of: the
    catalog's part for a driver's name and memory.
    """
    host = host_facts(sys, proc, affinity, limits)
    sockets = _sockets(sys, proc)
    found = read_nvidia(sys, proc, nvml, lambda one, other: _same(sockets.get(one), sockets.get(other)))
    if not found.accelerators:
        amd = read_amd(sys, amdsmi)
        found = Found(amd.accelerators, amd.between, {**found.versions, **amd.versions}, found.warnings + amd.warnings)
    found = visible(found, environ)
    if not found.accelerators:
        return _cpu_machine(host, found, part_of)
    names = [f"cuda:{index}" for index in range(len(found.accelerators))]
    parts = [part_of(device.name, device.memory) for device in found.accelerators]
    devices = tuple(map(described, names, found.accelerators, parts))
    cores = allowed(affinity, core_packages(proc))
    own = {sockets.get(node) for node, members in node_cores(sys).items() if members.intersection(cores)}
    links = [
        *host_links(names, found, parts, lambda device: _far(device, sockets, own)),
        *device_links(names, found, parts),
    ]
    by_name = dict(zip(names, found.accelerators, strict=True))
    warnings = (
        *found.warnings,
        *_part_warnings(found, parts),
        *link_warnings(links, dict(zip(names, parts, strict=True)), by_name),
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
    """The warning for a part that the catalog does not have."""
    return (
        f"{name} is not in the catalog: its peak and the bandwidth of its memory and links are unknown. "
        "meshwise bench measures them; figures that you know go into a machine file."
    )


def _cpu_machine(host: Host, found: Found, part_of: Callable[[str, int | None], Part | None]) -> Machine:
    """One CPU worker, as `all` gives one."""
    part = part_of(host.processor, None)
    device = Device("cpu:0", host.processor or "unknown processor", memory=host.memory)
    if part is not None:
        device = _with_part(device, part)
    warnings = found.warnings
    if part is None:
        warnings += (unknown_part(device.part),)
    return Machine("1xcpu", (device,), (), (host,), versions=found.versions, warnings=warnings)


def described(name: str, device: Accelerator, part: Part | None) -> Device:
    """The device of this name, with the nominal figures of its part where that is known."""
    origins = {} if device.memory is None else {"memory": DRIVER}
    made = Device(name, device.name, memory=device.memory, numa=device.numa, pci=device.pci, origins=origins)
    return made if part is None else _with_part(made, part)


def _with_part(device: Device, part: Part) -> Device:
    """The part's name and nominal figures; the memory stays what the driver says, where it says so."""
    figures = ("memory_bandwidth", "peak", "achievable") + (("memory",) if device.memory is None else ())
    origins = {name: origin for name, origin in field_origins(part).items() if name.split(".")[0] in figures}
    return replace(
        device,
        part=part.name,
        memory=part.memory if device.memory is None else device.memory,
        memory_bandwidth=part.memory_bandwidth,
        peak=part.peak,
        achievable=part.achievable,
        origins={**device.origins, **origins},
    )


def machine_name(names: Sequence[str]) -> str:
    """`8xH100-SXM`, or `2xRTX-4090 + 1xNVIDIA T4` where parts differ."""
    return " + ".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))


def _part_warnings(found: Found, parts: Sequence[Part | None]) -> list[str]:
    unknown = [device for device, part in zip(found.accelerators, parts, strict=True) if part is None]
    warnings = [unknown_part(name) for name in dict.fromkeys(device.name for device in unknown)]
    if any(device.sliced for device in found.accelerators):
        warnings.append(
            "MIG is on: what programs get are slices of these devices. torch lists them (leave out --no-torch)."
        )
    return warnings


def _host_warnings(sys: Path, host: Host) -> list[str]:
    """InfiniBand registers memory that must be locked: NCCL's guide asks for `--ulimit memlock=-1`."""
    ports = sys / "class/infiniband"
    if "locked memory" in host.limits and ports.is_dir() and any(ports.iterdir()):
        return ["Locked memory is limited, and InfiniBand needs it: ulimit -l unlimited, or --ulimit memlock=-1."]
    return []


def _far_warnings(links: Sequence[Link]) -> list[str]:
    far = [link.target for link in links if link.source == HOST and link.crosses == "socket"]
    if not far:
        return []
    return [
        f"{far[0]}{and_more(far, 'device')}: on a socket whose cores this process may not use, so that copies from "
        "the host cross to the other socket. Give the process cores of that socket."
    ]


def _sockets(sys: Path, proc: Path) -> Mapping[int, int | None]:
    """The socket of each NUMA node."""
    packages = core_packages(proc)
    return {node: packages.get(min(cores)) for node, cores in node_cores(sys).items()}


def _far(device: Accelerator, sockets: Mapping[int, int | None], own: set[int | None]) -> bool:
    socket = sockets.get(device.numa) if device.numa is not None else None
    return socket is not None and None not in own and bool(own) and socket not in own


def _same(one: int | None, other: int | None) -> bool:
    return one is not None and one == other
