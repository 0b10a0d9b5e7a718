"""Data that the ranks do not share is refused or said where it is given, and what they do share gives no alarm."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import meshwise as mw
from meshwise.parallel.mesh import divide_work
from meshwise.spec.errors import DataError
from meshwise.spec.plan import Plan
from meshwise.training.guards.same_data import THINGS, SameData, read
from meshwise.training.job.run import open_data
from meshwise.training.process.session import default_engine
from meshwise.transfer import collectives
from meshwise.workers.join import join

N = 40


class Kept(Dataset[Any]):
    """A data set of one thing, which draws where it is read."""

    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is asked for")


def x(seed: int, size: int = N) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def tensors(rank: int, tmp: Path) -> Any:
    return TensorDataset(x(rank), torch.arange(N))


def labels(rank: int, tmp: Path) -> Any:
    return TensorDataset(x(0), torch.randint(0, 2, (N,), generator=torch.Generator().manual_seed(rank)))


def joined(rank: int, tmp: Path) -> Any:
    return ConcatDataset([TensorDataset(x(0, 20)), TensorDataset(x(rank, 20))])


def array(rank: int, tmp: Path) -> Any:
    return Kept(x=numpy.random.default_rng(rank).normal(size=(N, 3)))


def samples(rank: int, tmp: Path) -> Any:
    return [(each, 1) for each in x(rank)]


def texts(rank: int, tmp: Path) -> Any:
    return Kept(texts=random.Random(rank).sample([f"sentence {number}" for number in range(N)], N))


def files(rank: int, tmp: Path) -> Any:
    for number in range(N):
        (tmp / f"{number}.bin").write_bytes(bytes(number))
    order = random.Random(rank).sample(range(N), N)
    return Kept(samples=[(str(tmp / f"{number}.bin"), 0) for number in order])


def chosen(rank: int, tmp: Path) -> Any:
    return Subset(TensorDataset(x(0, 2 * N)), random.Random(rank).sample(range(2 * N), N))


def large(rank: int, tmp: Path) -> Any:
    return TensorDataset(x(rank, 100_000))


WRONG = (tensors, labels, joined, array, samples, texts, files, chosen, large)


def in_another_folder(rank: int, tmp: Path) -> Any:
    (tmp / f"node {rank}").mkdir(exist_ok=True)
    names = [tmp / f"node {rank}" / f"{number}.bin" for number in range(N)]
    for number, name in enumerate(names):
        name.write_bytes(bytes(number))
    return Kept(files=names, root=tmp / f"node {rank}")


def rounded_otherwise(rank: int, tmp: Path) -> Any:
    return TensorDataset(x(0) * (1 + rank * 2e-7))


def of_its_own(rank: int, tmp: Path) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return Kept(x=x(0), rank=rank, part=(rank, 2), device=f"cuda:{rank}", generator=generator, rng=random.Random(rank))


def with_no_number(rank: int, tmp: Path) -> Any:
    return TensorDataset(torch.full((N, 2), torch.nan))


RIGHT = (in_another_folder, rounded_otherwise, of_its_own, with_no_number)


def given(make: Callable[[int, Path], Any], tmp: Path) -> str:
    """What is refused or said of it."""
    state = torch.get_rng_state(), random.getstate()
    try:
        mw.distribute(DataLoader(make(mw.rank(), tmp), batch_size=4, collate_fn=list), view="rank")
    except DataError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    return " ".join(default_engine().notes)


def of_all(makes: tuple[Callable[[int, Path], Any], ...], tmp: Path) -> dict[str, str]:
    return {make.__name__: given(make, tmp) for make in makes}


@pytest.fixture(scope="module")
def refused(pool: Any, tmp_path_factory: Any) -> Any:
    return pool(2).run(of_all, WRONG, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("kind", [make.__name__ for make in WRONG])
def test_data_made_from_a_seed_of_each_rank_are_refused(refused: Any, kind: str) -> None:
    for rank in refused:
        assert "Not the same data: " in rank[kind]
        assert "rank 1 has other values than rank 0 in " in rank[kind]


def test_the_tensor_is_named(refused: Any) -> None:
    assert "in TensorDataset.tensors[0] (40 rows)" in refused[1]["tensors"]
    assert "in TensorDataset.tensors[1] (40 rows)" in refused[1]["labels"]
    assert "in ConcatDataset.datasets[1].tensors[0] (20 rows)" in refused[0]["joined"]


def test_data_that_every_rank_has_give_no_alarm(pool: Any, tmp_path: Path) -> None:
    for rank in pool(2).run(of_all, RIGHT, tmp_path):
        assert rank == dict.fromkeys(rank, "")


def under_tensor() -> str:
    """Both ranks work on the same samples."""
    assert divide_work(Plan(tensor=2), join().world).size == 1
    try:
        engine: Any = SimpleNamespace(notify=print)
        SameData(engine).data_given(TensorDataset(x(mw.rank())), N)
    except DataError as error:
        return str(error)
    finally:
        collectives.divide_among(None)
    return ""


def test_ranks_that_work_on_the_same_samples_are_compared_too(pool: Any) -> None:
    assert all("rank 1 has other values than rank 0" in text for text in pool(2).run(under_tensor))


def with_samplers(kind: str) -> str:
    data = TensorDataset(x(0))
    rank = mw.rank()
    order = random.Random(rank).sample(range(N), N)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(rank))
    sampler: Any = {
        "subset": SubsetRandomSampler(order),
        "weights": WeightedRandomSampler(weights.tolist(), N),
        "own seed": torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(rank)),
    }[kind]
    try:
        mw.distribute(DataLoader(data, batch_size=4, sampler=sampler), view="rank")
    except DataError as error:
        return str(error)
    return ""


def test_samplers_that_choose_other_samples_are_refused(pool: Any) -> None:
    for kind in ("subset", "weights"):
        assert all("has other values than rank 0 in sampler[0]." in text for text in pool(2).run(with_samplers, kind))
    assert pool(2).run(with_samplers, "own seed") == ["", ""]


def again() -> list[str]:
    """A data set keeps what this rank has read, and is given once more, whole and as a part."""
    data = TensorDataset(x(0), torch.zeros(N))
    (loader,) = (mw.distribute(DataLoader(data, batch_size=4), view="rank"),)
    data.tensors[1][mw.rank() :: 2] = 1.0
    del loader
    mw.distribute(DataLoader(data, batch_size=4), view="rank")
    mw.distribute(DataLoader(Subset(data, range(20)), batch_size=4), view="rank")
    return default_engine().notes


def test_what_was_given_before_may_keep_what_a_rank_has_read(pool: Any) -> None:
    assert pool(2).run(again) == [[], []]


def said() -> list[str]:
    rank = mw.rank()
    mw.distribute(DataLoader(Kept(x=x(0), noise=x(rank, 64)), batch_size=4), view="rank")
    return default_engine().notes


def test_what_is_no_row_of_a_sample_is_said(pool: Any) -> None:
    for (note,) in pool(2).run(said):
        assert "rank 1 has other values than rank 0 in Kept.noise (64 rows)" in note


def test_what_is_read_has_a_limit() -> None:
    data = Kept(lists=[x(number, 5000) for number in range(600)], **{f"x{n}": x(n, 50_000) for n in range(100)})
    begun = time.thread_time()
    found = read({"": data}, N, weakref.WeakValueDictionary())
    assert time.thread_time() - begun < 1  # a tenth of it, on a quiet machine
    assert 0 < len(found) <= THINGS


def test_a_job_is_refused_as_a_loop_is(pool: Any) -> None:
    for text in pool(2).run(run_job_of_ranks):
        assert "rank 1 has other values than rank 0 in tuple[0] (40 rows)" in text


def run_job_of_ranks() -> str:
    job: Any = SimpleNamespace(collate=None, loader_workers=0, seed=0, name="mine")
    try:
        open_data(job, (x(mw.rank()), torch.arange(N)), "training set", default_engine())
    except DataError as error:
        return str(error)
    return ""
