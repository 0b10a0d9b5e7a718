"""Choose the path between two devices: direct, peer, or via host.

- direct: a copy on one device, or between the host and a device
- peer: one device writes into the memory of the other device
- staged: two overlapping copies through two pinned buffers: while one is copied to the target, the other is filled

If the machine's links were measured, the faster of peer and staged at the copy's size is taken. Otherwise, the `peer`
flag of the link decides. If no link is known, torch says whether the devices have peer access.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.machine import HOST, Link, Machine, link_between
from meshwise.spec.timings import seconds_at
from meshwise.transfer.checksum import raw_bytes
from meshwise.transfer.comm_log import Seconds, Stopwatch

AUTO, DIRECT, PEER, STAGED = "auto", "direct", "peer", "staged"
PATHS = (AUTO, DIRECT, PEER, STAGED)


def choose(source: str, target: str, size: int, *, wanted: str = AUTO, links: Machine | None = None) -> str:
    """Choose the path of a copy of `size` bytes between two devices. Raises UsageError if the path is impossible.

    source, target: the names of the devices, such as `host` or `cuda:0`.
    wanted: `auto`, or the path to take.
    links: the machine, as described or measured.
    """
    check_known("path", wanted, PATHS)
    if source == target or HOST in (source, target):
        if wanted in (PEER, STAGED):
            raise UsageError(f"path {wanted!r} copies from device to device, not from {source} to {target}. Omit path.")
        return DIRECT
    if wanted == DIRECT:
        raise UsageError(f"path 'direct' cannot copy from {source} to {target}. Use 'peer' or 'staged', or omit path.")
    link = link_between(links, source, target) if links is not None else None
    if wanted == STAGED:
        return STAGED
    peer = _reaches(link, source, target)
    if wanted == PEER:
        if not peer:
            raise UsageError(f"path 'peer' needs peer access, which {source} and {target} do not have. Use 'staged'.")
        return PEER
    return _faster(link, size) or (PEER if peer else STAGED)


def _faster(link: Link | None, size: int) -> str | None:
    """Return the path that was measured to be faster for `size` bytes: "peer" or "staged". None without
    measurements."""
    if link is None or not {PEER, STAGED} <= link.timings.keys() or link.peer is False:
        return None
    peer, staged = (seconds_at(link.timings[path], size) for path in (PEER, STAGED))
    return PEER if peer <= staged else STAGED


def _reaches(link: Link | None, source: str, target: str) -> bool:
    if link is not None and link.peer is not None:
        return link.peer
    ends = [torch.device(source), torch.device(target)]
    return reads_directly(*ends) if all(map(has_streams, ends)) else True  # virtual devices share one memory


def reads_directly(reader: torch.device, owner: torch.device) -> bool:
    """Check whether device `reader` can read the memory of device `owner` without going through the host."""
    return bool(torch.get_device_module(reader).can_device_access_peer(reader, owner))


PARTS = 32
"""The number of chunks of a large copy through the host. While one chunk is copied from the host to the target, the
next chunk is copied to the host. In all, this takes about 1 / 32 (3 %) longer than the slower transfer alone."""
SMALLEST, LARGEST = 1 << 20, 32 << 20
"""The limits of a chunk's size in bytes. At 25 GB/s (PCIe 4), 1 MiB takes 42 µs, about as long as the host takes to
launch its two copies. Up to two buffers of 32 MiB stay in pinned memory for each pair of devices."""


def chunk_bytes(size: int) -> int:
    """Return the number of bytes per chunk for a staged copy of `size` bytes."""
    return min(max(size // PARTS, SMALLEST), LARGEST)


def staged(dst: Tensor, src: Tensor) -> Seconds:
    """Copy `src` to `dst` through the host, with any strides and dtypes.
    Return the seconds that this took."""
    if src.numel() == 0:
        return 0.0
    dst, src = dst.detach(), src.detach()
    sent = src.to(dst.dtype) if dst.element_size() < src.element_size() else src  # send the smaller of the two dtypes
    sent = sent.resolve_conj().resolve_neg().contiguous()
    whole = dst.is_contiguous() and dst.dtype == sent.dtype and not dst.is_conj() and not dst.is_neg()
    into = dst if whole else torch.empty(sent.shape, dtype=sent.dtype, device=dst.device)
    legs = _stream_legs if has_streams(src.device) and has_streams(dst.device) else _host_legs
    seconds = legs(raw_bytes(into), raw_bytes(sent))
    if not whole:
        dst.copy_(into)
    return seconds


def _chunks(dst: Tensor, src: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (buffer 0 or 1, part of dst, part of src) per chunk."""
    step = chunk_bytes(src.numel())
    for number, start in enumerate(range(0, src.numel(), step)):
        yield number % 2, dst[start : start + step], src[start : start + step]


def _host_legs(dst: Tensor, src: Tensor) -> Seconds:
    watch = Stopwatch(None)
    buffers = torch.empty(2, min(chunk_bytes(src.numel()), src.numel()), dtype=torch.uint8)
    for which, there, here in _chunks(dst, src):
        buffer = buffers[which][: here.numel()]
        buffer.copy_(here)
        there.copy_(buffer)
    return watch.stop()


@dataclass
class _Lane:
    """Streams, events and buffers for copies from one device to another."""

    out: torch.Stream
    back: torch.Stream
    filled: list[torch.Event]
    emptied: list[torch.Event]
    buffers: list[Tensor] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@cache
def _lane(source: torch.device, target: torch.device) -> _Lane:
    filled, emptied = ([torch.Event(device), torch.Event(device)] for device in (source, target))
    return _Lane(torch.Stream(source), torch.Stream(target), filled, emptied)


def _stream_legs(dst: Tensor, src: Tensor) -> Seconds:
    here, there = (torch.get_device_module(end).current_stream(end) for end in (src.device, dst.device))
    lane = _lane(src.device, dst.device)
    with lane.lock:
        _make_buffers(lane, min(chunk_bytes(src.numel()), src.numel()))
        lane.out.wait_stream(here)  # wait until src is written
        lane.back.wait_stream(there)  # wait until dst is no longer in use
        lane.back.wait_stream(here)  # only for timing: the clock starts when both ends are ready
        watch = Stopwatch(dst.device, lane.back)
        for which, target, source in _chunks(dst, src):
            buffer = lane.buffers[which][: source.numel()]
            lane.out.wait_event(lane.emptied[which])
            with lane.out:
                buffer.copy_(source, non_blocking=True)
            lane.filled[which].record(lane.out)
            lane.back.wait_event(lane.filled[which])
            with lane.back:
                target.copy_(buffer, non_blocking=True)
            lane.emptied[which].record(lane.back)
        seconds = watch.stop(lane.back)
        here.wait_stream(lane.out)
        there.wait_stream(lane.back)
    # The caching allocator must not reuse the memory before the side streams are done with it.
    src.record_stream(lane.out)
    dst.record_stream(lane.back)
    return seconds


def _make_buffers(lane: _Lane, size: int) -> None:
    """Make sure that `lane` has two pinned buffers of at least `size` bytes. Waits until old buffers are unused."""
    if not lane.buffers or lane.buffers[0].numel() < size:
        for event in lane.emptied:
            event.synchronize()
        lane.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
