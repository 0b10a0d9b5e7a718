"""From a job and a plan to an estimate: trace, price, simulate, replay.

Tested in tests/rehearsal/test_estimate.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.machine.catalog import part
from meshwise.rehearsal.allocator import device_total, replay, workspace
from meshwise.rehearsal.breakdown import slowest_rank
from meshwise.rehearsal.estimate import Estimate, Memory, Range
from meshwise.rehearsal.measured import prices_here
from meshwise.rehearsal.memory import memory_curve, with_inside
from meshwise.rehearsal.prices import Prices, missing
from meshwise.rehearsal.scripts import Script, trace_script
from meshwise.rehearsal.simulate import Step, simulate
from meshwise.rehearsal.trace import Trace, trace
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.training.job import Job

MEASURE = 5.0
"""Seconds for which a CPU's operators are measured for each plan; what was measured is remembered."""


@dataclass(frozen=True)
class Rehearsed:
    """An estimate with what it was made of: the traces of its ranks, their prices, and the step as it was played; None
    where its time is not known."""

    estimate: Estimate
    traces: Sequence[Trace]
    prices: Prices
    step: Step | None = None


def kind_of(machine: Machine) -> str:
    """What is rehearsed for a machine: `cpu` or `gpu`."""
    return "cpu" if machine.devices[0].kind == "cpu" else "gpu"


def estimator(job: Job | Script, machine: Machine, cap: int | None = None) -> Callable[[Plan], Estimate]:
    """What estimates plans of this job on this machine. cap: bytes that a step may take of a device, where that is less
    than it has."""
    rehearse = rehearser(job, machine, cap)
    return lambda plan: rehearse(plan).estimate


def rehearser(job: Job | Script, machine: Machine, cap: int | None = None) -> Callable[[Plan], Rehearsed]:
    """As `estimator`, with all that an estimate was made of."""
    described = Prices(machine)
    kind = kind_of(machine)
    if isinstance(job, Job):  # its data is opened once, for all plans and stages, and read without processes of its own
        job = replace(job, data=functools.cache(job.data), loader_workers=0)

    def rehearse(plan: Plan) -> Rehearsed:
        traces = trace(job, plan, kind) if isinstance(job, Job) else trace_script(job, plan, kind)
        steps = [each.step for each in traces]
        notes, samples = steps[0].notes, job.batch_size
        prices = prices_here(machine, steps, MEASURE) if kind == "cpu" else described
        memory = max((_of_rank(each, prices, cap) for each in traces), key=lambda memory: memory.total.value)
        unknown = missing(steps, prices)
        if unknown:
            return Rehearsed(Estimate(plan, memory, None, {}, unknown[0], notes, samples), traces, prices)
        try:
            step = simulate(steps, prices)
        except ValueError as error:  # the ranks that were traced wait for each other
            return Rehearsed(Estimate(plan, memory, None, {}, str(error), notes, samples), traces, prices)
        seconds = Range(step.seconds, step.low, step.high)
        estimate = Estimate(plan, memory, seconds, slowest_rank(step).kinds, "", notes, samples)
        return Rehearsed(estimate, traces, prices, step)

    return rehearse


def _of_rank(traced: Trace, prices: Prices, cap: int | None) -> Memory:
    """Of the larger of its first step and a later one, after one another."""
    device = prices.machine.devices[traced.step.rank]
    works = [with_inside(work, prices.inside) for work in (traced.first, traced.step)]
    capacity = device.memory if cap is None else min(cap, device.memory or cap)
    peak = max((memory_curve(work).peak for work in works), key=lambda peak: peak.bytes)
    host = max(memory_curve(work, on_host=True).peak.bytes for work in works)
    if traced.step.kind == "cpu":  # a process beside others: what it takes besides tensors is not counted
        total, reserved = Range(peak.bytes, peak.bytes, peak.bytes), peak.bytes
    else:
        known = part(device.part)
        reserved = replay(works, first=[workspace(known.architecture if known else "")]).reserved
        taken = device_total(reserved, traced.step)
        total = Range(taken.bytes, taken.low, taken.high)
    return Memory(traced.step.rank, total, peak.bytes, peak.split, reserved, host, capacity)
