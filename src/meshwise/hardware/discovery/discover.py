"""Discover the machine from NVML, /sys and /proc in milliseconds.

This works without torch, and writes nothing.

What cannot be found stays unknown, with a warning that says what would be needed; a missing file or library is not an
error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.hardware.allowance import bound_cores
from meshwise.hardware.catalog import nominal
from meshwise.hardware.discovery.host_facts import host_facts, node_sockets
from meshwise.hardware.discovery.nvml import read_nvidia
from meshwise.hardware.discovery.sysfs import node_cores
from meshwise.hardware.discovery.topology import (
    Accelerator,
    Found,
    and_more,
    device_links,
    host_links,
    link_warnings,
)
from meshwise.hardware.discovery.torch_facts import as_torch_sees
from meshwise.spec.machine import HOST, Device, Host, Link, Machine

WITHOUT_TORCH = (
    "Without torch, this list has all devices, in the order of PCI addresses. CUDA_VISIBLE_DEVICES and the order of "
    "CUDA, fastest device first, are ignored. Leave out --no-torch to see what programs see."
)


def discover(
    nvml: Any = None,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    *,
    torch: Found | None = None,
    affinity: Sequence[int] | None = None,
    limits: Mapping[str, float] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Machine:
    """Discover the machine as this process may use it."""
    host = host_facts(sys, proc, affinity, limits)
    sockets = node_sockets(sys, proc)
    found = read_nvidia(sys, nvml, sockets)
    if torch is not None:
        found = as_torch_sees(found, torch)
    if not found.accelerators:
        return _cpu_machine(host, found)
    named = [replace(each, label=each.label or f"cuda:{at}") for at, each in enumerate(found.accelerators)]
    cores = bound_cores() if affinity is None else affinity
    own = {sockets.get(node) for node, members in node_cores(sys).items() if members.intersection(cores)}
    known = own and None not in own
    far = {node for node, socket in sockets.items() if known and socket not in {None, *own}}
    links = [*host_links(named, far), *device_links(named, found.between)]
    devices = tuple(map(_described, named))
    hidden = "CUDA_VISIBLE_DEVICES" in environ or len({device.name for device in named}) > 1
    warnings = (
        *found.warnings,
        *map(_unknown_part, dict.fromkeys(device.name for device in named if device.part is None)),
        *([WITHOUT_TORCH] if torch is None and hidden else []),
        *link_warnings(links, named),
        *_host_warnings(links),
    )
    parts = [device.part for device in devices]
    name = " + ".join(f"{parts.count(part)}x{part}" for part in dict.fromkeys(parts))
    return Machine(name, devices, tuple(links), (host,), versions=found.versions, warnings=warnings)


def _unknown_part(name: str) -> str:
    """Return the warning for a part that the catalog does not have."""
    return (
        f"{name} is not in the catalog: its peak and the bandwidth of its memory and links are unknown. "
        "meshwise bench measures them. Write figures that you know into a machine file."
    )


def _cpu_machine(host: Host, found: Found) -> Machine:
    """Return a machine with one CPU device. Its figures are unknown, as the catalog has no processors."""
    device = Device("cpu:0", host.processor or "unknown processor", memory=host.memory)
    warnings = (*found.warnings, _unknown_part(device.part))
    return Machine("1xcpu", (device,), (), (host,), versions=found.versions, warnings=warnings)


def _described(found: Accelerator) -> Device:
    """Convert an accelerator to a `Device`, with the nominal figures of its model."""
    made = Device(found.label, found.name, numa=found.numa, pci=found.pci)
    made = made if found.part is None else replace(made, **nominal(found.part))
    if found.memory is None:
        return made
    return replace(made, memory=found.memory, origins={**made.origins, "memory": found.told_by})


def _host_warnings(links: Sequence[Link]) -> list[str]:
    warnings = []
    if far := [link.target for link in links if link.source == HOST and link.crosses == "socket"]:
        warnings.append(
            f"{far[0]}{and_more(far, 'device')}: this process may not use the cores of the socket that the device is "
            "on, so copies from the host are slower. Give the process cores of that socket."
        )
    return warnings
