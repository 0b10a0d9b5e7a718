"""A user's DataLoader, made to give each rank its share of every batch, in an order that does not depend on the ranks.

shuffle or sequential sampler    our own order: a pure function of (seed, epoch, index)
any other sampler                run whole on every rank from one seed; each batch is sliced
iterable data set                `whole`: every rank reads the whole stream and keeps its share of each batch
                                 `per-rank`: the data set splits itself; ranks that run out take part with padding
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from meshwise.spec.errors import DataError, UsageError
from meshwise.spec.world import World
from meshwise.training.order import BatchSlice, batch_slice, epoch_order, epoch_slices, part
from meshwise.training.source import LoaderSettings, count_samples, reader, seeded_by
from meshwise.transfer import collectives

Pairs = Iterator[tuple[Any, BatchSlice]]
STREAMS = ("whole", "per-rank")
_KEPT = ("pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context")


@dataclass(frozen=True)
class LoaderSpec:
    """What a distributed loader needs of the user's.

    pairs: `pairs(epoch, begin, most)` reads an epoch from sample `begin` on; with `most`, one batch of at most so many
        samples (a stream's batches stay whole).
    """

    length: int | None
    samples: int | None
    batch_size: int
    pairs: Callable[..., Pairs]
    note: str = ""


def split_loader(loader: DataLoader[Any], seed: int, world: World, streams: str) -> LoaderSpec:
    """How the batches of a user's loader are shared out. Raises UsageError for a loader that cannot be."""
    if streams not in STREAMS:
        raise UsageError(f"streams={streams!r}: write 'whole' or 'per-rank'.")
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader, world, streams)
    count_samples(_rows(loader.dataset), "the data set of a loader")
    if loader.batch_sampler is None:
        raise UsageError("a loader with batch_size=None gives no batches to share out. Give it a batch_size.")
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return _foreign(loader, seed, world)
    if isinstance(sampler, DistributedSampler):
        note = "DistributedSampler is replaced: meshwise shares out the batches itself"
        return _ordered(loader, sampler.seed, world, shuffle=sampler.shuffle, note=note)
    if type(sampler) is SequentialSampler:
        return _ordered(loader, seed, world, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return _ordered(loader, seed, world, shuffle=True)
    return _foreign(loader, seed, world)


def _rows(data: Any) -> Any:
    """A tuple or dict holds samples where a user's loader reads it; a job's holds tensors with a sample a row."""
    return [data[index] for index in range(len(data))] if isinstance(data, (tuple, dict)) else data


def _settings(loader: DataLoader[Any], seed: int) -> LoaderSettings:
    extra = {name: getattr(loader, name) for name in _KEPT if name != "prefetch_factor" or loader.num_workers}
    if not loader.num_workers:
        extra.pop("persistent_workers")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    return LoaderSettings(collate, loader.num_workers, seed, extra)


def _ordered(loader: DataLoader[Any], seed: int, world: World, *, shuffle: bool, note: str = "") -> LoaderSpec:
    """Our own order, shuffled or front to back."""
    samples, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    whole = samples - samples % size if loader.drop_last else samples
    read = reader(_rows(loader.dataset), _settings(loader, seed))

    def pairs(epoch: int, begin: int, most: int | None = None) -> Pairs:
        order = (epoch_order(seed, epoch, samples) if shuffle else torch.arange(samples))[:whole]
        order = order if most is None else order[: begin + min(most, size)]
        shares = [shares[0] for shares in epoch_slices(order, size, world, begin=begin)]
        return zip(read((share.indices for share in shares), epoch), shares, strict=True)

    return LoaderSpec(-(-whole // size), whole, size, pairs, note)


def _foreign(loader: DataLoader[Any], seed: int, world: World) -> LoaderSpec:
    """The user's own sampler, run whole on every rank from one seed."""
    read = reader(_rows(loader.dataset), _settings(loader, seed))
    batch_sampler: Iterable[list[int]] = loader.batch_sampler  # type: ignore[assignment]

    def pairs(epoch: int, begin: int, most: int | None = None) -> Pairs:
        with seeded_by(seed, epoch):
            batches = [torch.as_tensor(list(batch), dtype=torch.int64) for batch in batch_sampler]
        ends = torch.tensor([len(batch) for batch in batches]).cumsum(0).tolist()
        left = [batch for batch, end in zip(batches, ends, strict=True) if end > begin]
        left = left if most is None else [batch[:most] for batch in left[:1]]
        shares = [batch_slice(batch, 0, len(batch), len(batch), world) for batch in left]
        return zip(read((share.indices for share in shares), epoch), shares, strict=True)

    length = len(batch_sampler) if isinstance(batch_sampler, Sized) else None
    return LoaderSpec(length, None, loader.batch_size or 1, pairs)


def _stream(loader: DataLoader[Any], world: World, streams: str) -> LoaderSpec:
    """An iterable data set: its items one by one, grouped, shared out and collated here."""
    if loader.batch_size is None:
        raise UsageError("a loader with batch_size=None gives no batches to share out. Give it a batch_size.")
    size, collate = loader.batch_size, loader.collate_fn
    kept = {name: getattr(loader, name) for name in _KEPT if loader.num_workers or name in ("pin_memory", "timeout")}
    items: DataLoader[Any] = DataLoader(
        loader.dataset, batch_size=None, collate_fn=_as_it_is, num_workers=loader.num_workers, **kept
    )
    own = _whole_share if streams == "whole" else _own_share

    def pairs(epoch: int, begin: int, most: int | None = None) -> Pairs:
        stream = iter(items)
        last: Any = None
        for _ in islice(stream, begin if streams == "whole" else part(0, begin, world.size, world.rank)[1]):
            pass
        while True:
            wanted = size if streams == "whole" else _length(part(0, size, world.size, world.rank))
            got = list(islice(stream, wanted))
            counts = collectives.all_gather(torch.tensor(len(got))).tolist()
            chosen, share = own(got, last, counts, world)
            if share.total == 0 or (loader.drop_last and share.total < size):
                return
            last = chosen[-1]
            yield collate(chosen), share

    return LoaderSpec(None, None, size, pairs)


def _whole_share(got: list[Any], last: Any, counts: list[int], world: World) -> tuple[list[Any], BatchSlice]:
    if len(set(counts)) != 1:
        raise DataError(
            "the ranks read streams of different lengths "
            f"(last batch: {', '.join(f'rank {r}: {n}' for r, n in enumerate(counts))}). "
            "A data set that splits itself is distributed with mw.distribute(…, streams='per-rank')."
        )
    share = batch_slice(torch.arange(max(len(got), 1)), 0, len(got), len(got), world)
    return [got[i] for i in share.indices.tolist()] if got else [], share


def _own_share(got: list[Any], last: Any, counts: list[int], world: World) -> tuple[list[Any], BatchSlice]:
    total = sum(counts)
    if got or total == 0:
        return got, BatchSlice(torch.arange(len(got)), len(got), total)
    if last is None:
        raise DataError(
            f"rank {world.rank}'s stream gave no sample at all. Give every rank at least one, or use streams='whole'."
        )
    return [last], BatchSlice(torch.zeros(1, dtype=torch.int64), 0, total)


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _as_it_is(item: Any) -> Any:
    return item
