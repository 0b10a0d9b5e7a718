"""A user's loader on several ranks: together they read what it would have read alone. No collective is needed.

The ranks draw from equal generators here; test_generators.py has those that are made equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from meshwise.spec.errors import DataError, UsageError
from meshwise.spec.world import World
from meshwise.training.data.generators import Draws
from meshwise.training.data.split_loader import split_loader

DATA = TensorDataset(torch.arange(23))


def at_once(function: Any) -> Any:
    return function()


DRAWS = Draws(at_once, at_once)


def ids(batch: Any) -> list[int]:
    """The samples of a batch; each is its own number, in the first column where there are several."""
    tensor: Tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
    return [int(i) for i in tensor.flatten()]


def read(loader: DataLoader[Any], size: int, epoch: int = 0, begin: int = 0) -> list[list[int]]:
    """What all ranks read together, batch by batch, stand-ins left out."""
    ranks = []
    for rank in range(size):
        torch.manual_seed(epoch)
        ranks.append(list(split_loader(loader, 5, World(rank, size), "whole").pairs(DRAWS, epoch, begin)))
    assert len({len(pairs) for pairs in ranks}) == 1
    return [[i for batch, share in step for i in ids(batch)[: share.samples]] for step in zip(*ranks, strict=True)]


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(DATA) - 1, -1, -1))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", [None, Backwards()])
def test_the_ranks_read_the_batches_of_one_loader(size: int, drop_last: bool, sampler: Any) -> None:
    loader = DataLoader(DATA, batch_size=4, drop_last=drop_last, sampler=sampler)
    assert read(loader, size) == [ids(batch) for batch in loader]
    assert split_loader(loader, 5, World(0, size), "whole").length == len(loader)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_sampler_of_the_users_own_is_run_whole_and_sliced(size: int) -> None:
    loader = DataLoader(DATA, batch_sampler=[[3, 1], [7], [2, 9, 4, 20]])
    assert read(loader, size) == [[3, 1], [7], [2, 9, 4, 20]]
    assert read(loader, size, begin=3) == [[2, 9, 4, 20]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shuffling_is_that_of_one_loader_on_any_number_of_ranks(size: int) -> None:
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    for epoch in (0, 1):
        torch.manual_seed(epoch)
        want: Any = list(loader.batch_sampler)  # type: ignore[arg-type]
        assert read(loader, size, epoch) == want


@pytest.mark.parametrize("size", [2, 3])
def test_a_random_sampler_draws_the_same_on_every_rank_and_anew_every_epoch(size: int) -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * len(DATA), 12))
    first = read(loader, size)
    assert first == read(loader, 1)
    assert read(loader, size, epoch=1) != first


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_going_on_from_a_sample_reads_the_rest(shuffle: bool, size: int) -> None:
    loader = DataLoader(DATA, batch_size=4, shuffle=shuffle)
    assert read(loader, size, begin=8) == read(loader, 3)[2:]


def test_a_distributed_sampler_of_the_users_is_replaced() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(DATA, batch_size=4, sampler=sampler)
    assert read(loader, 2) == [part.tolist() for part in torch.arange(len(DATA)).split(4)]


@pytest.mark.parametrize(
    "data",
    [
        tuple(torch.tensor([i, -i]) for i in range(7)),
        tuple((torch.tensor(i), i * 2) for i in range(7)),
        {i: torch.tensor([i, 5]) for i in range(7)},
    ],
    ids=["tensors", "pairs", "dict"],
)
def test_a_tuple_or_dict_of_samples_is_read_sample_by_sample_as_torch_does(data: Any) -> None:
    loader = DataLoader(data, batch_size=3)
    pairs = list(split_loader(loader, 5, World(), "whole").pairs(DRAWS, 0, 0))
    expected = list(loader)
    assert len(pairs) == len(expected) == 3
    for (batch, _), plain in zip(pairs, expected, strict=True):
        assert torch.equal(torch.as_tensor(ids(batch)), torch.as_tensor(ids(plain)))


class Stream(IterableDataset[int]):
    """Numbers one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 8, 11])
def test_a_stream_is_grouped_as_one_loader_groups_it(length: int, drop_last: bool) -> None:
    loader = DataLoader(Stream(length), batch_size=4, drop_last=drop_last)
    for streams in ("whole", "per-rank"):
        pairs = list(split_loader(loader, 5, World(), streams).pairs(DRAWS, 0, 0))
        assert [ids(batch) for batch, _ in pairs] == [ids(batch) for batch in loader]


@pytest.mark.parametrize(
    ("loader", "streams", "says"),
    [
        (DataLoader(Stream(3), batch_size=None), "per-rank", "needs a loader with a batch_size"),
        (DataLoader(DATA), "both", "streams='both' is not known"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_told(loader: DataLoader[Any], streams: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_loader(loader, 5, World(0, 2), streams)
    assert says in str(caught.value)


def test_an_empty_data_set_is_told() -> None:
    with pytest.raises(DataError, match=r"is empty\. Give at least one sample"):
        split_loader(DataLoader([], batch_sampler=BatchSampler([], 2, False)), 5, World(), "whole")  # type: ignore[arg-type]
