"""Detect races between streams from plain events.

Events say which CUDA events are recorded and waited for, and which memory is read, written, allocated and freed.

Two accesses of the same bytes race if at least one of them writes and nothing orders them. Freed memory is reused for
the next tensor of the stream on which it was allocated. Accesses from before the memory was freed still count. Only the
accesses of streams that were given to `record_stream` do not count, because the allocator waits for these streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwise.checker.races.memory import Access, Region, ShadowMemory
from meshwise.checker.races.order import Order, Recorded
from meshwise.torch_compat.gpu_trace import HOST, Lane

ALL = 1 << 64
"""A number greater than every address."""


@dataclass(eq=False)
class Block:
    """The memory of one allocation, which begins at address `lo`."""

    lo: int
    size: int = 0
    lane: Lane | None = None
    recorded: set[Lane] = field(default_factory=set)
    freed: Any = None


class Touch(NamedTuple):
    """The bytes of one tensor that an operator reads or writes, on a device or in pinned memory. Addresses are unique
    over all devices."""

    block: int
    size: int
    region: Region
    writes: bool
    what: str


@dataclass(frozen=True)
class Race:
    """Two accesses of the same bytes without synchronization between them, at least one of them a write. They were made
    by two streams, or by a stream and the host."""

    earlier: Access
    later: Access
    recorded: Recorded | None

    @property
    def freed(self) -> Any:
        """The source lines that freed the memory between the accesses `earlier` and `later`."""
        return self.earlier.block.freed if self.earlier.block is not self.later.block else None


class Checker:
    """Finds races in events, which it gets in the order in which the program causes them."""

    def __init__(self, found: Callable[[Race], None], forgive: bool = True) -> None:
        self.order = Order()
        self._found, self._forgive = found, forgive
        self._memory = ShadowMemory()
        self._blocks: dict[int, Block] = {}

    def allocate(self, block: int, lane: Lane | None) -> None:
        """Record that the allocator gave the memory at address `block` to the stream `lane`."""
        self._blocks[block] = Block(block, lane=lane)

    def free(self, block: int, where: Any) -> None:
        """Record that a block of memory was freed, so that another tensor may get it."""
        found = self._blocks.pop(block, None)
        if found is not None:
            found.freed = where
            if found.recorded:
                self._memory.forget(found.lo, found.lo + found.size, lambda each: each.lane in found.recorded)

    def forget(self, block: int, size: int) -> None:
        """Forget all accesses of this memory, because nothing uses it now and another tensor will get it."""
        self._blocks.pop(block, None)
        self._memory.forget(block, block + size, lambda each: True)

    def release(self) -> None:
        """Forget all accesses of freed memory."""
        self._memory.forget(0, ALL, lambda each: each.block.freed is not None)

    def record_stream(self, block: int, lane: Lane) -> None:
        """Record a call of `tensor.record_stream(stream)` for the stream `lane`."""
        found = self._blocks.get(block)
        if found is not None:
            found.recorded.add(lane)

    def touch(self, lane: Lane, touches: Iterable[Touch], where: Any) -> None:
        """Record that an operator on a stream reads and writes memory, and report the races that this causes."""
        number = self.order.begin(lane) if lane != HOST else 0

        def is_before(earlier: Access) -> bool:
            return self.order.is_before(earlier.lane, earlier.number, lane)

        for start, size, region, writes, what in sorted(touches, key=lambda each: each.writes):
            access = Access(lane, number, writes, region, self._block(start, size), what, where)
            for earlier in self._memory.add(access, is_before):
                self._found(Race(earlier, access, self.order.event_waited_for(lane, earlier.lane)))
                if self._forgive:  # report a missing wait only once
                    self.order.let_wait(lane, earlier.lane)

    def _block(self, start: int, size: int) -> Block:
        block = self._blocks.setdefault(start, Block(start))
        if size > block.size:
            first, block.size = not block.size, size
            self._memory.split(start, start + size)
            # torch gives memory to another stream only once the device is idle, so earlier accesses cannot race.
            if first and block.lane is not None:
                self._memory.forget(start, start + size, lambda each: each.block.lane not in (None, block.lane))
        return block
