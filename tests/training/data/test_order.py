"""The order of the data: no sample lost, none repeated, for any number of ranks and microbatches, from any place."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.world import World
from meshwise.training.data.order import (
    BatchSlice,
    batch_bounds,
    batch_slice,
    epoch_order,
    epoch_slices,
    part,
    sequential_slices,
    world_part,
)
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import end_sessions

samples = st.integers(1, 60)
batch_sizes = st.integers(1, 25)
sizes = st.integers(1, 9)
microbatches = st.integers(1, 7)


def all_ranks(order: Tensor, batch: int, size: int, accumulate: int, begin: int = 0) -> list[list[list[BatchSlice]]]:
    """Shares by step, then microbatch, then rank."""
    ranks = [list(epoch_slices(order, batch, World(rank, size), accumulate, begin)) for rank in range(size)]
    return [list(map(list, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]


def counted(step: list[list[BatchSlice]]) -> list[int]:
    """The samples of a step that count, over all microbatches and ranks, in the order of the data."""
    return [i for micro in step for share in micro for i in share.indices[: share.samples].tolist()]


@given(samples, batch_sizes, sizes, microbatches)
def test_the_shares_of_all_ranks_are_every_batch_exactly_once(n: int, batch: int, size: int, accumulate: int) -> None:
    order = epoch_order(3, 1, n)
    steps = all_ranks(order, batch, size, accumulate)
    assert [counted(step) for step in steps] == [order[a : a + batch].tolist() for a in range(0, n, batch)]


@given(samples, batch_sizes, sizes, microbatches)
def test_every_share_knows_the_size_of_its_global_batch(n: int, batch: int, size: int, accumulate: int) -> None:
    for number, step in enumerate(all_ranks(epoch_order(0, 0, n), batch, size, accumulate)):
        assert {share.total for micro in step for share in micro} == {min(batch, n - number * batch)}


@given(samples, batch_sizes, sizes, microbatches)
def test_only_a_rank_without_a_sample_gets_a_stand_in(n: int, batch: int, size: int, accumulate: int) -> None:
    for step in all_ranks(epoch_order(0, 0, n), batch, size, accumulate):
        for micro in step:
            here = {i for share in micro for i in share.indices[: share.samples].tolist()}
            for share in micro:
                assert len(share.indices) == max(share.samples, 1)
                if share.samples == 0:
                    assert len(here) < size
                    assert set(share.indices.tolist()) <= here  # a sample that another rank reads now anyway


@given(samples, st.lists(st.floats(0.01, 10), min_size=1, max_size=9).map(tuple))
def test_parts_of_unequal_ranks_join_and_are_in_proportion(count: int, shares: tuple[float, ...]) -> None:
    size = len(shares)
    parts = [world_part(5, 5 + count, World(rank, size, shares=shares)) for rank in range(size)]
    assert parts[0][0] == 5 and parts[-1][1] == 5 + count and all(a[1] == b[0] for a, b in pairwise(parts))
    own = [last - first for first, last in parts]
    assert min(own) >= (count >= size)
    exact = [count * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(had - due) <= size for had, due in zip(own, exact, strict=True))
    if size == 2 and min(exact) >= 1:
        assert all(abs(had - due) <= 0.5 + 1e-9 for had, due in zip(own, exact, strict=True))


@given(samples, batch_sizes, sizes, microbatches)
def test_work_is_even_to_one_sample(n: int, batch: int, size: int, accumulate: int) -> None:
    for step in all_ranks(epoch_order(0, 0, n), batch, size, accumulate):
        assert 1 <= len(step) <= accumulate
        by_micro = [sum(share.samples for share in micro) for micro in step]
        assert min(by_micro) >= 1 and max(by_micro) - min(by_micro) <= 1
        for micro in step:
            loads = [share.samples for share in micro]
            assert max(loads) - min(loads) <= 1


@given(samples, batch_sizes, sizes, sizes, microbatches, microbatches, st.data())
def test_resuming_at_an_index_reads_the_same_rest_on_any_devices(
    n: int, batch: int, before: int, after: int, micro_before: int, micro_after: int, data: st.DataObject
) -> None:
    order = epoch_order(7, 2, n)
    whole = [counted(step) for step in all_ranks(order, batch, before, micro_before)]
    done = data.draw(st.integers(0, len(whole)))
    rest = [counted(step) for step in all_ranks(order, batch, after, micro_after, begin=min(done * batch, n))]
    assert whole[:done] + rest == whole


@given(samples, batch_sizes, sizes)
def test_an_evaluation_reads_every_sample_once_front_to_back(n: int, batch: int, size: int) -> None:
    ranks = [sequential_slices(n, batch, World(rank, size)) for rank in range(size)]
    read = [i for step in zip(*ranks, strict=True) for share in step for i in share.indices[: share.samples].tolist()]
    assert read == list(range(n))


@given(st.integers(-50, 50), st.integers(0, 60), sizes)
def test_parts_of_a_range_join_without_gaps(start: int, length: int, parts: int) -> None:
    edges = [part(start, start + length, parts, index) for index in range(parts)]
    assert edges[0][0] == start and edges[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_an_epochs_order_is_a_permutation_that_only_seed_and_epoch_decide() -> None:
    torch.manual_seed(1)
    first = epoch_order(5, 0, 100)
    torch.manual_seed(2)
    torch.rand(3)
    assert epoch_order(5, 0, 100).equal(first)
    assert sorted(first.tolist()) == list(range(100))
    others = [epoch_order(5, 1, 100), epoch_order(6, 0, 100)]
    assert not any(other.equal(first) for other in others)


def test_no_two_seeds_share_the_order_of_some_epoch() -> None:
    seeds = [0, 1, 2, 1000, 2**16, 2**30, 2**31 - 1]  # torch's CPU generator looks at 32 bits of its seed alone
    orders = {tuple(epoch_order(seed, epoch, 30).tolist()) for seed in seeds for epoch in range(20)}
    assert len(orders) == len(seeds) * 20


def test_more_ranks_than_samples_give_stand_ins_that_weigh_nothing() -> None:
    shares = [batch_slice(torch.tensor([4, 9]), 0, 2, 2, World(rank, 4)) for rank in range(4)]
    assert [(share.indices.tolist(), share.samples) for share in shares] == [([4], 1), ([9], 1), ([4], 0), ([4], 0)]


def slices_now() -> int:
    return sum(type(thing) is BatchSlice for thing in gc.get_objects())


def test_an_epochs_slices_are_made_as_it_goes() -> None:
    """50 million samples were 2 GB of slices at the first step."""
    x = torch.zeros(200, 1)
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        seen.extend([slices_now()] if not seen else [])
        return model(batch[0]).mean()

    before = slices_now()
    job = Job("lazy", lambda: nn.Linear(1, 1), loss, lambda p: torch.optim.SGD(p, 0.1), lambda: (x,))
    run_job(replace(job, batch_size=4), RunOptions(), None)
    end_sessions()
    loop = iter(mw.distribute(DataLoader(TensorDataset(x), batch_size=4, shuffle=True), view="rank"))
    next(loop)
    assert seen[0] - before < 5 and slices_now() - before < 5


@given(samples, batch_sizes, st.data())
def test_batches_that_are_left_out_take_no_sample_of_another(count: int, batch: int, data: st.DataObject) -> None:
    every = list(batch_bounds(count, batch))
    gone = [bounds for bounds in every if data.draw(st.booleans())]
    kept = list(batch_bounds(count, batch, 0, gone))
    assert kept == [bounds for bounds in every if bounds not in gone]
    other = data.draw(batch_sizes)  # a run that goes on with another size
    read = [sample for bounds in batch_bounds(count, other, 0, gone) for sample in range(*bounds)]
    assert read == [sample for bounds in kept for sample in range(*bounds)]
