"""Whatever a job's data is, its batches are those of plain PyTorch, and its random draws those of its key.

Of training/job/run.py too.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import meshwise as mw
from meshwise.spec.errors import DataError
from meshwise.spec.plan import Plan
from meshwise.training.data import generators
from meshwise.training.data.generators import GLOBAL, Handle
from meshwise.training.data.source import LoaderSettings, count_samples, reader, seeded_by
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)
BATCHES = [torch.tensor([7, 0, 3]), torch.tensor([9])]
PLAIN = LoaderSettings()


def read(data: Any, settings: LoaderSettings = PLAIN, epoch: int = 0) -> list[Any]:
    return list(reader(data, settings)(BATCHES, epoch))


def plain(data: Any) -> list[Any]:
    """The same batches from torch's DataLoader."""
    return list(DataLoader(data, batch_sampler=[indices.tolist() for indices in BATCHES]))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and first.equal(second)
    if isinstance(first, dict):
        return type(first) is type(second) and all(equal(first[k], second[k]) for k in first.keys() | second.keys())
    return type(first) is type(second) and all(map(equal, first, second)) and len(first) == len(second)


class Squares(Dataset[tuple[Tensor, int]]):
    """Map-style: one sample at a time."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index, index**2]), index


class Shifted(TensorDataset):
    """Does more to its samples than its parent."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 100, y


class Chosen(Subset[Any]):
    """A part of a data set with a transformation of its own, as torchvision's recipes have it."""

    def __getitem__(self, index: Any) -> Any:
        x, y = self.dataset[self.indices[index]]
        return -x, y

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), list(range(9, -1, -1))),
        Subset(Subset(TensorDataset(X, Y), range(10)), [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]),
        Subset(TensorDataset(X, Y), torch.arange(10).flip(0)),  # type: ignore[arg-type]
        Squares(),
        Subset(Squares(), list(range(9, -1, -1))),
        Shifted(X, Y),
        Chosen(TensorDataset(X, Y), list(range(9, -1, -1))),
        [{"x": X[i], "y": i} for i in range(10)],
    ],
    ids=lambda data: type(data).__name__,
)
def test_batches_are_those_of_a_plain_loader(data: Any) -> None:
    assert equal(read(data), plain(data))


def test_tensors_in_a_tuple_or_dict_are_sliced() -> None:
    assert equal(read((X, Y)), [(X[i], Y[i]) for i in BATCHES])
    assert equal(read({"x": X, "y": Y}), [{"x": X[i], "y": Y[i]} for i in BATCHES])


def test_a_data_set_with_batch_is_asked_for_whole_batches() -> None:
    class Whole:
        def __len__(self) -> int:
            return 10

        def batch(self, indices: Tensor) -> Tensor:
            return indices * 10

    assert equal(read(Whole()), [i * 10 for i in BATCHES])
    assert equal(read(Subset(Whole(), [9 - i for i in range(10)])), [(9 - i) * 10 for i in BATCHES])  # type: ignore[arg-type]


def test_a_batch_method_of_another_meaning_is_left_alone() -> None:
    class Table(Squares):
        def batch(self, batch_size: int, drop_last_batch: bool = False) -> Table:  # as Hugging Face's datasets have it
            raise AssertionError

    assert equal(read(Table()), plain(Squares()))


def test_collate_joins_the_samples() -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate([sample[1] for sample in samples]) * 2

    settings = LoaderSettings(collate=collate)
    for data in (Squares(), TensorDataset(X, Y), Subset(TensorDataset(X, Y), range(10))):
        assert equal(read(data, settings), [Y[i] * 2 for i in BATCHES])


def test_a_reader_may_be_used_for_many_epochs() -> None:
    batches = reader(Squares(), LoaderSettings())
    assert equal(list(batches(BATCHES, 0)), list(batches(BATCHES, 1)))
    assert list(batches([], 2)) == []


@pytest.mark.parametrize(
    ("data", "count"), [((X, Y), 10), ({"x": X}, 10), (Squares(), 10), (Subset(Squares(), [1]), 1), ([1, 2, 3], 3)]
)
def test_samples_are_counted(data: Any, count: int) -> None:
    assert count_samples(data, "it") == count


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((X, Y[:9]), "different lengths ([9, 10])"),
        ((X[:0], Y[:0]), "is empty"),
        ([], "is empty"),
        ((), "must be a map-style dataset, or a tuple or dict of tensors"),
        ({}, "with one row per sample"),
        ((X.numpy(), Y), "for instance torch.as_tensor(array)"),
        ((torch.tensor(1.0),), "with one row per sample"),
        (iter([1, 2]), "a list_iterator has no len()"),
    ],
)
def test_what_is_no_data_set_is_told(data: Any, says: str) -> None:
    with pytest.raises(DataError) as caught:
        count_samples(data, "the training set of job 'mine'")
    assert str(caught.value).startswith("the training set of job 'mine'")
    assert says in str(caught.value)


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def seed_all() -> None:
    torch.manual_seed(4)
    numpy.random.seed(5)
    random.seed(6)


def test_keyed_draws_depend_on_the_key_alone() -> None:
    def inside(*key: int) -> tuple[float, float, float]:
        draws()  # whatever was drawn before
        with seeded_by(*key):
            return draws()

    first = inside(0, 1, 2)
    assert inside(0, 1, 2) == first
    others = [inside(1, 1, 2), inside(0, 2, 2), inside(0, 1, 3), inside(0, 2, 1)]
    for one in range(3):
        assert len({found[one] for found in [first, *others]}) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_draws_outside_go_on_as_if_nothing_had_been_drawn(fails: bool) -> None:
    seed_all()
    expected = [draws(), draws()]
    seed_all()
    found = [draws()]
    try:
        with seeded_by(0, 1):
            draws()
            if fails:
                raise KeyError
    except KeyError:
        pass
    found.append(draws())
    assert found == expected


class Noisy(Squares):
    """Augments with torch, numpy and Python."""

    def __getitem__(self, index: int) -> Any:
        return (*draws(), index)


def by_sample(batches: list[Any]) -> dict[int, tuple[float, ...]]:
    rows = [torch.stack([column.double() for column in batch], dim=1).tolist() for batch in batches]
    return {int(row[3]): tuple(row[:3]) for batch in rows for row in batch}


def test_a_sample_is_augmented_alike_in_whatever_batch_it_is_read() -> None:
    batches = reader(Noisy(), LoaderSettings(seed=1))
    whole = by_sample(list(batches([torch.arange(10)], 0)))
    alone = by_sample(list(batches([torch.tensor([i]) for i in (7, 2, 9)], 0)))
    assert alone == {i: whole[i] for i in (7, 2, 9)}
    assert len(set(whole.values())) == 10


@pytest.mark.parametrize("other", [(1, 1), (2, 0)])
def test_another_epoch_or_seed_augments_otherwise(other: tuple[int, int]) -> None:
    def drawn(seed: int, epoch: int) -> dict[int, tuple[float, ...]]:
        return by_sample(read(Noisy(), LoaderSettings(seed=seed), epoch))

    assert not set(drawn(1, 0).values()) & set(drawn(*other).values())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns where torch forks
def test_worker_processes_read_the_same_samples() -> None:
    here, there = (by_sample(read(Noisy(), LoaderSettings(seed=3, workers=workers))) for workers in (0, 1))
    assert here == there


class ReadyRows(Squares):
    """Gives the rows of a batch at once, as one whose collate_fn has nothing to do; `noise` draws for them."""

    noise = False

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("torch asks for whole batches")

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        return rows, rows + torch.rand(len(rows)) if self.noise else rows * rows


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("several", [False, True])
def test_a_data_set_that_gives_ready_batches_is_asked_for_them(several: bool) -> None:
    settings = LoaderSettings(collate=as_it_is, several=several)
    (rows, squares), _ = reader(ReadyRows(), settings)([torch.tensor([3, 1]), torch.tensor([2])], 0)
    assert rows.tolist() == [3, 1] and squares.tolist() == [9, 1]


def test_ready_batches_whose_draws_would_depend_on_the_devices_are_refused() -> None:
    data = ReadyRows()
    data.noise = True
    assert len(list(reader(data, LoaderSettings(collate=as_it_is))([torch.tensor([1])], 0))) == 1
    with pytest.raises(DataError, match=r"ReadyRows.__getitems__ returns a whole batch and draws random numbers"):
        next(reader(data, LoaderSettings(collate=as_it_is, several=True))([torch.tensor([1])], 0))


def test_ready_batches_that_begin_to_draw_are_refused_later() -> None:
    data = ReadyRows()
    batches = reader(data, LoaderSettings(collate=as_it_is, several=True))([torch.tensor([1])] * 3, 0)
    next(batches)
    data.noise = True
    with pytest.raises(DataError, match=r"returns a whole batch and draws random numbers"):
        next(batches)


def test_generators_are_kept_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Mock(side_effect=random.getstate)
    monkeypatch.setattr(generators, "GLOBAL", (*GLOBAL[:2], Handle(kept, random.setstate)))
    assert len(list(reader(Noisy(), LoaderSettings())([torch.arange(5)] * 4, 0))) == 4
    assert kept.call_count == 2 + 4  # the first batch is looked at, and read again


class SomeDraw(Squares):
    """Draws for the last two samples alone, and says what is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return index, random.random() if index > 7 else 0.0, torch.initial_seed()


def test_samples_are_seeded_and_read_again_once_one_has_drawn() -> None:
    order = [[3, 1, 0], [8, 2], [4, 9]]
    one, other = SomeDraw(), SomeDraw()
    settings = LoaderSettings(collate=as_it_is, seed=1)
    apart = list(reader(one, settings)([torch.tensor(part) for part in order], 0))
    whole = list(reader(other, settings)([torch.tensor([*order[0], *order[1], *order[2]])], 0))
    assert [sample[:2] for batch in apart for sample in batch] == [sample[:2] for sample in whole[0]]
    assert one.read == [3, 1, 0, 8, 2, 8, 2, 4, 9] and other.read == 2 * [3, 1, 0, 8, 2, 4, 9]
    assert len({seed for *_, seed in apart[0]}) == 1, "what asks for the seed gets the same in each batch"


def test_samples_that_draw_nothing_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = Mock(side_effect=numpy.random.seed)
    monkeypatch.setattr(numpy.random, "seed", seeded)
    assert len(list(reader(Squares(), LoaderSettings())([torch.arange(10)] * 3, 0))) == 3
    assert seeded.call_count == 0


class ByItems(Dataset[Any]):
    """Gives lists of samples alone, augmented with one draw for each."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(*draws(), index) for index in indices]


@pytest.mark.parametrize("data", [ByItems(), Subset(Noisy(), range(10))], ids=["alone", "subset"])
def test_samples_that_come_in_lists_are_augmented_alike_in_any_batch(data: Any) -> None:
    whole = by_sample(list(reader(data, LoaderSettings(seed=1))([torch.arange(10)], 0)))
    alone = by_sample(list(reader(data, LoaderSettings(seed=1))([torch.tensor([i]) for i in (7, 2, 9)], 0)))
    assert alone == {i: whole[i] for i in (7, 2, 9)}


class OfFour(TensorDataset):
    """A class of data sets is a function that gives one."""

    def __init__(self) -> None:
        super().__init__(torch.arange(4.0).view(4, 1))


@pytest.mark.parametrize("given", [OfFour, OfFour(), OfFour().tensors, lambda: OfFour(), list(OfFour())])
def test_a_job_takes_a_data_set_or_what_gives_one(given: Any) -> None:
    job = mw.Job(
        name="given",
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=given,
        test=given,
        batch_size=2,
    )
    facts = run_job(replace(job, epochs=2), RunOptions(log_every=1), None)
    assert facts["samples"] == 8 and len(facts["losses"]) == 4 and "loss" in facts["metrics"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_holds_no_batch_of_an_earlier_step(accumulate: int) -> None:
    read: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loss(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        alive.append(sum(reference() is not None for reference in read))
        read.append(weakref.ref(batch[0]))
        return model(batch[0]).square().mean()

    def model() -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    data, optimizer = (torch.ones(24, 2),), lambda params: torch.optim.SGD(params, lr=0.01)
    job = mw.Job(name="held", model=model, loss=loss, optimizer=optimizer, data=data, test=data, batch_size=4, epochs=1)
    run_job(job, RunOptions(plan=Plan(accumulate=accumulate)), None)
    assert alive == [*[0, 1][:accumulate] * 6, *[0] * (len(alive) - 6 * accumulate)]
    alive.clear()
    read.clear()

    net = torch.nn.Linear(2, 1)
    wrapped, sgd, loader = mw.distribute(
        net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(data[0], 4), view="rank"
    )
    for batch in loader:
        mw.backward(loss(wrapped, (batch,)))
        sgd.step()
        sgd.zero_grad()
        del batch  # the loop's own name holds it while the next is read
    assert alive == [0] * 6
