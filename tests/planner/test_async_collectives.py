"""Collectives that a program begins and goes on beside are waited for where it waits, or uses what they bring.

Of torch_compat/collective_calls.py too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from meshwise.planner.trace import trace
from meshwise.planner.work import MAIN, CollectiveOperation, Launch, Operation, Work
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job


def step(job: Job, plan: Plan, kind: str, rank: int = 0) -> Work:
    return trace(job, plan, kind)[rank].step


def collectives(work: Work) -> dict[int, Launch]:
    return {
        place: event
        for place, event in enumerate(work.events)
        if isinstance(event, Launch) and isinstance(event.what, CollectiveOperation)
    }


def waits_for(work: Work, place: int) -> list[tuple[int, Launch]]:
    return [(at, e) for at, e in enumerate(work.events) if isinstance(e, Launch) and place in e.after]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_buckets_are_summed_while_the_backward_goes_on(kind: str) -> None:
    work = step(find_job("mlp"), Plan(data=2, bucket_mb=1), kind)
    sums = collectives(work)
    assert len(sums) > 1 and all(one.stream != MAIN for one in sums.values())
    first = next(iter(sums))
    (waiting, launch), *_ = waits_for(work, first)
    between = [e for e in work.events[first:waiting] if isinstance(e, Launch) and isinstance(e.what, Operation)]
    assert any(one.what.name == "aten.mm" for one in between if isinstance(one.what, Operation))
    assert launch.phase == "backward" and launch.stream == MAIN
    assert {place for place in sums if waits_for(work, place)} == set(sums)
    computed = [place for place, e in enumerate(work.events[:first]) if isinstance(e, Launch) and e.stream == MAIN]
    assert sums[first].after == (() if kind == "cpu" else (computed[-1],))


def test_what_blocks_stays_where_it_is() -> None:
    assert {one.stream for one in collectives(step(find_job("mnist-mlp"), Plan(shard=2), "cpu")).values()} == {MAIN}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_stage_computes_with_what_it_has_received(kind: str) -> None:
    work = step(find_job("mnist-mlp"), Plan(pipeline=2, accumulate=4), kind, rank=1)
    receives = [place for place, one in collectives(work).items() if one.what.kind == "receive"]  # type: ignore[union-attr]
    assert len(receives) == 4
    for place in receives:
        (_, launch), *_ = waits_for(work, place)
        assert launch.stream == MAIN


def test_the_norm_of_shards_is_a_collective() -> None:
    """DTensor sums it by a functional collective."""
    work = step(replace(find_job("mnist-mlp"), clip_norm=1.0), Plan(shard=2), "cpu")
    (place, norm) = list(collectives(work).items())[-1]
    assert (norm.phase, norm.what.kind) == ("optimizer", "all-reduce")  # type: ignore[union-attr]
    assert waits_for(work, place)


def sums(how: Callable[[torch.Tensor], Any], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss in which a sum over the ranks is begun, something else computed, and then the sum used."""
    total = torch.zeros(4)
    found = how(total)
    loss = model(batch[0]).square().mean()
    return loss + (total if found is None else found).sum().detach()


def begun_and_awaited(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()


def begun(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True)


@pytest.mark.parametrize(
    ("how", "blocks"),
    [
        (begun_and_awaited, True),
        (begun, False),
        (lambda tensor: functional.all_reduce(tensor, "sum", dist.group.WORLD), True),
    ],
    ids=["waited for", "used later", "functional"],
)
def test_a_program_waits_where_it_says_so_or_uses_it(how: Callable[[torch.Tensor], Any], blocks: bool) -> None:
    job = Job(
        name="sums",
        model=lambda: torch.nn.Linear(4, 4),
        loss=partial(sums, how),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.zeros(8, 4), torch.zeros(8, 4)),
        batch_size=4,
    )
    work = step(job, Plan(data=2), "cpu")
    place = next(iter(collectives(work)))
    at, _ = waits_for(work, place)[0]
    between = {e.what.name for e in work.events[place:at] if isinstance(e, Launch) and isinstance(e.what, Operation)}
    assert ("aten.addmm" in between) is not blocks
