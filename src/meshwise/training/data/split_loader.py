"""Split a user's DataLoader: each rank gets its share of batches.

The order does not depend on the number of ranks.

shuffle or sequential sampler    the order that torch's own sampler draws, but as a tensor, not a list
any other sampler                runs whole on every rank, from the states of rank 0's generators; each batch is sliced
batch_size=None                  every rank reads the ready batches, and keeps its rows of each
iterable data set                `whole`: every rank reads the whole stream and keeps its share of each batch
                                 `per-rank`: the data set splits itself; ranks without more samples read padding
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from meshwise.spec.errors import DataError, UsageError, check_known
from meshwise.spec.world import World
from meshwise.torch_compat.tree import all_leaves, map_kind
from meshwise.training.data.generators import GLOBAL, TORCH, Draws, Handle, handles_of
from meshwise.training.data.order import BatchSlice, batch_slice, batch_slices, epoch_order, world_part
from meshwise.training.data.source import LoaderSettings, count_samples, read_slices, reader
from meshwise.transfer import collectives

Pairs = Iterator[tuple[Any, BatchSlice]]
Order = Callable[[Draws, int], Tensor]
"""A function (draws, epoch) that returns the indices of an epoch's samples in reading order."""
STREAMS = ("whole", "per-rank")
_ARRAYS = (Tensor, numpy.ndarray)
_KEPT = ("pin_memory", "timeout")
_OF_WORKERS = ("worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context")


@dataclass(frozen=True)
class LoaderSpec:
    """How the batches of a user's loader are divided among the ranks."""

    length: int | None
    batch_size: int
    pairs: Callable[..., Pairs]
    drawn: tuple[Handle, ...] = ()
    own: bool = False
    draws_base_seed: bool = False


def split_loader(loader: DataLoader[Any], seed: int, world: World, streams: str) -> LoaderSpec:
    """Return how a user's loader is divided among the ranks. Raises UsageError if its batches cannot be divided."""
    check_known("streams", streams, STREAMS)
    if loader.batch_sampler is None:
        if streams == "whole":
            return _ready(loader, world)
        raise UsageError("streams='per-rank' needs a loader with a batch_size, but this loader has batch_size=None.")
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader, world) if streams == "whole" else _own_stream(loader, world)
    count_samples(_rows(loader.dataset), "the data set of a loader")
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return _foreign(loader, seed, world)
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas == 1:
        return _foreign(loader, seed, world)  # its sampler yields all samples
    if isinstance(sampler, DistributedSampler) and sampler.shuffle:  # the sampler's own split by rank is ignored
        return _ordered(loader, seed, world, lambda draws, epoch: epoch_order(sampler.seed, epoch, samples))
    if isinstance(sampler, DistributedSampler) or type(sampler) is SequentialSampler:
        return _ordered(loader, seed, world, lambda draws, epoch: torch.arange(samples))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        order, again = _shuffled(sampler.generator, samples), sampler.generator is not None
        shuffled = _ordered(loader, seed, world, order, drawn_again=again)
        return replace(shuffled, drawn=(TORCH, *handles_of(loader, sampler)))
    return _foreign(loader, seed, world)


def _rows(data: Any) -> Any:
    """Return the samples of a tuple or dict as a list, and any other data set unchanged."""
    return [data[index] for index in range(len(data))] if isinstance(data, (tuple, dict)) else data


def _settings(loader: DataLoader[Any], seed: int, world: World) -> LoaderSettings:
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    return LoaderSettings(collate, loader.num_workers, seed, _kept(loader), several=world.size > 1)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of the user's loader that are passed on to meshwise's own DataLoader, as keyword arguments.
    Most of them concern the worker processes."""
    names = (*_KEPT, *_OF_WORKERS) if loader.num_workers else _KEPT
    return {name: getattr(loader, name) for name in names}


def _shuffled(generator: torch.Generator | None, samples: int) -> Order:
    """Return a function that draws the order of an epoch as torch's RandomSampler does (torch/utils/data/sampler.py),
    but as a tensor."""

    def permutation() -> Tensor:
        own = generator or torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return torch.randperm(samples, generator=own)

    return lambda draws, epoch: draws.begin(permutation)


def _ordered(
    loader: DataLoader[Any], seed: int, world: World, order_of: Order, *, drawn_again: bool = False
) -> LoaderSpec:
    """Split a loader whose data set has a known size."""
    samples, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    whole = samples - samples % size if loader.drop_last else samples
    read = reader(_rows(loader.dataset), _settings(loader, seed, world))

    def pairs(draws: Draws, epoch: int, begin: int, most: int | None = None) -> Pairs:
        order = order_of(draws, epoch)[:whole]
        order = order if most is None else order[: begin + min(most, size)]
        shares = batch_slices(order, size, world, begin)
        if drawn_again:
            shares = _then(shares, partial(order_of, replace(draws, begin=draws.go_on), epoch))
        return read_slices(read, shares, epoch)

    return LoaderSpec(-(-whole // size), size, pairs)


def _foreign(loader: DataLoader[Any], seed: int, world: World) -> LoaderSpec:
    """Split the batches of the user's own sampler."""
    read = reader(_rows(loader.dataset), _settings(loader, seed, world))
    batch_sampler: Iterable[list[int]] = loader.batch_sampler  # type: ignore[assignment]

    def pairs(draws: Draws, epoch: int, begin: int, most: int | None = None) -> Pairs:
        batches = draws.begin(lambda: _behind(begin, map(list, batch_sampler)))
        left: Iterable[list[int]] = iter(lambda: draws.go_on(lambda: next(batches, None)), None)
        left = left if most is None else (batch[:most] for batch in islice(left, 1))
        indices = (torch.as_tensor(batch, dtype=torch.int64) for batch in left)
        return read_slices(read, (batch_slice(batch, 0, len(batch), len(batch), world) for batch in indices), epoch)

    length = len(batch_sampler) if isinstance(batch_sampler, Sized) else None
    drawn = (*GLOBAL, *handles_of(loader, loader.sampler, loader.batch_sampler))
    return LoaderSpec(length, loader.batch_size or 1, pairs, drawn)


def _behind(begin: int, batches: Iterator[Any], rows: Callable[[Any], int] = len) -> Iterator[Any]:
    """Return an iterator over `batches` without the batches that lie within the first `begin` samples."""
    end = 0
    while end < begin and (batch := next(batches, None)) is not None:
        end += rows(batch)
        if end > begin:
            return chain([batch], batches)
    return batches


def _then(shares: Iterator[BatchSlice], end: Callable[[], object]) -> Iterator[BatchSlice]:
    yield from shares
    end()


def _stream(loader: DataLoader[Any], world: World) -> LoaderSpec:
    """Split batches of an iterable data set before collation. Each loader worker makes its own batches."""
    collate = loader.collate_fn
    batches_of_items = _of_items(loader, batch_size=loader.batch_size, drop_last=loader.drop_last)
    pairs = _read_alike(batches_of_items, len, lambda items, own: collate(items[own]), world)
    return LoaderSpec(None, loader.batch_size or 1, pairs, (*GLOBAL, *handles_of(loader)), draws_base_seed=True)


def _read_alike(
    source: Iterable[Any], rows_of: Callable[[Any], int], take: Callable[[Any, slice], Any], world: World
) -> Callable[..., Pairs]:
    """Return the function `pairs` of a `LoaderSpec`. Each rank reads whole batches, and keeps its own rows."""

    def pairs(draws: Draws, epoch: int, begin: int, most: int | None = None) -> Pairs:
        batches = draws.begin(lambda: _behind(begin, iter(source), rows_of))
        while True:
            batch = draws.go_on(lambda: next(batches, None))
            if not (rows := _same_rows(batch, 0 if batch is None else rows_of(batch), world)):
                return
            share = batch_slice(torch.arange(rows), 0, rows, rows, world)
            yield take(batch, slice(int(share.indices[0]), int(share.indices[-1]) + 1)), share

    return pairs


def _own_stream(loader: DataLoader[Any], world: World) -> LoaderSpec:
    """Read an iterable data set that splits itself by rank."""
    size, items, collate = loader.batch_size or 1, _of_items(loader, batch_size=None), loader.collate_fn
    first, end = world_part(0, size, world)

    def pairs(draws: Draws, epoch: int, begin: int, most: int | None = None) -> Pairs:
        stream, last = draws.begin(lambda: _skipped(iter(items), begin // size * (end - first)))
        while True:
            got = draws.go_on(lambda: list(islice(stream, end - first)))
            total = int(_of_ranks(len(got)).sum())
            if total == 0 or (loader.drop_last and total < size):
                return
            if not got and last is None:
                raise DataError(
                    f"the loader of rank {world.rank} returned no sample. Give each rank one, or pass streams='whole'."
                )
            last = got[-1] if got else last
            yield collate(got or [last]), BatchSlice(torch.arange(max(len(got), 1)), len(got), total)

    drawn = (*GLOBAL, *handles_of(loader))
    return LoaderSpec(None, size, pairs, drawn, own=True, draws_base_seed=True)


def _of_items(loader: DataLoader[Any], **batches: Any) -> DataLoader[Any]:
    """Return a loader of the same data set that does not collate items."""
    workers = {"num_workers": loader.num_workers, "generator": loader.generator, **_kept(loader)}
    return DataLoader(loader.dataset, collate_fn=_as_it_is, **batches, **workers)


def _skipped(items: Iterator[Any], count: int) -> tuple[Iterator[Any], Any]:
    """Skip the first `count` items. Returns the other items, and the last item that was skipped, or None."""
    skipped = deque(islice(items, count), maxlen=1)
    return items, skipped[0] if skipped else None


def _ready(loader: DataLoader[Any], world: World) -> LoaderSpec:
    """Split a loader with `batch_size=None`, whose data set returns complete batches."""
    pairs = _read_alike(loader, _rows_of, lambda batch, own: map_kind(_ARRAYS, itemgetter(own), batch), world)
    drawn = (*GLOBAL, *handles_of(loader, loader.sampler))
    return LoaderSpec(len(loader) if isinstance(loader.dataset, Sized) else None, 1, pairs, drawn, draws_base_seed=True)


def _rows_of(batch: Any) -> int:
    leaves = [leaf for leaf in all_leaves(batch) if leaf is not None]
    rows = {len(leaf) if isinstance(leaf, _ARRAYS) and leaf.ndim else 0 for leaf in leaves}
    if len(rows) == 1 and (count := rows.pop()):
        return count
    raise UsageError(
        "a loader with batch_size=None must return batches that can be split by rows. Return tensors or arrays with "
        "equally many rows, or return single samples and set batch_size."
    )


def _same_rows(items: Any, count: int, world: World) -> int:
    """Return `count`, the number of rows that this rank has read. Raise DataError if ranks read different rows."""
    if world.size > 1:
        ranks = _of_ranks(count, _checksum(items)).tolist()
        if any(rank != ranks[0] for rank in ranks):
            raise DataError(
                "every rank must load the same batches, but the ranks read other values, of "
                f"{', '.join(str(rank[0]) for rank in ranks)} samples. Use the same random seed on every rank. For a "
                "data set that splits itself by rank, use mw.distribute(…, streams='per-rank')."
            )
    return count


def _of_ranks(*numbers: int) -> Tensor:
    return collectives.all_gather(torch.tensor(numbers))


def _checksum(items: Any) -> int:
    """Return a cheap checksum of samples, by which ranks notice that they have loaded different samples."""
    told = []
    for leaf in all_leaves(items):
        if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
            told.append(leaf.reshape(-1)[:: leaf.size // 64 + 1].tolist())
        elif isinstance(leaf, Tensor) and not leaf.is_complex():
            told.append(leaf.detach().reshape(-1)[:: leaf.numel() // 64 + 1].tolist())
        elif isinstance(leaf, bool | int | float | str | bytes):
            told.append(leaf)
    return zlib.crc32(repr(told).encode())


def _as_it_is(item: Any) -> Any:
    return item
