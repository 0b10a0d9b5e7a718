"""Measure the copies that one process makes.

They go from host to device and back, device to device, one to all, and all to one.

Each path is timed by size, and then checked: the source is filled with data that depends on the path and the offset,
copied once more, and every byte is compared where it arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from meshwise.machine.measure.result import PathResult, PathSpec, result_of
from meshwise.machine.measure.timing import Sample, repeat, wait
from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text
from meshwise.transfer.pattern import fill, first_difference

Move = Callable[[Tensor, Tensor, str], None]
"""`move(target, source, path)` copies in the current stream. `path` is `pinned`, `pageable`, `peer` or `staged`."""
Leg = tuple[str, str]
"""A copy, as the names of its source and its target."""


@dataclass(frozen=True)
class CopySpec(PathSpec):
    """A path to measure that consists of one copy or of several copies at the same time, all made by one process.

    legs: the copies, all of the same size.
    """

    legs: tuple[Leg, ...]


def copy_spec(operation: str, source: str, target: str, path: str, *legs: Leg) -> CopySpec:
    """Describe a path to measure, that is, one or more copies that are timed together.

    legs: each copy as (source, target). The default is a single copy from `source` to `target`.
    """
    legs = legs or ((source, target),)
    return CopySpec(operation, source, target, path, len({end for leg in legs for end in leg}), legs)


def copy_paths(devices: Sequence[str], peers: Callable[[str, str], bool]) -> list[CopySpec]:
    """Return all copies to measure on one host.

    peers: `peers(one, other)` returns whether device `one` can read the memory of device `other` directly.
    """

    def ways(legs: Sequence[Leg]) -> tuple[str, ...]:
        return ("peer", "staged") if all(peers(*leg) for leg in legs) else ("staged",)

    found = []
    for device in devices:
        ends = (("host", device), (device, "host"))
        found += [copy_spec("copy", *pair, path) for path in ("pinned", "pageable") for pair in ends]
    pairs = list(permutations(devices, 2))
    found += [copy_spec("copy", *pair, path) for pair in pairs for path in ways([pair])]
    first, *others = devices
    if others:
        out = [(first, other) for other in others]
        found.append(copy_spec("one-to-all", first, "all", ways(out)[0], *out))
        found.append(copy_spec("all-to-one", "all", first, ways(out)[0], *((other, first) for other in others)))
    return found


def measure_copy(
    path: CopySpec, sizes: Sequence[int], budget: float, move: Move, place: Callable[[str], str]
) -> PathResult:
    """Time one path at growing sizes for about `budget` seconds, then check that every byte arrives.

    A size that would take longer than the time left is skipped, and so are all larger sizes.

    place: converts the name of a device to the name of its torch device.
    """
    end = time.perf_counter() + budget

    def buffer(end: str) -> Tensor:
        if end == "host":
            return torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=path.path == "pinned")
        return torch.zeros(max(sizes), dtype=torch.uint8, device=place(end))

    tensors = [(buffer(source), buffer(target)) for source, target in path.legs]
    clocked = torch.device("cpu") if len(path.legs) > 1 else _clocked(path.legs[0], place)
    samples: dict[int, Sample] = {}
    note = ""
    for at, size in enumerate(sizes):
        cut = [(source[:size], target[:size]) for source, target in tensors]
        left = end - time.perf_counter()
        if samples and left < 7 * samples[sizes[at - 1]].seconds * size / sizes[at - 1]:
            note = f"sizes of {bytes_text(size)} and more were left out: the time for this path was over"
            break
        samples[size] = repeat(_call(path.path, cut, move), clocked, left / (len(sizes) - at))
    return result_of(path, samples, check_path(path, tensors, move), note)


def check_path(path: CopySpec, tensors: Sequence[tuple[Tensor, Tensor]], move: Move) -> str | None:
    """Copy once, and compare the bytes. Return a text on the first bytes that did not arrive as they were sent, or None
    if all did."""
    for key, (source, target) in enumerate(tensors):
        fill(source, key + 1)
        fill(target, -key - 1)  # what an earlier copy left must not pass for this one's
    for source, target in tensors:
        move(target, source, path.path)
    for tensor in (tensor for pair in tensors for tensor in pair):
        wait(tensor.device)
    for key, (_, target) in enumerate(tensors):
        at = first_difference(target, key + 1)
        if at is not None:
            ends = " -> ".join(path.legs[key])
            operation = f" ({path.operation})" if path.operation != "copy" else ""
            return f"{ends}, {path.path}: byte {at:,} of {target.numel():,} is not what was sent{operation}"
    return None


def _clocked(leg: Leg, place: Callable[[str], str]) -> torch.device:
    """Return the device whose clock times a copy. torch runs a copy in the stream of its source, so this is the source
    device. If the source is the host, it is the target device."""
    return torch.device(place(next(end for end in leg if end != "host")))


def _call(how: str, legs: Sequence[tuple[Tensor, Tensor]], move: Move) -> Callable[[], None]:
    """Return a function that makes all copies at the same time. A single copy runs in the current stream. Several
    copies run in new streams.

    how: the kind of copy, such as `staged`.
    legs: (source, target) of each copy.
    move: `move(target, source, how)` makes one copy.
    """
    if len(legs) == 1:
        ((source, target),) = legs
        if how == "staged" and not source.is_cpu and not target.is_cpu:
            return lambda: _staged_alone(target, source, move)
        return lambda: move(target, source, how)
    devices = sorted({tensor.device for leg in legs for tensor in leg if has_streams(tensor.device)}, key=str)
    streams = [[torch.Stream(device) for device in devices] for _ in legs]

    def at_once() -> None:
        for (source, target), own in zip(legs, streams, strict=True):
            with ExitStack() as stack:
                for stream in own:
                    stack.enter_context(stream)
                move(target, source, how)
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    return at_once


def _staged_alone(target: Tensor, source: Tensor, move: Move) -> None:
    """Copy a tensor between two devices through the host's memory. The clock runs in the stream of the source device,
    but the copy ends in the stream of the target device. So the stream of the source waits until the copy is
    complete."""
    move(target, source, "staged")
    here, there = (torch.get_device_module(end).current_stream(end) for end in (source.device, target.device))
    here.wait_stream(there)
