"""Compute the report of a timeline.

Only this module computes the report's numbers; views show them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np

from meshwise.records.attempts import attempt_text, attempts_of, lost_texts
from meshwise.records.run_list import fields_of
from meshwise.reports.arrivals import ABSENT, OUTSIDE, Arrivals, session_of
from meshwise.reports.expected import reconciled
from meshwise.reports.findings import RunFacts, findings_of, verdict_of
from meshwise.reports.pipeline_stages import pipeline_report
from meshwise.reports.run_report import (
    COMPUTING,
    MEMORY,
    NOT_MEMORY,
    OUTSIDE_STEPS,
    AttemptReport,
    ClockReport,
    CollectiveReport,
    CounterSeries,
    GoodputPart,
    RankReport,
    Report,
    Series,
)
from meshwise.reports.spans import KIND, KINDS, NO_PHASE, Counter, Rank, Timeline, operation_and_source
from meshwise.reports.step_table import HIDDEN, OF_STEP, StepTable, decisive, step_table_of
from meshwise.reports.step_windows import step_windows
from meshwise.spec.bandwidth import FACTORS, bus_bandwidth

USEFUL = [KIND[kind] for kind in COMPUTING]
WAITING = {
    "data": KIND["data"],
    "transfer": KIND["transfer"],
    "communication": KIND["communication"],
    "stragglers": KIND["waiting"],
    "between phases": KIND["idle"],
}


def goodput_of(timeline: Timeline, table: StepTable) -> tuple[float, list[GoodputPart], list[GoodputPart]]:
    """Return the wall time of a run in seconds, the parts of the wall time, and the parts of the time spent waiting."""
    alive = sum(session.ended - session.began for session in timeline.sessions) / 1e9
    queued = sum(attempt.waited or 0.0 for attempt in attempts_of(timeline.facts))
    wall = alive + queued
    counted = table.seconds[table.counted][:, :, :OUTSIDE].sum(axis=0)  # shape: (ranks, kinds)
    ranks = max(len(table.ranks), 1)
    of_kind = counted.sum(axis=0) / ranks
    waiting = {name: float(of_kind[code]) for name, code in WAITING.items()}
    starting, lost = _around(timeline, table, alive)
    seconds = {
        "useful": float(of_kind[USEFUL].sum()),
        "evaluation": float(of_kind[KIND["evaluate"]]),
        "saving": float(of_kind[KIND["checkpoint"]]),
        "waiting": sum(waiting.values()),
        "starting": starting,
        "lost": lost,
    } | ({"queued": queued} if queued else {})
    if table.arrivals.of_stages:
        waiting = {"other stages" if name == "stragglers" else name: value for name, value in waiting.items()}
    return wall, _parts(seconds, wall), _parts(waiting, wall)


def _parts(seconds: dict[str, float], wall: float) -> list[GoodputPart]:
    return [GoodputPart(name, value, value / wall if wall else 0.0) for name, value in seconds.items()]


def _around(timeline: Timeline, table: StepTable, wall: float) -> tuple[float, float]:
    """Return the seconds of two parts of the wall time, (starting, lost), each as the mean over the ranks."""
    starting = float(table.seconds[(table.step == 0) & ~table.lost][:, :, :OUTSIDE].sum())
    lost = float(table.seconds[table.lost][:, :, :OUTSIDE].sum())
    if not len(table.ranks):
        return wall, 0.0
    for rank in table.ranks.tolist():
        spans = timeline.of_rank(rank)
        spans = spans[spans["end"] > spans["start"]]  # an empty span does not count as first or last work
        session = session_of(spans["start"], timeline.sessions)
        for number, facts in enumerate(timeline.sessions):
            inside = spans[session == number]
            last = min(int(inside["end"].max()), facts.ended) if len(inside) else facts.ended
            starting += (int(inside["start"].min(initial=facts.ended)) - facts.began) / 1e9
            tail = (facts.ended - last) / 1e9
            if facts.status == "failed":
                lost += tail
            else:
                starting += tail
    return starting / len(table.ranks), lost / len(table.ranks)


POINTS = 300
"""The largest number of points in a series."""


def report_of(
    timeline: Timeline, folder: str = "", steps: tuple[int, int] | None = None, table: StepTable | None = None
) -> Report:
    """Build the report of a timeline. `folder` is the folder of the run. `steps` are the first and the last step to
    show in detail. Raises UsageError if the run does not have these steps. `table` is the step table of the timeline,
    if the caller has already built it."""
    table = table or step_table_of(timeline)
    wall, goodput, waiting = goodput_of(timeline, table)
    collectives = _collectives(timeline, table.arrivals)
    pipeline = pipeline_report(timeline.spans, timeline.names, table.step[table.steady])
    error = max((clock.error for clock in timeline.clocks), default=0.0) / 1e9
    findings = findings_of(
        table,
        error,
        goodput,
        collectives,
        timeline.counters,
        RunFacts(
            program=str(timeline.facts.get("program", "job")),
            pipeline=pipeline,
            shares=_shares(timeline),
        ),
    )
    seconds, kinds = table.step_seconds()[table.trained], table.kind_seconds()[table.counted].sum(axis=0)
    status = timeline.sessions[-1].status if timeline.sessions else str(timeline.facts.get("status", "unknown"))
    ranks = [_rank(facts, timeline, table) for facts in timeline.ranks]
    predicted, not_shown = reconciled(timeline.facts, table, ranks)
    return Report(
        title=str(timeline.facts.get("job", folder)),
        status=status,
        source=timeline.source,
        folder=folder,
        facts=timeline.facts,
        about=_about(timeline.facts),
        headline="The run failed." if status == "failed" else findings[0].headline if findings else "",
        verdict=_verdict(status, timeline, verdict_of(findings)),
        findings=findings,
        missing=[*timeline.missing, *not_shown],
        steps=len(seconds),
        step_seconds=float(np.median(seconds)) if len(seconds) else 0.0,
        step_seconds_p95=float(np.percentile(seconds, 95)) if len(seconds) else 0.0,
        samples_per_second=_throughput(timeline, float(seconds.sum())),
        wall_seconds=wall,
        goodput=goodput,
        waiting=waiting,
        kinds={kind: float(kinds[code]) for code, kind in enumerate(KINDS)},
        ranks=ranks,
        clocks=[ClockReport(c.rank, c.offset / 1e9, c.drift, c.error / 1e9, c.samples) for c in timeline.clocks],
        error_seconds=error,
        collectives=collectives,
        series=_series(timeline, table),
        counters=[_thinned(counter) for counter in timeline.counters],
        views=step_windows(timeline, table, steps),
        pipeline=pipeline,
        predicted=predicted,
        attempts=attempt_reports(timeline.facts),
    )


def _shares(timeline: Timeline) -> tuple[float, ...]:
    """Return the proportions in which the ranks divide a batch. Empty if unknown, or if ranks work on the same
    samples."""
    plan = fields_of(str(timeline.facts.get("plan") or ""))
    if not plan or timeline.facts.get("program") == "plain" or {"pipeline", "context", "tensor"} & plan.keys():
        return ()
    given = plan.get("shares", "").strip("()")
    return tuple(map(float, given.split(","))) if given else (1.0,) * len(timeline.ranks)


def _about(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the known facts about what was run, such as plan, command and last metric."""
    names = ("args", "plan", "divided", "command", "commit", "metric", "best")
    found = {name: str(facts.get(name) or "") for name in names}
    found["lost"] = " ".join(lost_texts(facts))
    return {name: text for name, text in found.items() if text}


def _verdict(status: str, timeline: Timeline, verdict: str) -> str:
    if status == "failed":
        lines = str(timeline.facts.get("error") or "a worker failed").strip().splitlines()
        said = [line for line in lines if not line.startswith(("Traceback ", " "))]  # skip the traceback frames
        error = textwrap.shorten((said or lines)[0], 160)
        return f"The run failed: {error.rstrip('.')}. Until then: {verdict}"
    return verdict


def _throughput(timeline: Timeline, seconds: float) -> float | None:
    """Return the training throughput in samples of global batches per second, or None if no rank counted samples."""
    counter = timeline.counter("samples")
    if counter is None or seconds <= 0:
        return None
    done = np.diff(counter.value, prepend=0.0)
    return float(np.where(done >= 0, done, counter.value).sum()) / seconds


def _rank(facts: Rank, timeline: Timeline, table: StepTable) -> RankReport:
    column = table.ranks == facts.rank  # all False for a rank without spans
    total = table.seconds[table.counted][:, column].sum(axis=(0, 1))
    done = table.trained & table.present[:, column].any(axis=1)
    steps = table.seconds[done][:, column][:, :, OF_STEP].sum(axis=(1, 2))
    seconds = {kind: float(total[code]) for code, kind in enumerate(KINDS)}
    in_steps = {kind: value for kind, value in seconds.items() if kind not in OUTSIDE_STEPS}
    whole = sum(in_steps.values())
    points = table.sync_points
    memory, by_phase = _memory(timeline, facts.rank)
    return RankReport(
        rank=facts.rank,
        device=facts.device,
        host=facts.host,
        steps=len(steps),
        seconds=seconds,
        step_shares={kind: value / whole for kind, value in in_steps.items()} if whole else {},
        hidden_seconds=float(total[HIDDEN]),
        step_seconds=float(np.median(steps)) if len(steps) else 0.0,
        last_steps=int((points.rank[decisive(points)] == facts.rank).sum()),
        last_arrivals=int((points.rank == facts.rank).sum()),
        sync_points=len(points.rank),
        straggler_seconds=float(points.cost[points.rank == facts.rank].sum()),
        peak_memory=next((memory[name] for name in (*MEMORY, *memory) if name in memory), None),
        memory=memory,
        memory_by_phase=by_phase,
        spans=len(timeline.of_rank(facts.rank)),
        complete=facts.complete,
        dropped=facts.dropped,
        overhead_seconds=facts.overhead_seconds,
    )


def _memory(timeline: Timeline, rank: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the largest value of each memory counter of a rank in bytes, overall and by phase."""
    counters = [c for c in timeline.counters if c.rank == rank and c.name not in NOT_MEMORY]
    peaks = {c.name: float(c.value.max()) for c in counters}
    by_phase = {
        c.name: {KINDS[code]: float(c.value[c.phase == code].max()) for code in np.unique(c.phase) if code != NO_PHASE}
        for c in counters
    }
    return peaks, by_phase


def _collectives(timeline: Timeline, arrivals: Arrivals) -> list[CollectiveReport]:
    """Report the most expensive collectives, grouped by name and size."""
    use = arrivals.complete
    if not use.any() or len(arrivals.ranks) < 2:
        return []
    ended, last = arrivals.end[use].max(axis=1), arrivals.last[use]
    before = np.maximum.accumulate(np.concatenate([[ABSENT], ended[:-1]]))
    takes = np.maximum(ended - np.maximum(last, before), 0) / 1e9
    skews = np.maximum(last - arrivals.arrival[use].min(axis=1), 0) / 1e9
    sizes, names = arrivals.bytes[use], arrivals.name[use]
    reports = []
    for name, size in sorted(set(zip(names.tolist(), sizes.tolist(), strict=True))):
        which = (names == name) & (sizes == size)
        seconds = float(np.median(takes[which]))
        operation, of = operation_and_source(timeline.names[name])
        known = operation in FACTORS and size and seconds > 0
        bus = bus_bandwidth(operation, len(arrivals.ranks), size, seconds) if known else None
        dtype = timeline.dtypes.get((timeline.names[name], size), "")
        share, skew = float(takes[which].sum() / max(takes.sum(), 1e-9)), float(np.median(skews[which]))
        reports.append(CollectiveReport(operation, of, size, int(which.sum()), seconds, skew, share, bus, dtype))
    return sorted(reports, key=lambda report: -report.share)[:12]


def _series(timeline: Timeline, table: StepTable) -> Series:
    rows = np.flatnonzero(table.trained)
    if not len(rows):
        return Series()
    chunks = np.array_split(rows, min(POINTS, len(rows)))
    seconds, kinds = table.step_seconds(), table.kind_seconds()
    counter = timeline.counter("loss")
    loss = dict(zip(counter.step.tolist(), counter.value.tolist(), strict=True)) if counter is not None else {}
    return Series(
        step=[int(table.step[chunk[0]]) for chunk in chunks],
        time=[float(table.start[chunk[0]]) / 1e9 for chunk in chunks],
        seconds=[float(seconds[chunk].mean()) for chunk in chunks],
        kinds={
            kind: [float(kinds[chunk, code].mean()) for chunk in chunks]
            for code, kind in enumerate(KINDS)
            if kinds[rows, code].any()
        },
        loss=[
            next((loss[step] for step in table.step[chunk][::-1].tolist() if step in loss), float("nan"))
            for chunk in chunks
        ],
    )


def _thinned(counter: Counter) -> CounterSeries:
    """Reduce a counter to at most POINTS values, each the largest of several neighboring values."""
    parts = np.array_split(np.arange(len(counter.value)), min(POINTS, len(counter.value)))
    keep = [int(part[counter.value[part].argmax()]) for part in parts]
    return CounterSeries(counter.rank, counter.name, (counter.time[keep] / 1e9).tolist(), counter.value[keep].tolist())


def attempt_reports(facts: Mapping[str, Any]) -> list[AttemptReport]:
    """Report all attempts in the record of a run."""
    reports, free = list[AttemptReport](), math.inf
    for one in attempts_of(facts):
        began = one.began or 0.0
        reports.append(
            AttemptReport(
                number=one.number,
                began=f"{datetime.fromtimestamp(began):%Y-%m-%d %H:%M:%S}",
                launched=one.launched,
                devices=one.devices or 0,
                before=max(0.0, began - free if one.waited is None else one.waited),
                queued=one.waited is not None,
                seconds=max(0.0, (one.ended or began) - began),
                from_step=one.from_step,
                steps_lost=None if one.from_step is None else one.steps_lost or 0,
                status=one.status,
                ended=attempt_text(one),
            )
        )
        free = one.ended or math.inf
    return reports
