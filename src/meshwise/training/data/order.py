"""Compute the order of the data, and each rank's share of it.

A job's order is a pure function of (seed, epoch, global index).

The state of the order is one integer: how many samples of the epoch were read. The number of ranks, of loader workers
and of accumulated microbatches may change at any step. No sample is lost or repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.spec.world import World

GOLDEN = 2654435769  # 2**32 divided by the golden ratio: its multiples mod 2**32 lie far apart (Knuth, vol. 3, 6.4)


@dataclass(frozen=True)
class BatchSlice:
    """A rank's part of one microbatch.

    indices: the positions of this rank's samples in the data set. A rank without samples has one sample as padding.
    samples: how many of these samples count. It is 0 if the only sample is padding.
    total: the number of samples in the global batch to which the microbatch belongs.
    first: the position in the microbatch of this rank's first sample.
    micro: how many samples the microbatch has on all ranks together.
    whole: whether every rank has all samples of the batch (`mw.split(whole=True)`)."""

    indices: Tensor
    samples: int
    total: int
    first: int = 0
    micro: int = 0
    whole: bool = False

    def ratio(self, ranks: int) -> float:
        """Return the factor for a loss that is a mean over these samples.

        With this factor, the mean of the losses of all ranks is the mean over the global batch.
        """
        return 1 if self.whole else self.samples * ranks / self.total


def epoch_order(seed: int, epoch: int, samples: int) -> Tensor:
    """Return the order in which epoch `epoch` (from 0) reads its samples, as int64 of shape (samples,)."""
    key = (seed * GOLDEN + epoch) % 2**32  # torch's CPU generator uses only 32 bits of a seed
    return torch.randperm(samples, generator=torch.Generator().manual_seed(key))


def part(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Divide the range [start, stop) into `parts` contiguous ranges, and return range `index`."""
    size, rest = divmod(stop - start, parts)
    first = start + index * size + min(index, rest)
    return first, first + size + (index < rest)


def world_part(start: int, stop: int, world: World) -> tuple[int, int]:
    """Return this rank's part of the range [start, stop)."""
    count, size = stop - start, world.size
    if world.chunks:
        each = -(-count // size)
        return min(stop, start + world.rank * each), min(stop, start + (world.rank + 1) * each)
    if not world.shares or count <= size:
        return part(start, stop, size, world.rank)
    whole, edges = sum(world.shares), [0]
    for rank, taken in enumerate(itertools.accumulate(world.shares), 1):
        edges.append(max(edges[-1] + 1, min(round(count * taken / whole), count - size + rank)))
    return start + edges[world.rank], start + edges[world.rank + 1]


def divides_evenly(total: int, world: World) -> bool:
    """Return whether `total` samples can be divided equally among all ranks."""
    return not world.shares and total % world.size == 0


def batch_bounds(
    samples: int, batch_size: int, begin: int = 0, left_out: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each global batch from sample `begin` on. Skips `left_out`."""
    if not left_out:
        starts = range(begin, samples, batch_size)
        return zip(starts, itertools.chain(starts[1:], (samples,)), strict=False)
    return _bounds_between(samples, batch_size, begin, left_out)


def _bounds_between(
    samples: int, batch_size: int, start: int, left_out: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    while start < samples:
        if inside := next((last for first, last in left_out if first <= start < last), 0):
            start = inside
            continue
        stop = min([start + batch_size, samples, *(first for first, _ in left_out if first > start)])
        yield start, stop
        start = stop


def epoch_slices(
    order: Tensor,
    batch_size: int,
    world: World,
    accumulate: int = 1,
    begin: int = 0,
    left_out: Sequence[tuple[int, int]] = (),
) -> Iterator[Sequence[BatchSlice]]:
    """Yield this rank's `BatchSlice`s. For each global batch, yield one sequence, which has a `BatchSlice` for each
    microbatch.

    accumulate: the number of microbatches in a global batch. A batch with fewer samples has fewer microbatches.
    begin: the position in `order` of the first sample to use.
    left_out: ranges of samples to skip."""
    if accumulate == 1 and not left_out:
        return zip(batch_slices(order, batch_size, world, begin), strict=False)
    bounds = batch_bounds(len(order), batch_size, begin, left_out)
    return _microbatch_slices(order, world, accumulate, bounds)


def _microbatch_slices(
    order: Tensor, world: World, accumulate: int, bounds: Iterable[tuple[int, int]]
) -> Iterator[list[BatchSlice]]:
    for start, stop in bounds:
        micro = min(accumulate, stop - start)
        yield [batch_slice(order, *part(start, stop, micro, k), stop - start, world) for k in range(micro)]


def batch_slices(order: Tensor, batch_size: int, world: World, begin: int = 0) -> Iterator[BatchSlice]:
    """Yield this rank's part of every global batch from sample `begin` on."""
    for start, stop in batch_bounds(len(order), batch_size, begin):
        yield batch_slice(order, start, stop, stop - start, world)


def batch_slice(order: Tensor, start: int, stop: int, total: int, world: World) -> BatchSlice:
    """Return this rank's part of the microbatch [start, stop) of `order`.

    total: the number of samples in the global batch.
    """
    if world.shares or world.chunks:
        first, last = world_part(start, stop, world)
    else:
        first, last = part(start, stop, world.size, world.rank)
    if first == last:
        return BatchSlice(order[start : start + 1], 0, total, first - start, stop - start)
    return BatchSlice(order[first:last], last - first, total, first - start, stop - start)


def sequential_slices(samples: int, batch_size: int, world: World) -> Iterator[BatchSlice]:
    """Yield this rank's part of each batch of a data set that is read in order, as in an evaluation."""
    return batch_slices(torch.arange(samples), batch_size, world)
