"""Define the devices of a namespace, their names, and which are local.

A place is the number of a device. Over ranks, place k is rank k, and one place is local. In one process, all places are
local.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwise.arrays.sharding import Layout, Shape, Sharding, evenly, fitting, sharding
from meshwise.hardware.find import accelerators
from meshwise.spec.devices import has_streams, parse_devices
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine
from meshwise.transfer.devices import as_device, open_devices
from meshwise.workers.join import join, rank_context

ALL = "all"
"""The name for all devices together in `x.device` and `device=`. It stands for the default placement."""


@dataclass(frozen=True)
class Space:
    """The devices of a namespace. The number of a device is called its place."""

    devices: tuple[torch.device, ...]
    names: tuple[str, ...]
    here: tuple[int, ...]
    default_float: torch.dtype

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        return tuple(range(len(self.devices)))

    @functools.cached_property
    def over_ranks(self) -> bool:
        return len(self.here) < len(self.devices)

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether all devices are CPUs, so that all arrays are in host memory."""
        return all(device.type == "cpu" for device in self.devices)

    def local(self, placed: Sharding) -> Sequence[tuple[int, int]]:
        """Return (number of the part, number of its device) for each part in this process, in the order of
        `Array.parts`."""
        if not self.over_ranks:
            return placed.numbered
        return [(part, place) for part, place in placed.numbered if place in self.here]

    def placed(self, shape: Shape, device: Any = None, wanted: Layout | Sharding | None = None) -> Sharding:
        """Return the sharding of a new array, as the user asks for it by a device or a layout."""
        if isinstance(wanted, Layout):
            return self._known(wanted.of(shape))
        if wanted is not None and not isinstance(wanted, Sharding):
            raise UsageError(f"sharding must be like xp.shard(0), xp.replicated() or xp.single(0), not {wanted!r}.")
        if wanted is not None:
            return self._known(fitting(wanted, shape))
        if device is not None and device != ALL:
            return sharding((self.place(device),))
        return evenly(shape[0], self.places) if shape else sharding((0,))

    def place(self, device: Any) -> int:
        """Return the number of a device in this namespace."""
        if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < len(self.names):
            return device
        name = str(device)
        if name in self.names:
            return self.names.index(name)
        alike = [place for place, own in enumerate(self.devices) if str(own) == name]
        if not alike:
            known = ", ".join(self.names)
            raise UsageError(f"device {name!r} is not in this array namespace. Use one of {known}, or {ALL!r}.")
        return alike[0]

    def speeds(self, machine: Machine) -> list[float]:
        """Return the memory bandwidth of each device in bytes per second."""
        known = {device.name: device.memory_rate or device.memory_bandwidth for device in machine.devices}
        pairs = zip(self.devices, self.names, strict=True)
        found = [known.get(str(device)) or known.get(name) for device, name in pairs]
        if not all(found):
            missing = ", ".join(name for name, rate in zip(self.names, found, strict=True) if not rate)
            raise UsageError(
                f"weights of machine {machine.name!r}: the memory speed of {missing} is not known. Measure it with "
                "`meshwise bench`, or give a number for each device."
            )
        return [rate for rate in found if rate]

    def device_name(self, placed: Sharding) -> str:
        """Return `x.device` for an array with this sharding: the name of its only device, or "all"."""
        return self.names[placed.places[0]] if placed.single else ALL

    def _known(self, placed: Sharding) -> Sharding:
        if any(not 0 <= place < len(self.devices) for place in placed.places) or not placed.places:
            raise UsageError(f"a sharding takes device numbers of this namespace, {self.places}, not {placed.places}.")
        return placed


def find_space(devices: Any, default_float: torch.dtype) -> Space:
    """Return the `Space` of the devices that a user asks for, or of the ranks of this run."""
    world = rank_context().world
    if world.size == 1:
        found = find_devices(devices)
        return make_space(found, default_float, tuple(range(len(found))))
    if devices is not None:
        kind, count = _asked_of_ranks(devices)
        if kind != world.kind or (count or world.size) != world.size:
            raise UsageError(
                f"array_namespace({devices!r}): arrays of this run are divided over its {world.size} {world.kind} "
                "ranks, and no other devices. Leave devices out here, and choose the devices when you start the run."
            )
    world = join().world
    return make_space((torch.device(world.device),) * world.size, default_float, (world.rank,))


def _asked_of_ranks(devices: Any) -> tuple[str, int | None]:
    """Return the (type, number) of the devices that a user asks for. The number is None if the user did not name it."""
    if isinstance(devices, str) and not devices.startswith("cpu:"):
        request = parse_devices(devices)
        return request.kind or str(accelerators()[0]), None if "x" not in devices else request.count
    listed = [devices] if isinstance(devices, str | torch.device) else list(devices)
    return torch.device(listed[0]).type, len(listed)


@functools.cache
def make_space(devices: tuple[torch.device, ...], default_float: torch.dtype, here: tuple[int, ...]) -> Space:
    """Return the `Space` of these devices."""
    if len(here) < len(devices):
        names = tuple(f"{devices[0].type}:{rank}" for rank in range(len(devices)))
        return Space(devices, names, here, default_float)
    named = [str(device) for device in devices]
    if all(device.type == "cpu" for device in devices):
        named = [f"cpu:{place}" for place in range(len(devices))]
    elif len(set(named)) < len(named):  # one device stands for several places
        named = [f"{name}/{named[:at].count(name)}" for at, name in enumerate(named)]
    return Space(devices, tuple(named), here, default_float)


def find_devices(devices: Any) -> tuple[torch.device, ...]:
    """Return the torch devices that a user asks for, by default all GPUs, or one CPU if there are none."""
    if devices is None:
        kind, count = accelerators()
        return _count(kind, count) if kind else _count("cpu", 1)
    if isinstance(devices, torch.device):
        devices = str(devices)
    if isinstance(devices, str):
        return _of_words(devices)
    if not isinstance(devices, Sequence) or not devices:
        raise UsageError(f"array_namespace({devices!r}): pass devices like '4xcpu', 'cuda' or ['cuda:0', 'cuda:1'].")
    named = [torch.device(device) if str(device).startswith("cpu") else as_device(device) for device in devices]
    if all(device.type == "cpu" for device in named):
        return _count("cpu", len(named))
    if any(device.type == "cpu" for device in named):
        raise UsageError(f"array_namespace({list(map(str, devices))}) mixes CPU and GPUs. Name devices of one kind.")
    return tuple(named)


def _of_words(words: str) -> tuple[torch.device, ...]:
    if words.startswith("cpu:"):
        return _count("cpu", 1)
    request = parse_devices(words)
    kind = request.kind or accelerators()[0] or "cpu"
    if request.indices is not None:
        return tuple(as_device(f"{kind}:{index}") for index in request.indices)
    count = request.count if request.kind is not None and "x" in words else None
    if has_streams(kind):
        there = torch.get_device_module(kind).device_count()
        if not there or (count or 1) > there:
            raise UsageError(
                f"array_namespace({words!r}): torch finds {there} {kind.upper()} devices on this machine. "
                "To try meshwise on the CPU, write '2xcpu'."
            )
        return _count(kind, count or there)
    return _count(kind, count or 1)


def _count(kind: str, count: int) -> tuple[torch.device, ...]:
    if kind != "cpu":
        return tuple(as_device(f"{kind}:{index}") for index in range(count))
    opened = open_devices()
    if opened is None:  # torch has one CPU device, which stands for all places
        return (torch.device("cpu"),) * count
    if len(opened) < count:
        raise UsageError(f"{count} CPU devices need mw.virtual_devices({count}), but only {len(opened)} are open.")
    return tuple(opened[:count])
