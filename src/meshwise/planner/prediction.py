"""Convert a plan's predicted step to a timeline and to stored figures.

The Gantt chart and the report are the same as for a measured run. The stored figures are compared with a run.

The main lane has the phases, the forward and backward of each microbatch, and the receives that a pipeline stage waits
for. The communication lane has the collectives on other streams. The blocks lane has the modules on the main stream.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.planner.estimator import Rehearsed
from meshwise.planner.event_loop import Done
from meshwise.planner.explain import slowest_rank
from meshwise.planner.memory import memory_curve
from meshwise.planner.price import MEASURED
from meshwise.planner.simulate import Step
from meshwise.planner.work import CATEGORIES, MAIN, CollectiveOperation, Copy, Launch
from meshwise.reports.spans import (
    KIND,
    KINDS,
    LANE,
    NO_COLLECTIVE,
    SPAN,
    Rank,
    RunSession,
    Timeline,
    collective_name,
    stage_name,
)
from meshwise.reports.step_table import step_table_of
from meshwise.spec.machine import Machine
from meshwise.spec.prediction import Prediction
from meshwise.spec.units import percent_text

Row = tuple[int, int, int, str, int, int, int, int, int]
"""A row of the table of spans (SPAN), but with the span's name instead of the index of the name."""
OF = {"all-reduce": "gradients", "reduce-scatter": "gradients", "all-gather": "parameters"}
"""The data that each kind of collective usually carries, for names such as `all-gather of parameters`."""


def predicted_timeline(
    step: Step, machine: Machine, stages: Mapping[int, int] | None = None, facts: Mapping[str, Any] | None = None
) -> Timeline:
    """Return a simulated step as a timeline with one step."""
    collectives: dict[Any, int] = {}
    own = {rank: None if stages is None else stages.get(rank) for rank in step.ranks}
    rows = [row for rank, stage in own.items() for row in _rows(step, rank, stage, collectives)]
    names = ("", *dict.fromkeys(row[3] for row in rows if row[3]))
    numbers = {name: number for number, name in enumerate(names)}
    rows.sort(key=lambda row: (row[0], row[5]))
    spans = np.array([(*row[:3], numbers[row[3]], *row[4:]) for row in rows], SPAN)
    ranks = tuple(
        Rank(rank, machine.devices[rank].name, str(machine.devices[rank].host), _ns(step.seconds), True)
        for rank in step.ranks
    )
    session = RunSession(0, _ns(step.seconds), "finished")
    told = {"world": len(machine.devices), **(facts or {})}
    return Timeline(spans, names, ranks=ranks, sessions=(session,), facts=told, source="predicted")


def _rows(step: Step, rank: int, stage: int | None, collectives: dict[Any, int]) -> Iterator[Row]:
    """Yield the spans of a rank."""
    done = step.done[rank]
    main = [one for one in done if one.launch.stream == MAIN and not isinstance(one.launch.what, CollectiveOperation)]
    yield from _phases(rank, main, stage)
    yield from _blocks(rank, main)
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for one in done:
        what = one.launch.what
        if isinstance(what, Copy):
            yield _row(rank, "transfer", "host", "", one, what.size, NO_COLLECTIVE)
        elif isinstance(what, CollectiveOperation):
            own = what.kind, what.ranks
            counts[own] = counts.get(own, 0) + 1
            number = collectives.setdefault((*own, counts[own]), len(collectives))
            yield _communication(rank, one, what, number, main)


def _communication(rank: int, one: Done, what: CollectiveOperation, number: int, main: Sequence[Done]) -> Row:
    """Return the span of a collective."""
    if what.kind in ("send", "receive"):
        name = collective_name(what.kind, "gradients" if one.launch.phase == "backward" else "activations")
        if what.kind == "receive":
            last = bisect_left(main, one.end, key=lambda computed: computed.start) - 1
            free = main[last].end if last >= 0 else 0.0
            if free < one.end:
                waited = replace(one, ready=max(one.ready, free))
                return _row(rank, "communication", "main", name, waited, what.size, NO_COLLECTIVE)
        return _row(rank, "communication", "communication", name, one, what.size, NO_COLLECTIVE)
    lane = "main" if one.launch.stream == MAIN else "communication"
    name = collective_name(what.kind, OF.get(what.kind, ""))
    return _row(rank, "communication", lane, name, one, what.size, number)


def _row(rank: int, kind: str, lane: str, name: str, one: Done, size: int, collective: int) -> Row:
    return rank, KIND[kind], LANE[lane], name, 1, _ns(one.ready), _ns(one.end), size, collective


def _phases(rank: int, main: Sequence[Done], stage: int | None) -> Iterator[Row]:
    """Yield a span for each run of launches in the same phase and microbatch, such as a forward."""
    for (phase, microbatch), run in itertools.groupby(main, operator.attrgetter("launch.phase", "launch.microbatch")):
        name = ""
        if stage is not None and phase in ("forward", "backward"):
            name = stage_name(stage, max(microbatch, 0))
        if phase in KIND:
            yield _span(rank, phase, "main", name, list(run))


def _blocks(rank: int, main: Sequence[Done]) -> Iterator[Row]:
    of = operator.attrgetter("launch.phase", "launch.microbatch", "launch.module")
    for (phase, _, module), run in itertools.groupby(main, of):
        if module and phase in ("forward", "backward"):
            yield _span(rank, phase, "blocks", module, list(run))


def _span(rank: int, kind: str, lane: str, name: str, run: Sequence[Done]) -> Row:
    return rank, KIND[kind], LANE[lane], name, 1, _ns(run[0].start), _ns(run[-1].end), 0, NO_COLLECTIVE


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def prediction(whole: Rehearsed, job: str) -> Prediction:
    """Return what a plan file stores as the prediction for a simulated plan: its memory and times."""
    estimate, machine = whole.estimate, whole.prices.machine
    memory = {"allocated": estimate.memory.allocated} | _held(whole)
    if whole.traces[0].step.kind != "cpu":
        memory |= {"reserved": estimate.memory.reserved, "device": int(estimate.memory.total.value)}
    told = Prediction(job, estimate.samples, machine.name, memory=memory, categories=dict(estimate.memory.categories))
    if whole.step is None or estimate.seconds is None:
        return told
    middle, low, high = estimate.seconds.value, estimate.seconds.low, estimate.seconds.high
    return replace(told, origin=_origin(whole), seconds=middle, low=low, high=high, kinds=_kinds(whole))


def _held(whole: Rehearsed) -> dict[str, int]:
    """Return the peak bytes of parameters, buffers, gradients and optimizer state, and of activations on a GPU."""
    work = next(trace.step for trace in whole.traces if trace.step.rank == whole.estimate.memory.rank)
    curve = memory_curve(work)
    columns = dict(zip(CATEGORIES, curve.by_category.T, strict=True))
    found = {name: int(columns[name].max()) for name in ("parameters", "buffers", "gradients", "optimizer")}
    forwards = [at for at, each in enumerate(work.events) if isinstance(each, Launch) and each.phase == "forward"]
    if work.kind != "cpu" and forwards:
        at = int(np.searchsorted(curve.places, forwards[-1], side="right")) - 1
        found["activations"] = int(curve.total[at]) - sum(int(columns[name][at]) for name in found)
    return {name: size for name, size in found.items() if size}


def timeline_of(whole: Rehearsed, job: str) -> Timeline:
    """Return the predicted step of a simulated plan as a timeline. The time of the step must be known."""
    assert whole.step is not None
    plan = whole.estimate.plan
    stages = {trace.step.rank: at for at, trace in enumerate(whole.traces)} if plan.pipeline > 1 else None
    return predicted_timeline(whole.step, whole.prices.machine, stages, {"job": job, "plan": repr(plan)})


def _kinds(whole: Rehearsed) -> dict[str, float]:
    table = step_table_of(timeline_of(whole, ""))
    seconds = table.kind_seconds()[table.step == 1].sum(axis=0)
    found = {kind: float(value) for kind, value in zip(KINDS, seconds, strict=True) if value > 0}
    before = whole.estimate.seconds.value - sum(found.values()) if whole.estimate.seconds is not None else 0.0
    return found | {"idle": found.get("idle", 0.0) + max(before, 0.0)}  # idle time before the first launch


def _origin(whole: Rehearsed) -> str:
    """Return the sources of the estimated times, such as `catalog 80 %, model 20 %`."""
    assert whole.step is not None
    rank, machine = slowest_rank(whole.step).rank, whole.prices.machine
    shares: dict[str, float] = defaultdict(float)
    for one in whole.step.done[rank]:
        price = whole.prices.of(one.launch.what, rank)
        if price is not None:
            shares[price.origin] += one.end - one.start
    total = sum(shares.values())
    words = {MEASURED: f"{MEASURED} {machine.measured.split(',')[0]}".strip()}
    largest = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{words.get(name, name)} {percent_text(part / total)}" for name, part in largest if part > 0)
