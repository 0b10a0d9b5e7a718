"""What a real step allocates: the events of torch's own allocator, for bench/pairs.py and bench/edge.py.

The events are those of torch.profiler (`profile_memory=True`), of the first steps of a job on CPU workers, in the order
of their time. What gloo copies inside a collective is not among them: it is let go in threads that the profiler does
not see, and NCCL has none of it (bench/memory.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from meshwise.rehearsal.work import MAIN, Allocate, Event, Free, Work
from meshwise.spec.plan import Plan
from meshwise.training.job import Job
from meshwise.training.job_step import train_step
from meshwise.training.loop import begun, make_engine, open_data, read_parts
from meshwise.training.order import epoch_order, epoch_slices
from meshwise.workers.join import join

STEPS = 2
BEGIN = "the first step begins"


@dataclass(frozen=True)
class Allocations:
    """events: (nanoseconds, bytes, address); bytes are negative where memory is given back. begin: when the first step
    began; what was made before is the model."""

    events: tuple[tuple[int, int, int], ...]
    begin: int

    @property
    def peak(self) -> int:
        """The most bytes at once, from the first step on."""
        totals = itertools.accumulate(size for _, size, _ in self.events)
        return max(total for (when, _, _), total in zip(self.events, totals, strict=True) if when >= self.begin)

    def work(self) -> Work:
        """The same as what a rehearsal gives: for the rules of an allocator."""
        held: dict[int, Allocate] = {}
        events: list[Event] = []
        storages: dict[int, int] = {}
        numbers = itertools.count()
        for when, size, address in self.events:
            before = when < self.begin
            if size > 0:
                storages[address] = number = next(numbers)
                taken = Allocate(number, size, "temporary", False, MAIN)
                if before:
                    held[number] = taken
                else:
                    events.append(taken)
            elif address in storages:
                number = storages.pop(address)
                if before:
                    held.pop(number, None)
                else:
                    events.append(Free(number))
        return Work(0, 1, "gpu", tuple(held.values()), tuple(events))


def allocations(job: Job, plan: Plan) -> Allocations:
    """Of this rank's first steps. Collective."""
    session = join()
    engine = make_engine(session, plan)
    data = open_data(job, job.data(), "training set")
    steps = steps_of(job, plan, data, engine)
    next(steps)  # the order of the epoch is no part of a step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        state = begun(job, plan, engine)
        state.model.train()
        with record_function(BEGIN):
            pass
        for parts in itertools.islice(steps, STEPS):
            train_step(engine, job, state, parts)
    engine.close()
    results: Any = found.profiler.kineto_results  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in results.events() if event.name() == BEGIN)
    return Allocations(tuple(_allocated(results.experimental_event_tree())), begin)


def steps_of(job: Job, plan: Plan, data: Any, engine: Any) -> Iterator[list[Any]]:
    """The microbatches of each step on this rank, read as a run reads them, from epoch to epoch."""
    for epoch in itertools.count():
        order = epoch_order(job.seed, epoch, data.samples)
        slices = list(epoch_slices(order, job.batch_size, engine.world, plan.accumulate))
        pairs = read_parts(data, itertools.chain.from_iterable(slices), epoch, engine.world.device)
        for step in slices:
            yield [next(pairs) for _ in step]


def _allocated(roots: Any) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    inside: set[int] = set()  # what collectives have allocated, by address
    seen: list[tuple[int, int, int, bool]] = []
    ahead = [(root, False) for root in roots]
    while ahead:
        event, in_collective = ahead.pop()
        if event.tag.name == "Allocation":
            facts = event.typed[1]
            seen.append((event.start_time_ns, facts.alloc_size, facts.ptr, in_collective))
            continue
        in_collective = in_collective or event.name.startswith("c10d::")
        ahead += [(child, in_collective) for child in event.children]
    for when, size, address, in_collective in sorted(seen, key=lambda one: one[0]):
        if size > 0 and in_collective:
            inside.add(address)
        elif size > 0 or address not in inside:
            inside.discard(address)
            found.append((when, size, address))
        else:
            inside.discard(address)
    return found


def folder_of(name: str) -> Path:
    """Where a bench keeps what it has done so far."""
    return Path(__file__).parent / "results" / name
