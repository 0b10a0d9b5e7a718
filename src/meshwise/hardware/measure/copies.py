"""Measure the copies that one process makes, path by path.

The process sees every accelerator of the host. Copies go from host to device and back, and from device to device.

Each path is timed by size, and then checked: the source is filled with data that depends on the offset, copied once
more, and every byte is compared where it arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from statistics import median

import torch
from torch import Tensor

from meshwise.hardware.allowance import bound_cores, cores_near
from meshwise.hardware.find import pci_address
from meshwise.hardware.measure.result import PathResult, PathSpec, Progress, result_of
from meshwise.hardware.measure.timing import held_seconds, repeat, wait
from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text
from meshwise.transfer.checksum import fill, first_wrong
from meshwise.transfer.copy import CopyOptions, copy, move
from meshwise.transfer.path import AUTO, PEER, STAGED, reads_directly

Move = Callable[[Tensor, Tensor, str], None]
"""`move(target, source, path)` copies in the current stream. `path` is `pinned`, `pageable`, `peer` or `staged`."""
LOAD_BYTES, LOAD_COPIES = 64 << 20, 200  # 0.4 s of copies on PCIe 4 x16, longer than an NVML query


def copy_paths(devices: Sequence[str], peers: Callable[[str, str], bool]) -> list[PathSpec]:
    """Return all copies to measure on one host."""
    host = [(pair, how) for d in devices for how in ("pinned", "pageable") for pair in (("host", d), (d, "host"))]
    ways = {pair: ("peer", "staged") if peers(*pair) else ("staged",) for pair in permutations(devices, 2)}
    between = [(pair, how) for pair, known in ways.items() for how in known]
    return [PathSpec("copy", *pair, how, 2) for pair, how in (*host, *between)]


def measure_in_process(devices: Sequence[str], sizes: Sequence[int], budget: float, progress: Progress) -> None:
    """Measure and check all copies among these devices and the host, for about `budget` seconds in total."""
    paths = [path for path in copy_paths(devices, _peers) if _can(path)]
    before = bound_cores()
    try:
        for path in paths:
            progress.starts(str(path))
            # Run on cores near the device, so that pinned memory is on the device's NUMA node.
            device = path.target if path.source == "host" else path.source
            os.sched_setaffinity(0, cores_near(pci_address(device), before))
            progress.done(measure_copy(path, sizes, budget / len(paths), enqueue))
    finally:
        os.sched_setaffinity(0, before)


def measure_copy(path: PathSpec, sizes: Sequence[int], budget: float, move: Move) -> PathResult:
    """Time one path at growing sizes for about `budget` seconds, then check that every byte arrives."""
    end = time.perf_counter() + budget
    source, target = (
        torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=path.path == "pinned")
        if name == "host"
        else torch.zeros(max(sizes), dtype=torch.uint8, device=name)
        for name in (path.source, path.target)
    )
    # torch runs a copy in the source's stream, so it is timed there. The host has no stream.
    clocked = target.device if path.source == "host" else source.device
    samples: dict[int, list[float]] = {}
    note = ""
    for at, size in enumerate(sizes):
        left = end - time.perf_counter()
        if samples and left < 7 * median(samples[sizes[at - 1]]) * size / sizes[at - 1]:
            note = f"sizes of {bytes_text(size)} and more were left out: the time for this path was over"
            break
        call = _call(target[:size], source[:size], path.path, move)
        samples[size], _ = repeat(partial(held_seconds, call, clocked), left / (len(sizes) - at))
    return result_of(path, samples, check_copy(path, target, source, move), note)


def check_copy(path: PathSpec, target: Tensor, source: Tensor, move: Move) -> str | None:
    """Copy once, and compare the bytes. Return a sentence if some differ."""
    fill(source, 1)
    fill(target, -1)  # so that leftover bytes cannot pass for copied ones
    move(target, source, path.path)
    for tensor in (target, source):
        wait(tensor.device)
    at = first_wrong(target, 1)
    if at is None:
        return None
    return f"{path.source} -> {path.target}, {path.path}: byte {at:,} of {target.numel():,} is not what was sent"


def enqueue(target: Tensor, source: Tensor, how: str) -> None:
    """Enqueue a copy in the current stream without making the host wait, since the copies are timed."""
    if has_streams(source.device) and target.is_cpu:
        copy(target, source, stream=torch.get_device_module(source.device).current_stream(source.device))
    elif has_streams(target.device) and source.is_cpu:
        move(target, source, "copy", CopyOptions(non_blocking=True))
    else:
        copy(target, source, path=how if how in (PEER, STAGED) else AUTO)


def keep_busy(devices: Sequence[str]) -> None:
    """Enqueue copies from the host to each accelerator, so that its PCIe link is not idle for the next half second."""
    for device in filter(has_streams, devices):
        source = torch.zeros(LOAD_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.zeros(LOAD_BYTES, dtype=torch.uint8, device=device)
        for _ in range(LOAD_COPIES):
            enqueue(target, source, "pinned")


def _call(target: Tensor, source: Tensor, how: str, move: Move) -> Callable[[], None]:
    """Return a function that makes one copy in the stream of its source."""

    def staged() -> None:
        move(target, source, how)
        here, there = (torch.get_device_module(end).current_stream(end) for end in (source.device, target.device))
        here.wait_stream(there)

    if how == "staged" and not source.is_cpu and not target.is_cpu:
        return staged
    return lambda: move(target, source, how)


def _peers(source: str, target: str) -> bool:
    """Return whether the device `source` can read the memory of `target` directly, without the host."""
    return has_streams(source) and reads_directly(torch.device(source), torch.device(target))


def _can(path: PathSpec) -> bool:
    """Return whether the devices of a path support its copies. All but `pageable` copies need streams."""
    return path.path == "pageable" or all(end == "host" or has_streams(end) for end in (path.source, path.target))
