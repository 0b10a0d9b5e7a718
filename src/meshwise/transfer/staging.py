"""Copy through the host in two overlapping legs.

The copy uses two pinned buffers and a stream on each device.

While the second leg copies one chunk from its buffer to the target, the first leg fills the other buffer. The streams
wait for each other by events, so the host only launches. Both devices' current streams wait for the copy, so that later
work on them may read the target and write the source.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.transfer.checksum import raw_bytes
from meshwise.transfer.stopwatch import Seconds, Stopwatch

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
    """Copy `src` to `dst` through the host, with any strides and dtypes. Return how many seconds the copy took.

    On accelerators, return a function instead. It waits for the copy to end and then returns the seconds.
    """
    if src.numel() == 0:
        return 0.0
    dst, src = dst.detach(), src.detach()
    sent = src.to(dst.dtype) if dst.element_size() < src.element_size() else src  # the fewer bytes travel
    sent = sent.resolve_conj().resolve_neg().contiguous()
    whole = dst.is_contiguous() and dst.dtype == sent.dtype and not dst.is_conj() and not dst.is_neg()
    into = dst if whole else torch.empty(sent.shape, dtype=sent.dtype, device=dst.device)
    legs = _stream_legs if has_streams(src.device) and has_streams(dst.device) else _host_legs
    seconds = legs(raw_bytes(into), raw_bytes(sent))
    if not whole:
        dst.copy_(into)
    return seconds


def _chunks(dst: Tensor, src: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (0 or 1, chunk of dst, chunk of src) for each chunk."""
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
    """The state of copies between one pair of devices.

    It has a stream on each device, two buffers, and events for when each buffer was filled and emptied.
    """

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
        lane.out.wait_stream(here)  # src is written
        lane.back.wait_stream(there)  # dst is not used any more
        lane.back.wait_stream(here)  # only for the clock: it starts when both ends are ready
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
    # The caching allocator must not hand the memory to others before the side streams are done with it.
    src.record_stream(lane.out)
    dst.record_stream(lane.back)
    return seconds


def _make_buffers(lane: _Lane, size: int) -> None:
    """Make sure that `lane` has two pinned buffers of at least `size` bytes. Waits until old buffers are unused."""
    if not lane.buffers or lane.buffers[0].numel() < size:
        for event in lane.emptied:
            event.synchronize()
        lane.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
