"""Steer which samples DataLoaders read, and keep their workers alive.

Schedulers send a warning signal to every process of a task. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 end torch's worker
processes: the rank then fails in the middle of the step after which it would have saved its state. With this module,
only the workers' rank ends them. Based on torch 2.11, 2.13 and 2.15: `utils/data/dataloader.py`,
`utils/data/_utils/fetch.py` and `utils/data/_utils/worker.py` (its handler of SIGTERM is set before `worker_init_fn` is
called); in datasets 5.2: `arrow_dataset.py`. Tested in tests/checker/test_plain_scripts.py,
tests/faults/test_signals.py and tests/training/guards/test_replicas.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Subset, dataloader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from meshwise.spec.exit_codes import WARNINGS
from meshwise.torch_compat.program_calls import End, put

ALONE: dict[str, Any] = {"num_workers": 0, "timeout": 0, "persistent_workers": False}
ALONE |= dict.fromkeys(("prefetch_factor", "worker_init_fn", "multiprocessing_context"))
"""Arguments that make a DataLoader read in its own process, without workers."""


def choose_indices(choose: Callable[[Any], Any]) -> End:
    """Make every DataLoader take the indices of its next batch from `choose(iterator)`, which raises StopIteration at
    the end. Return a function that undoes this."""
    return put([_BaseDataLoaderIter], "_next_index", lambda plain: lambda iterator: choose(iterator))


def plain_indices(iterator: Any) -> Any:
    """Return the next indices from the sampler of a DataLoader's iterator."""
    return next(iterator._sampler_iter)


def rest_of(iterator: Any, most: int) -> tuple[list[Any], bool]:
    """Return the remaining batches of indices of a DataLoader's iterator, and whether there may be more of them. If the
    sampler has no length, at most `most` batches are returned."""
    try:
        most = len(iterator._index_sampler)
    except (TypeError, NotImplementedError):
        found = list(itertools.islice(iterator._sampler_iter, most))
        return found, len(found) == most
    return list(itertools.islice(iterator._sampler_iter, most)), False


def count_batches(count: Callable[[Any], int | None]) -> End:
    """Make `len(loader)` of every DataLoader return `count(sampler)`. If `count` returns None, return the DataLoader's
    usual length. Return a function that undoes this."""
    return put([DataLoader], "__len__", lambda plain: lambda loader: count(loader._index_sampler) or plain(loader))


def sampler_of(iterator: Any) -> Any:
    """Return the sampler that yields the indices for a DataLoader's iterator. All iterators of one loader share it."""
    return iterator._index_sampler


def data_of(iterator: Any) -> tuple[Any, list[int]] | None:
    """Return the data set that a DataLoader's iterator reads, and the indices in it that the loader can choose from.
    Return None for an iterable data set, and for a loader that yields single samples instead of batches.

    If the data set is a `Subset`, return the data set inside it, and the indices that the `Subset` selects."""
    if iterator._dataset_kind == _DatasetKind.Iterable or not iterator._auto_collation:
        return None
    data, picked = iterator._dataset, list(range(len(iterator._dataset)))
    while type(data) is Subset:
        picked = [int(data.indices[index]) for index in picked]
        data = data.dataset
    return data, picked


def is_read_singly(data: Any) -> bool:
    """Return whether the data set defines `__getitem__`, which reads one sample, and not only `__getitems__`, which
    reads a batch."""
    return type(data).__getitem__ is not Dataset.__getitem__


def _behind(data: Any) -> Any:
    while type(data) is Subset:
        data = data.dataset
    return data


def read_samples(read: Callable[[Callable[[int], Any], int], Any]) -> End:
    """Make DataLoaders read each sample of a batch by `read(get, index)`, where `get(index)` returns the sample. If the
    data set is a `Subset`, `index` is an index into the data set inside it. Return a function that undoes this."""

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
    """Make each new DataLoader read in its own process instead of in workers, and call `made(loader)` for it. Return a
    function that undoes this."""

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


SPARED = (*WARNINGS, signal.SIGINT)


@dataclass(frozen=True)
class Spared:
    """A `worker_init_fn` of a DataLoader that makes the worker ignore warning signals of schedulers (see `spare`)."""

    then: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        spare()
        if self.then is not None:
            self.then(worker)


def spare() -> None:
    """Make this DataLoader worker ignore SIGINT and the warning signals of schedulers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)
    threading.Thread(target=_wait, args=(os.getppid(),), name="meshwise-signals", daemon=True).start()


def _wait(rank: int) -> None:
    while True:
        came = signal.sigwaitinfo(SPARED)
        if came.si_pid == rank and came.si_signo == signal.SIGTERM:
            os._exit(0)  # as torch's own handler does


def spare_loader_workers() -> None:
    """Make the workers of every DataLoader of this process ignore SIGINT and the warning signals of schedulers. See
    `spare`."""
    kind: Any = dataloader._MultiProcessingDataLoaderIter
    if isinstance(getattr(kind.__init__, "__wrapped__", None), Callable):  # type: ignore[arg-type]
        return
    begin = kind.__init__

    @functools.wraps(begin)
    def begins(self: Any, loader: Any) -> None:
        own = loader.worker_init_fn
        loader.worker_init_fn = Spared(own)
        try:
            begin(self, loader)
        finally:
            loader.worker_init_fn = own

    kind.__init__ = begins


def fingerprint(data: Any) -> str | None:
    """Return the content fingerprint of a Hugging Face data set; None for any other data set."""
    found = getattr(data, "_fingerprint", None)
    return found if isinstance(found, str) else None
