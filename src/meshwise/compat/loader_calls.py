"""Steer which samples a program's DataLoaders read, and how.

Read in torch 2.11, 2.13 and 2.15: `utils/data/dataloader.py` and `utils/data/_utils/fetch.py`. Tested in
tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from meshwise.compat.program_calls import End, put

ALONE = {
    "num_workers": 0,
    "timeout": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "worker_init_fn": None,
    "multiprocessing_context": None,
}
"""Arguments with which a DataLoader reads in its own process."""


def choose_indices(choose: Callable[[Any], Any]) -> End:
    """Take the indices of each next batch from `choose(iterator)`; it raises StopIteration at the end."""
    return put([_BaseDataLoaderIter], "_next_index", lambda plain: lambda iterator: choose(iterator))


def plain_indices(iterator: Any) -> Any:
    """Return the next indices of the sampler."""
    return next(iterator._sampler_iter)


def rest_of(iterator: Any, most: int) -> tuple[list[Any], bool]:
    """Return the sampler's remaining batches, and whether there may be more; without a length it reads `most`."""
    try:
        most = len(iterator._index_sampler)
    except (TypeError, NotImplementedError):
        found = list(itertools.islice(iterator._sampler_iter, most))
        return found, len(found) == most
    return list(itertools.islice(iterator._sampler_iter, most)), False


def count_batches(count: Callable[[Any], int | None]) -> End:
    """Let `count(sampler)` say how many batches a DataLoader has; None for its own number."""
    return put([DataLoader], "__len__", lambda plain: lambda loader: count(loader._index_sampler) or plain(loader))


def sampler_of(iterator: Any) -> Any:
    """Return the object that gives the indices: one for all iterators of a loader."""
    return iterator._index_sampler


def data_of(iterator: Any) -> tuple[Any, list[int]] | None:
    """Return the data set, and the indices in it that a `Subset` picks; None if it has no indices, or the loader gives
    single samples."""
    if iterator._dataset_kind == _DatasetKind.Iterable or not iterator._auto_collation:
        return None
    data, picked = iterator._dataset, list(range(len(iterator._dataset)))
    while type(data) is Subset:
        picked = [int(data.indices[index]) for index in picked]
        data = data.dataset
    return data, picked


def is_read_singly(data: Any) -> bool:
    """Return whether the data set can give single samples, not only batches (`__getitems__`)."""
    return type(data).__getitem__ is not Dataset.__getitem__


def _behind(data: Any) -> Any:
    while type(data) is Subset:
        data = data.dataset
    return data


def read_samples(read: Callable[[Callable[[int], Any], int], Any]) -> End:
    """Read each sample of a batch with `read(get, index)`. The indices are those of the data set behind a `Subset`."""

    def reading(plain: Any) -> Any:
        @functools.wraps(plain)
        def fetch(fetcher: Any, indices: Any) -> Any:
            data = _behind(fetcher.dataset)
            if not fetcher.auto_collation or not is_read_singly(data):
                fetcher.dataset = data
                return plain(fetcher, indices)
            return fetcher.collate_fn([read(data.__getitem__, index) for index in indices])

        return fetch

    return put([_MapDatasetFetcher], "fetch", reading)


def without_workers(made: Callable[[Any], None]) -> End:
    """Make each new DataLoader read in its own process, and call `made` with it."""

    def making(plain: Any) -> Any:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def init(loader: DataLoader[Any], *arguments: Any, **named: Any) -> None:
            given = signature.bind(loader, *arguments, **named).arguments
            given.pop("self")
            plain(loader, **{name: ALONE.get(name, value) for name, value in given.items()})
            made(loader)

        return init

    return put([DataLoader], "__init__", making)
