"""Store a plan's predicted times, to compare a run with them.

The kinds of time are those of a report.

Tested in tests/rehearsal/test_prediction.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from meshwise.rehearsal.breakdown import slowest_rank
from meshwise.rehearsal.estimator import Rehearsed
from meshwise.rehearsal.memory import memory_curve
from meshwise.rehearsal.predicted import predicted_timeline
from meshwise.rehearsal.price import MEASURED
from meshwise.rehearsal.work import CATEGORIES, Launch
from meshwise.spec.prediction import Prediction
from meshwise.spec.units import percent_text
from meshwise.timeline.spans import KINDS, Timeline
from meshwise.timeline.step_table import step_table_of


def prediction(whole: Rehearsed, job: str) -> Prediction:
    """Return what a plan file stores as the prediction for a simulated plan: its memory and times.

    job: the name of the job.
    """
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
    """Return the peak bytes of parameters, buffers, gradients and optimizer state, by category."""
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
    return found | {"idle": found.get("idle", 0.0) + max(before, 0.0)}  # until the first launch has come


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
