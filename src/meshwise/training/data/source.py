"""Read batches from a data set, in memory or by DataLoader.

Tensors in memory are sliced by batch. Anything else goes through torch's DataLoader.

Random draws inside a data set (augmentation) are seeded by (seed, epoch, sample index). So a sample looks the same
no matter which rank or worker process reads it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, tee
from operator import attrgetter, itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from meshwise.spec.errors import DataError
from meshwise.training.data.generators import GLOBAL, TORCH, global_states, set_global_states
from meshwise.training.data.order import BatchSlice

Reader = Callable[[Iterable[Tensor], int], Iterator[Any]]
"""A function (batches of sample indices, epoch) that returns an iterator over the batches of data."""

_INDICES = attrgetter("indices")


@dataclass(frozen=True)
class LoaderSettings:
    """Settings for a DataLoader that reads a user's data set."""

    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    seed: int = 0
    extra: Mapping[str, Any] | None = None
    several: bool = False


def count_samples(data: Any, what: str) -> int:
    """Return the number of samples in `data`."""
    if isinstance(data, (tuple, dict)):
        tensors = list(data.values()) if isinstance(data, dict) else list(data)
        if not tensors or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
            raise DataError(
                f"{what} must be a map-style dataset, or a tuple or dict of tensors with one row per sample, for "
                "instance torch.as_tensor(array)."
            )
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise DataError(f"{what} has tensors of different lengths ({sorted(lengths)}). Give tensors of one length.")
        count = lengths.pop()
    elif hasattr(data, "__len__"):
        count = len(data)
    else:
        raise DataError(f"{what}: a {type(data).__name__} has no len(). Use a map-style dataset or a tuple of tensors.")
    if count == 0:
        raise DataError(f"{what} is empty. Give at least one sample.")
    return count


def reader(data: Any, settings: LoaderSettings) -> Reader:
    """Return a function that reads batches of `data`, by indexing tensors in memory or with a DataLoader."""
    read_batch = _batch_reader(data, settings)
    if read_batch is None:
        return _loader_reader(data, settings)
    return lambda batches, epoch: map(read_batch, batches)


def read_slices(read: Reader, slices: Iterable[BatchSlice], epoch: int) -> Iterator[tuple[Any, BatchSlice]]:
    """Yield (batch, slice) for each slice.

    Slices are taken from the iterable when they are needed, and no batch is kept.
    """
    slices, ahead = tee(slices)
    # Call `read` in a generator expression, so that its workers start only when the first batch is read.
    batches = chain.from_iterable(read(map(_INDICES, ahead), epoch) for _ in range(1))
    # Copy each tuple: `zip` keeps some of its tuples for reuse, and a batch in one would be freed two batches later.
    return map(itemgetter(0, 1), zip(batches, slices, strict=False))


def _batch_reader(data: Any, settings: LoaderSettings) -> Callable[[Tensor], Any] | None:
    """Return a function that takes sample indices and returns a batch; None if `data` needs a DataLoader."""
    if _gives_batches(data):
        return data.batch  # type: ignore[no-any-return]
    ready_made = getattr(type(data), "__getitem__", None)  # a subclass may have its own `__getitem__`
    if ready_made is Subset.__getitem__ and settings.collate is None:
        inner = _batch_reader(data.dataset, settings)
        positions = torch.as_tensor(data.indices)
        return None if inner is None else lambda indices: inner(positions[indices])
    if ready_made is TensorDataset.__getitem__ and settings.collate is None:
        return lambda indices: [rows_at(tensor, indices) for tensor in data.tensors]
    if isinstance(data, tuple) and all(isinstance(t, Tensor) for t in data):
        return lambda indices: tuple(rows_at(tensor, indices) for tensor in data)
    if isinstance(data, dict) and all(isinstance(t, Tensor) for t in data.values()):
        return lambda indices: {name: rows_at(tensor, indices) for name, tensor in data.items()}
    return None


def rows_at(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return `tensor[indices]`, by `index_select` where possible, which is faster."""
    plain = type(tensor) is Tensor and tensor.device == indices.device and tensor.layout == torch.strided
    return tensor.index_select(0, indices) if plain and tensor.dim() > 1 else tensor[indices]


def _gives_batches(data: Any) -> bool:
    """Return True if `data` has the method `batch(indices)`."""
    method = getattr(data, "batch", None)
    return callable(method) and "indices" in inspect.signature(method).parameters


class KeyedDataset(Dataset[Any]):
    """A data set that is indexed by (epoch, index). Its random draws depend only on this pair and the seed."""

    def __init__(self, data: Any, seed: int, several: bool = False) -> None:
        self.data, self.seed, self.several = data, seed, several
        self._batched = getattr(data, "__getitems__", None)
        gives_samples = getattr(type(data), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
        self._alone = self._batched is not None and not gives_samples
        self._ready = self._batched is not None  # False once a batch comes as a list of samples
        self._draws = False

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        indices = [index for _, index in keys]
        if self._ready and self._batched is not None:
            with seeded_by(self.seed, *keys[0]):
                begun = global_states()
                got = self._batched(indices)
                self._ready = not (isinstance(got, list) and len(got) == len(keys))
                drawn = self._ready and self.several and global_states() != begun
            if drawn:
                raise DataError(
                    f"{type(self.data).__name__}.__getitems__ returns a whole batch and draws random numbers. They "
                    "would depend on the number of devices. Draw random numbers in the training loop, or return "
                    "single samples from __getitem__, where meshwise seeds each sample."
                )
            if self._ready:
                return got
        if not self._draws:
            samples = self._unseeded(indices)
            if not self._draws:
                return samples
        with seeded_by():
            return [self._seeded(*key) for key in keys]

    def _unseeded(self, indices: list[int]) -> list[Any]:
        """Read samples. Record in `_draws` whether this has drawn random numbers, and undo the draws."""
        before = global_states()
        torch.default_generator.manual_seed(self.seed)  # for data sets that call `torch.initial_seed()`
        begun = (TORCH.state(), *before[1:])
        self._draws = True
        try:
            samples = [self._sample(index) for index in indices]
            self._draws = global_states() != begun
            return samples
        finally:
            for handle, state in zip(GLOBAL if self._draws else (TORCH,), before, strict=False):
                handle.set_state(state)

    def _seeded(self, epoch: int, index: int) -> Any:
        _seed(self.seed, epoch, index)
        return self._sample(index)

    def _sample(self, index: int) -> Any:
        return self._batched([index])[0] if self._alone and self._batched else self.data[index]


@contextmanager
def seeded_by(*key: int) -> Iterator[None]:
    """Seed torch, numpy and Python with a key for the with-body, and restore their states afterwards."""
    before = global_states()
    if key:
        _seed(*key)
    try:
        yield
    finally:
        set_global_states(before)


def _seed(*key: int) -> None:
    seed = int(numpy.random.SeedSequence(key).generate_state(1)[0])
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


class _KeyBatches:
    """The batch sampler of a DataLoader that is used for many epochs."""

    def __init__(self) -> None:
        self.batches: Iterable[Tensor] = ()
        self.epoch = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.batches:
            yield [(self.epoch, index) for index in indices.tolist()]


def _loader_reader(data: Any, settings: LoaderSettings) -> Reader:
    keys = _KeyBatches()
    stay = {"persistent_workers": True} if settings.workers > 0 else {}  # the same workers serve all epochs
    loader: DataLoader[Any] = DataLoader(
        KeyedDataset(data, settings.seed, settings.several),
        batch_sampler=keys,
        collate_fn=settings.collate,
        num_workers=settings.workers,
        generator=torch.Generator().manual_seed(settings.seed),  # keeps the program's generators unchanged
        **stay | dict(settings.extra or {}),
    )

    def read(batches: Iterable[Tensor], epoch: int) -> Iterator[Any]:
        keys.batches, keys.epoch = batches, epoch
        yield from loader

    return read
