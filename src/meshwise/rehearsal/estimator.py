"""From a job and a plan to an estimate: trace, price, simulate, replay.

Tested in tests/rehearsal/test_estimate.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from meshwise.rehearsal.breakdown import breakdown
from meshwise.rehearsal.estimate import Estimate, Memory, Range
from meshwise.rehearsal.prices import Prices, missing
from meshwise.rehearsal.simulate import simulate
from meshwise.rehearsal.trace import Trace, trace
from meshwise.rehearsal.work import Allocate, Free, Work
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.training.job import Job


def estimator(job: Job, machine: Machine, cap: int | None = None) -> Callable[[Plan], Estimate]:
    """What estimates plans of this job on this machine. cap: bytes that a step may take of a device, where that is less
    than it has."""
    prices = Prices(machine)
    kind = "cpu" if machine.devices[0].kind == "cpu" else "gpu"

    def estimate(plan: Plan) -> Estimate:
        traces = trace(job, plan, kind)
        steps = [each.step for each in traces]
        memory = _memory(traces, machine, cap)
        notes, samples = steps[0].notes, job.batch_size
        unknown = missing(steps, prices)
        if unknown:
            return Estimate(plan, memory, None, {}, unknown[0], notes, samples)
        step = simulate(steps, prices)
        slowest = max((breakdown(step, rank) for rank in step.ranks), key=lambda one: one.kinds["computing"])
        seconds = Range(step.seconds, step.low, step.high)
        return Estimate(plan, memory, seconds, slowest.kinds, "", notes, samples)

    return estimate


def _memory(traces: Sequence[Trace], machine: Machine, cap: int | None) -> Memory:
    of_ranks = [_of_rank(work) for each in traces for work in (each.first, each.step)]
    rank, allocated, categories, host = max(of_ranks, key=lambda one: one[1])
    capacity = machine.devices[rank].memory
    if cap is not None:
        capacity = cap if capacity is None else min(cap, capacity)
    total = Range(allocated, allocated, allocated)
    return Memory(rank, total, allocated, categories, allocated, host, capacity)


def _of_rank(work: Work) -> tuple[int, int, Counter[str], int]:
    alive = {event.storage: event for event in work.held}
    now = Counter({True: 0, False: 0})
    for event in work.held:
        now[event.on_host] += event.size
    peaks, at = Counter(now), dict(alive)
    for event in work.events:
        if isinstance(event, Allocate):
            alive[event.storage] = event
            now[event.on_host] += event.size
            if now[event.on_host] > peaks[event.on_host]:
                peaks[event.on_host] = now[event.on_host]
                if not event.on_host:
                    at = dict(alive)
        elif isinstance(event, Free):
            gone = alive.pop(event.storage)
            now[gone.on_host] -= gone.size
    categories: Counter[str] = Counter()
    for one in at.values():
        if not one.on_host:
            categories[one.category] += one.size
    return work.rank, peaks[False], categories, peaks[True]
