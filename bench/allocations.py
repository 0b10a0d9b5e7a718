"""What a real step takes: its seconds, and the events of torch's own allocator. For bench/pairs.py and bench/edge.py.

The events are those of torch.profiler (`profile_memory=True`), of the first steps of a job on CPU workers, in the order
of their time. What gloo copies inside a collective is not among them: it is let go in threads that the profiler does
not see, and NCCL has none of it. What such a thread lets go of counts until its place is taken again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwise.hardware.allowance import allowed_cores, split_cores
from meshwise.planner.work import MAIN, Allocate, Event, Free, Work
from meshwise.spec.plan import Plan
from meshwise.training.data.order import epoch_order, epoch_slices
from meshwise.training.job.job import Job
from meshwise.training.job.run import begun, make_engine, open_data, read_parts
from meshwise.training.job.step import train_step
from meshwise.transfer.collectives import gather_objects
from meshwise.transfer.groups import everyone
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
    """The microbatches of each step on this rank, read as a run reads them, from epoch to epoch. The order of the first
    epoch is made at once: it is no part of a step."""

    def slices_of(epoch: int) -> list[Any]:
        order = epoch_order(job.seed, epoch, data.samples)
        return list(epoch_slices(order, job.batch_size, engine.world, plan.accumulate))

    def read(first: list[Any]) -> Iterator[list[Any]]:
        for epoch in itertools.count():
            slices = slices_of(epoch) if epoch else first
            pairs = read_parts(data, itertools.chain.from_iterable(slices), epoch, engine.world.device)
            for step in slices:
                yield [next(pairs) for _ in step]

    return read(slices_of(0))


def _allocated(roots: Any) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    inside: set[int] = set()  # what collectives have allocated, by address
    alive: dict[int, int] = {}
    for when, size, address, in_collective in sorted(_events(roots), key=lambda one: one[0]):
        if size > 0:
            for other in [at for at, own in alive.items() if at < address + size and address < at + own]:
                found.append((when, -alive.pop(other), other))  # let go by a thread that is not seen
            inside.discard(address)
            if in_collective:
                inside.add(address)
            else:
                alive[address] = size
                found.append((when, size, address))
        elif address in alive:  # else it was taken before the profile began, or inside a collective
            del alive[address]
            found.append((when, size, address))
    return found


def _events(roots: Any) -> Iterator[tuple[int, int, int, bool]]:
    """Nanoseconds, bytes, address, and whether it lies inside a collective."""
    ahead = [(root, False) for root in roots]
    while ahead:
        event, in_collective = ahead.pop()
        if event.tag.name == "Allocation":
            facts = event.typed[1]
            yield event.start_time_ns, facts.alloc_size, facts.ptr, in_collective
            continue
        in_collective = in_collective or event.name.startswith("c10d::")
        ahead += [(child, in_collective) for child in event.children]


def seconds_of(job: Job, plan: Plan, budget: float, least: int = 8) -> list[tuple[float, float]]:
    """Of each step on this rank from the read of its batch to its end, after four that are not counted: as many as
    take about `budget` seconds together, the same number on each rank. By the wall's clock, and by that of this thread,
    which stands while the thread waits. Collective."""
    session = join()
    engine = make_engine(session, plan)
    data = open_data(job, job.data(), "training set")
    state = begun(job, plan, engine)
    state.model.train()
    steps = steps_of(job, plan, data, engine)

    def one() -> tuple[float, float]:
        begin, own = time.perf_counter(), time.thread_time()
        train_step(engine, job, state, next(steps))
        return time.perf_counter() - begin, time.thread_time() - own

    first = [one()[0] for _ in range(4)]
    count = max(gather_objects(min(max(int(budget / first[-1]), least), 500), everyone()))
    found = [one() for _ in range(count)]
    engine.close()
    return found


def bind(workers: int) -> None:
    """This process, its threads too, computes as one of so many workers of this machine does: on its cores alone."""
    cores = split_cores(allowed_cores(), workers)[join().world.local_rank]
    torch.set_num_threads(max(len(cores), 1))
    if cores:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def folder_of(name: str) -> Path:
    """Where a bench keeps what it has done so far."""
    return Path(__file__).parent / "results" / name
