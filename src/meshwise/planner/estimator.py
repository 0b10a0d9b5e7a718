"""Estimate a plan's step time and memory from a traced step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.planner.allocator import device_total, reserved_on
from meshwise.planner.constants import FIGURES
from meshwise.planner.estimate import Estimate, MemoryEstimate, Range
from meshwise.planner.explain import breakdown, slowest_rank
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.measured import prices_here
from meshwise.planner.memory import memory_curve, with_inside
from meshwise.planner.prices import Prices, missing, speed_of
from meshwise.planner.scripts import Script, trace_script
from meshwise.planner.simulate import Step, simulate
from meshwise.planner.trace import Extent, Trace
from meshwise.planner.tracer import Tracer
from meshwise.planner.work import Operation, Work
from meshwise.spec.garbage import no_collections
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.spec.units import plural
from meshwise.training.job.job import Job

MEASURE = 5.0
"""How many seconds to spend on measuring a CPU's operators for each plan. Measurements are cached."""


@dataclass(frozen=True)
class Rehearsed:
    """The estimate of a plan, with the data from which it was computed."""

    estimate: Estimate
    traces: Sequence[Trace]
    prices: Prices
    step: Step | None = None
    again: Callable[[], Rehearsed] | None = None

    @functools.cached_property
    def whole(self) -> Rehearsed:
        """The same estimate, computed from all microbatches."""
        return self if self.again is None else self.again()


def kind_of(machine: Machine) -> str:
    """Return the kind of device to trace steps on for this machine: `cpu` or `gpu`."""
    return "cpu" if machine.devices[0].kind == "cpu" else "gpu"


def rehearser(
    job: Job | Tracer | Script,
    machine: Machine,
    cap: int | None = None,
    interval: bool = True,
    brief: bool = False,
) -> Callable[[Plan], Rehearsed]:
    """Return a function that traces and simulates a step of this job under a plan on this machine."""
    described = {compiled: Prices(machine, compiled=compiled) for compiled in (False, True)}
    kind = kind_of(machine)
    program = Tracer(job) if isinstance(job, Job) else job
    speeds = [speed_of(device) for device in machine.devices]

    def traced(plan: Plan, extent: Extent) -> list[Trace]:
        own = speeds[: plan.devices] if len(set(speeds)) > 1 else ()
        if isinstance(program, Script):
            return trace_script(program, plan, kind, own)
        return program(plan, kind, own, extent)

    @no_collections()
    def rehearse(plan: Plan, brief: bool = brief) -> Rehearsed:
        traces = traced(plan, "brief" if brief else "whole")
        short = any(each.launches_alone or each.step.left_out for each in traces)
        again = functools.partial(rehearse, plan, False) if short else None
        steps = [each.step for each in traces]
        used = replace(machine, devices=machine.devices[: plan.devices])  # only these devices' workers share the cores
        prices = prices_here(used, steps, MEASURE) if kind == "cpu" else described[plan.compile]
        notes = (*steps[0].notes, *_cells(steps[0]), *prices.notes)
        whole = (each for each in traces if not each.launches_alone)
        memory = max((memory_of(each, prices, cap) for each in whole), key=lambda memory: memory.filled)
        estimate = Estimate(plan, memory, notes=notes, samples=program.batch_size, dtype=steps[0].dtype)
        if unknown := missing(steps, prices):
            return Rehearsed(replace(estimate, unknown=unknown[0]), traces, prices, None, again)
        try:
            try:
                step = simulate(steps, prices, interval=interval, merged=short)
            except NotExtrapolable:  # trace the microbatches that were left out, for the times only
                steps = [each.step for each in traced(plan, "launches")]
                step = simulate(steps, prices, interval=interval, merged=short)
        except ValueError as error:  # a deadlock: the traced ranks wait for each other
            return Rehearsed(replace(estimate, unknown=str(error)), traces, prices, None, again)
        seconds, parts = Range(step.seconds, step.low, step.high), slowest_rank(step).kinds
        estimate = replace(estimate, seconds=seconds, parts=parts, balanced=_balanced(plan, speeds, step))
        return Rehearsed(estimate, traces, prices, step, again)

    return rehearse


def _cells(work: Work) -> tuple[str, ...]:
    """Return a warning for the user if the step has LSTM or GRU layers whose time on a GPU is overestimated."""
    cells = sum("_thnn_fused" in launch.what.name for launch in work.launches if isinstance(launch.what, Operation))
    if work.kind == "cpu" or not cells:
        return ()
    return (
        f"LSTM and GRU layers are rehearsed cell by cell ({plural(cells, 'cell')} in a step), but cuDNN computes a "
        "whole layer at once. On the GPU, such layers take less time than estimated, and a different amount of memory.",
    )


def _balanced(plan: Plan, speeds: Sequence[str], step: Step) -> tuple[float, ...]:
    """Return the shares of the batch at which all replicas would compute for the same time."""
    if len(set(speeds[: plan.devices])) < 2 or plan.replicas == 1:
        return ()
    within = plan.within_samples
    alike = [tuple(speeds[first : first + within]) for first in range(0, plan.devices, within)]
    taken = plan.shares or (1,) * plan.replicas
    rates: dict[tuple[str, ...], float] = {}
    for one in (breakdown(step, rank) for rank in step.ranks):
        replica = one.rank // within
        rate = taken[replica] / max(one.kinds["computing"], 1e-9)
        rates[alike[replica]] = min(rates.get(alike[replica], rate), rate)
    least = min(rates.values())
    return tuple(float(f"{rates[kind] / least:.2g}") for kind in alike)


def works_of(traced: Trace, prices: Prices) -> list[Work]:
    """Return a rank's first step and a later step, from which the rank's memory is computed."""
    return [with_inside(work, prices.inside) for work in (traced.first, traced.step)]


def memory_of(traced: Trace, prices: Prices, cap: int | None) -> MemoryEstimate:
    """Return the memory that a rank needs in its first step or in a later step, whichever is larger."""
    device = prices.machine.devices[traced.step.rank]
    works = works_of(traced, prices)
    capacity = device.memory if cap is None else min(cap, device.memory or cap)
    peak = max((memory_curve(work).peak for work in works), key=lambda peak: peak.bytes)
    host = max(memory_curve(work, on_host=True).peak.bytes for work in works)
    if traced.step.kind == "cpu":  # on a CPU, only memory that operators allocate counts
        spread, reserved = FIGURES["allocated"].spread, peak.bytes
        total = Range(reserved, reserved / spread, reserved * spread)
    else:
        reserved = reserved_on(works, device.part, capacity)
        taken = device_total(reserved, traced.step)
        total = Range(taken.bytes, taken.low, taken.high)
    return MemoryEstimate(traced.step.rank, total, peak.bytes, peak.split, reserved, host, capacity)
