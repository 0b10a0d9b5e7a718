"""Replay allocations in a model of torch's caching allocator.

The model has the rules of c10/cuda/CUDACachingAllocator.cpp (pytorch@001074d2; defaults of c10/core/AllocatorConfig.h),
unless PYTORCH_ALLOC_CONF changes them: `round_size`, `get_allocation_size`, `get_free_block`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`. Not modeled: blocks that `record_stream` keeps longer, and expandable
segments, which reserve less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwise.hardware.catalog import part
from meshwise.planner.constants import FIGURES
from meshwise.planner.work import Allocate, CollectiveOperation, Free, Launch, Work

BLOCK = 512
"""The size of each block of memory is a multiple of this many bytes (kMinBlockSize)."""
SMALL = 1 << 20
"""The largest allocation of the small pool (kSmallSize). A large block is only split if more than this remains."""
SMALL_SEGMENT = 2 << 20
"""The bytes of each segment of device memory for the small pool (kSmallBuffer)."""
LARGE_SEGMENT = 20 << 20
"""The bytes of a segment of the large pool for allocations of less than LARGE bytes (kLargeBuffer)."""
LARGE = 10 << 20
"""An allocation of at least this size has its own segment (kMinLargeAlloc), rounded up to ROUND (kRoundLarge)."""
ROUND = 2 << 20


def rounded(size: int) -> int:
    """Return the bytes of the block that the allocator uses for an allocation of `size` bytes (`round_size`)."""
    return BLOCK if size < BLOCK else -(-size // BLOCK) * BLOCK


def segment_size(size: int) -> int:
    """Return the bytes of the segment that the allocator requests from the device to make a block of `size` bytes
    (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND


@dataclass(frozen=True)
class Replayed:
    """The result of a replay of the caching allocator. Sizes are in bytes."""

    allocated: int
    reserved: int
    retries: int
    failed: bool


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    address: int
    stream: str
    small: bool
    free: bool = False
    before: _Block | None = None
    behind: _Block | None = None


@dataclass
class _Heap:
    cap: int | None
    allocated: int = 0
    reserved: int = 0
    retries: int = 0
    next_address: int = 0
    # Maps (pool, stream) to the (size, address) of its free blocks, smallest first. `at` maps addresses to blocks.
    cached: dict[tuple[bool, str], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    at: dict[int, _Block] = field(default_factory=dict)

    def take(self, asked: int, stream: str) -> _Block | None:
        """Allocate a block of at least `asked` bytes, or return None if this would exceed `cap`."""
        size = rounded(asked)
        small = size <= SMALL
        block = self._best(size, small, stream) or self._new(size, small, stream)
        if block is None:
            self.retries += 1
            self._give_back()
            if (block := self._new(size, small, stream)) is None:
                return None
        remaining = block.size - size
        if remaining >= BLOCK if small else remaining > SMALL:
            rest = _Block(remaining, block.address + size, stream, small, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size = rest, size
            self._cache(rest)
        block.free = False
        self.allocated += block.size
        return block

    def give(self, block: _Block) -> None:
        """Free a block, merge it with the free neighboring blocks of its segment, and cache the result."""
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.behind):
            if other is None or not other.free:
                continue
            self._uncache(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.behind = second.behind
            if second.behind is not None:
                second.behind.before = first
            block = first
        self._cache(block)

    def _best(self, size: int, small: bool, stream: str) -> _Block | None:
        """Remove the smallest free block of at least `size` bytes from the cache, and return it."""
        cached = self.cached[small, stream]
        place = bisect_left(cached, (size, -1))
        if place == len(cached):
            return None
        return self.at.pop(cached.pop(place)[1])

    def _new(self, size: int, small: bool, stream: str) -> _Block | None:
        whole = segment_size(size)
        if self.cap is not None and self.reserved + whole > self.cap:
            return None
        self.reserved += whole
        self.next_address += whole + BLOCK  # leaves a gap, as between segments of a real device
        return _Block(whole, self.next_address - whole, stream, small)

    def _give_back(self) -> None:
        """Return to the device all segments without a block in use."""
        for cached in self.cached.values():
            for key in list(cached):
                block = self.at[key[1]]
                if block.before is None and block.behind is None:
                    cached.remove(key)
                    del self.at[key[1]]
                    self.reserved -= block.size

    def _cache(self, block: _Block) -> None:
        insort(self.cached[block.small, block.stream], (block.size, block.address))
        self.at[block.address] = block

    def _uncache(self, block: _Block) -> None:
        cached = self.cached[block.small, block.stream]
        del cached[bisect_left(cached, (block.size, block.address))]
        del self.at[block.address]


def replay(works: Sequence[Work], cap: int | None = None, first: Sequence[int] = ()) -> Replayed:
    """Replay the allocations of a rank in a model of torch's caching allocator, and return the peak memory."""
    heap = _Heap(cap)
    blocks: dict[int, _Block] = {}
    allocated = reserved = 0
    for event in _events(works, first):
        if isinstance(event, Free):
            if (block := blocks.pop(event.storage, None)) is not None:  # None for host memory and empty tensors
                heap.give(block)
            continue
        if event.on_host or event.size == 0 or event.storage in blocks:
            continue
        if (block := heap.take(event.size, event.stream)) is None:
            return Replayed(allocated, reserved, heap.retries, failed=True)
        blocks[event.storage] = block
        allocated = max(allocated, heap.allocated)
        reserved = max(reserved, heap.reserved)
    return Replayed(allocated, reserved, heap.retries, failed=False)


def _events(works: Sequence[Work], first: Sequence[int]) -> Iterator[Allocate | Free]:
    for number, size in enumerate(first):
        yield Allocate(-1 - number, size, "temporary")
    for work in works:  # several works may list the same storage: `replay` uses only the first
        yield from work.held
        yield from (event for event in work.events if not isinstance(event, Launch))


# Memory outside the allocator.


@dataclass(frozen=True)
class Total:
    """The predicted bytes of GPU memory that a process takes, as `nvidia-smi` shows them."""

    bytes: int
    low: int
    high: int
    parts: Mapping[str, int]


def reserved_on(works: Sequence[Work], name: str, capacity: int | None = None) -> int:
    """Return the peak bytes that the caching allocator reserves in the steps `works`, within `capacity` if possible."""
    known = part(name)
    first = [workspace(known.architecture if known else "")]
    reserved = replay(works, first=first).reserved
    if capacity is None or device_total(reserved, works[-1]).high <= capacity:
        return reserved
    others = device_total(0, works[-1])
    for cap in (int((capacity - others.high) / FIGURES["reserved"].spread), capacity - others.low):
        within = replay(works, cap, first)
        if not within.failed:
            return within.reserved
    return reserved


def workspace(architecture: str) -> int:
    """Return the bytes of the cuBLAS workspace, which torch allocates before the first matmul."""
    return int(FIGURES[f"workspace.{'hopper' if architecture in ('hopper', 'blackwell') else 'other'}"].value)


def device_total(reserved: int, work: Work) -> Total:
    """Return the bytes that a process takes of a GPU's memory: the allocator's segments, the CUDA context and the
    communicators of NCCL."""
    groups: set[tuple[int, ...]] = set()
    peers: set[int] = set()
    for launch in work.launches:
        what = launch.what
        if isinstance(what, CollectiveOperation) and len(what.ranks) > 1:
            if what.kind in ("send", "receive", "all-to-all"):
                peers |= set(what.ranks) - {work.rank}
            else:
                groups.add(what.ranks)
    counts = {"reserved": reserved, "context": 1, "communicator": len(groups), "communicator.peer": min(len(peers), 8)}
    sizes = {name: count * FIGURES[name].value for name, count in counts.items() if count}
    low, high = (sum(size * FIGURES[name].spread ** way for name, size in sizes.items()) for way in (-1, 1))
    parts = {"reserved": reserved, "context": int(sizes["context"])}
    parts["communicators"] = int(sum(size for name, size in sizes.items() if name.startswith("communicator")))
    return Total(sum(parts.values()), int(max(low, reserved)), int(high), parts)
