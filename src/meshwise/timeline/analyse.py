"""From a timeline to its report: the one place where numbers are made; views only show them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from meshwise.spec.bandwidth import FACTORS, bus_bandwidth
from meshwise.spec.errors import UsageError
from meshwise.timeline.arrivals import ABSENT, Arrivals
from meshwise.timeline.attribution import Whole, attribution_of
from meshwise.timeline.findings import findings_of, verdict_of
from meshwise.timeline.goodput import goodput_of
from meshwise.timeline.run_report import (
    NOT_MEMORY,
    Bar,
    ClockReport,
    CollectiveReport,
    CounterSeries,
    RankReport,
    Report,
    Series,
    StepWindow,
)
from meshwise.timeline.spans import KIND, KINDS, LANES
from meshwise.timeline.step_table import HIDDEN, OF_STEP, StepTable, spans_of_session, step_table_of
from meshwise.timeline.stragglers import cost_by_rank
from meshwise.timeline.timeline import NO_PHASE, Counter, Spans, Timeline

POINTS = 300
"""Most points of a series."""
BARS = 900
"""Most bars of a view that was not asked for."""
VIEW_STEPS = 5


def report_of(
    timeline: Timeline, folder: str = "", steps: tuple[int, int] | None = None, table: StepTable | None = None
) -> Report:
    """The report of a timeline. steps: the first and the last step of a view of one's own. table: its table, if known.

    Raises UsageError when those steps are not there.
    """
    table = table or step_table_of(timeline)
    wall, goodput, waiting = goodput_of(timeline, table)
    collectives = _collectives(timeline, table.arrivals)
    error = max((clock.error for clock in timeline.clocks), default=0.0) / 1e9
    findings = findings_of(table, error, goodput, collectives, timeline.counters)
    seconds = table.step_seconds()[table.trained]
    kinds = table.kind_seconds()[table.counted].sum(axis=0)
    status = timeline.sessions[-1].status if timeline.sessions else str(timeline.facts.get("status", "unknown"))
    return Report(
        title=str(timeline.facts.get("job", folder)),
        status=status,
        source=timeline.source,
        folder=folder,
        facts=timeline.facts,
        verdict=_verdict(status, timeline, verdict_of(findings)),
        findings=findings,
        missing=list(timeline.missing),
        steps=len(seconds),
        step_seconds=float(np.median(seconds)) if len(seconds) else 0.0,
        step_seconds_p95=float(np.percentile(seconds, 95)) if len(seconds) else 0.0,
        samples_per_second=_throughput(timeline, float(seconds.sum())),
        wall_seconds=wall,
        goodput=goodput,
        waiting=waiting,
        kinds={kind: float(kinds[code]) for code, kind in enumerate(KINDS)},
        ranks=_ranks(timeline, table),
        clocks=[ClockReport(c.rank, c.offset / 1e9, c.drift, c.error / 1e9, c.samples) for c in timeline.clocks],
        error_seconds=error,
        collectives=collectives,
        series=_series(timeline, table),
        counters=[_thinned(counter) for counter in timeline.counters],
        views=_views(timeline, table, steps),
    )


def _verdict(status: str, timeline: Timeline, verdict: str) -> str:
    if status == "failed":
        error = textwrap.shorten(str(timeline.facts.get("error") or "a worker failed").strip().splitlines()[0], 160)
        return f"The run failed: {error.rstrip('.')}. Until then: {verdict}"
    return verdict


def _throughput(timeline: Timeline, seconds: float) -> float | None:
    """Samples of the global batches, a second of training: counted on the lowest rank that counted any."""
    for counter in timeline.counters:
        if counter.name == "samples" and seconds > 0:
            done = np.diff(counter.value, prepend=0.0)
            return float(np.where(done >= 0, done, counter.value).sum()) / seconds
    return None


def _ranks(timeline: Timeline, table: StepTable) -> list[RankReport]:
    cost = cost_by_rank(table.sync_points)
    column = {rank: at for at, rank in enumerate(table.ranks.tolist())}
    reports = []
    for facts in timeline.ranks:
        at = column.get(facts.rank)
        total = np.zeros(HIDDEN + 1) if at is None else table.seconds[table.counted, at].sum(axis=0)
        done = table.trained & table.present[:, at] if at is not None else np.zeros(len(table.step), bool)
        steps = table.seconds[done, at][:, OF_STEP].sum(axis=1) if at is not None else np.empty(0)
        memory, by_phase = _memory(timeline, facts.rank)
        reports.append(
            RankReport(
                rank=facts.rank,
                device=facts.device,
                host=facts.host,
                steps=len(steps),
                seconds={kind: float(total[code]) for code, kind in enumerate(KINDS)},
                hidden_seconds=float(total[HIDDEN]),
                step_seconds=float(np.median(steps)) if len(steps) else 0.0,
                last_arrivals=int((table.sync_points.rank == facts.rank).sum()),
                sync_points=len(table.sync_points.rank),
                straggler_seconds=cost.get(facts.rank, 0.0),
                memory=memory,
                memory_by_phase=by_phase,
                spans=len(timeline.of_rank(facts.rank)),
                complete=facts.complete,
                dropped=facts.dropped,
                overhead_seconds=facts.overhead_seconds,
            )
        )
    return reports


def _memory(timeline: Timeline, rank: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Peaks by counter, and by counter and phase at whose end they were."""
    counters = [c for c in timeline.counters if c.rank == rank and c.name not in NOT_MEMORY]
    peaks = {c.name: float(c.value.max()) for c in counters}
    by_phase = {
        c.name: {KINDS[code]: float(c.value[c.phase == code].max()) for code in np.unique(c.phase) if code != NO_PHASE}
        for c in counters
    }
    return peaks, by_phase


def _collectives(timeline: Timeline, arrivals: Arrivals) -> list[CollectiveReport]:
    """By name and size: the time from when each could begin, its last arrival or the end of the one before it."""
    use = arrivals.complete
    if not use.any() or len(arrivals.ranks) < 2:
        return []
    ended, last = arrivals.end[use].max(axis=1), arrivals.last[use]
    before = np.maximum.accumulate(np.concatenate([[ABSENT], ended[:-1]]))
    takes = np.maximum(ended - np.maximum(last, before), 0) / 1e9
    sizes, names = arrivals.bytes[use], arrivals.name[use]
    reports = []
    for name, size in sorted(set(zip(names.tolist(), sizes.tolist(), strict=True))):
        which = (names == name) & (sizes == size)
        seconds = float(np.median(takes[which]))
        text = timeline.names[name]
        known = text in FACTORS and size and seconds > 0
        bus = bus_bandwidth(text, len(arrivals.ranks), size, seconds) if known else None
        reports.append(CollectiveReport(text, size, int(which.sum()), seconds, bus))
    return sorted(reports, key=lambda report: -report.count * report.seconds)[:12]


def _series(timeline: Timeline, table: StepTable) -> Series:
    rows = np.flatnonzero(table.trained)
    if not len(rows):
        return Series()
    chunks = np.array_split(rows, min(POINTS, len(rows)))
    seconds, kinds = table.step_seconds(), table.kind_seconds()
    loss = _loss_by_step(timeline)
    return Series(
        step=[int(table.step[chunk[0]]) for chunk in chunks],
        time=[float(table.start[chunk[0]]) / 1e9 for chunk in chunks],
        seconds=[float(seconds[chunk].mean()) for chunk in chunks],
        kinds={
            kind: [float(kinds[chunk, code].mean()) for chunk in chunks]
            for code, kind in enumerate(KINDS)
            if kinds[rows, code].any()
        },
        loss=[_last_known(loss, table.step[chunk]) for chunk in chunks],
    )


def _loss_by_step(timeline: Timeline) -> dict[int, float]:
    for counter in timeline.counters:
        if counter.name == "loss":
            return dict(zip(counter.step.tolist(), counter.value.tolist(), strict=True))
    return {}


def _last_known(loss: dict[int, float], steps: Whole) -> float:
    return next((loss[step] for step in reversed(steps.tolist()) if step in loss), float("nan"))


def _thinned(counter: Counter) -> CounterSeries:
    """A counter with the largest value of each of at most POINTS stretches: peaks stay."""
    parts = np.array_split(np.arange(len(counter.value)), min(POINTS, len(counter.value)))
    keep = [int(part[counter.value[part].argmax()]) for part in parts]
    return CounterSeries(counter.rank, counter.name, (counter.time[keep] / 1e9).tolist(), counter.value[keep].tolist())


def _views(timeline: Timeline, table: StepTable, steps: tuple[int, int] | None) -> list[StepWindow]:
    rows = np.flatnonzero(table.trained)
    if steps is None and table.present[rows].all(axis=1).any():  # of a run that goes on, what all have written
        rows = rows[table.present[rows].all(axis=1)]
    if steps is not None:
        inside = rows[(table.step[rows] >= steps[0]) & (table.step[rows] <= steps[1])]
        if not len(inside):
            known = f"{table.step[rows].min()} to {table.step[rows].max()}" if len(rows) else "none"
            raise UsageError(f"--steps {steps[0]}:{steps[1]}: the run has no such steps; it has {known}.")
        return [_view("chosen", timeline, table, inside)]
    if not len(rows):
        return []
    many = max(1, min(VIEW_STEPS, BARS * len(rows) // max(len(timeline.spans), 1)))
    if len(rows) <= many:
        return [_view("all", timeline, table, rows)]
    seconds = table.step_seconds()[rows]
    steady = np.flatnonzero(table.steady[rows])
    typical = steady[np.abs(seconds[steady] - np.median(seconds[steady])).argsort(kind="stable")[0]]
    slowest = steady[seconds[steady].argmax()]
    starts = {"typical": typical - many // 2, "slowest": slowest - many // 2, "first": 0, "last": len(rows) - many}
    return [
        _view(name, timeline, table, rows[max(0, min(at, len(rows) - many)) :][:many]) for name, at in starts.items()
    ]


def _view(name: str, timeline: Timeline, table: StepTable, rows: Whole) -> StepWindow:
    """The spans of the steps in these rows of the table, as bars."""
    first, last = int(table.step[rows].min()), int(table.step[rows].max())
    spans = timeline.of_steps(first, last)
    sessions = np.unique(table.session[rows])
    spans = np.concatenate([spans_of_session(spans, timeline, session) for session in sessions.tolist()])
    start = int(spans["start"].min())
    bars = [*_bars(spans, timeline.names, start), *_found_waiting(spans, timeline.names, table, start)]
    end = float(spans["end"].max() - start) / 1e9
    return StepWindow(name, first, last, start / 1e9, end, bars, _blocked(spans, table, start))


def _bars(spans: Spans, names: Sequence[str], origin: int) -> list[Bar]:
    return [
        Bar(
            rank=int(s["rank"]),
            lane=LANES[s["lane"]],
            kind=KINDS[s["kind"]],
            name=names[s["name"]],
            step=int(s["step"]),
            start=(int(s["start"]) - origin) / 1e9,
            seconds=(int(s["end"]) - int(s["start"])) / 1e9,
            bytes=int(s["bytes"]),
            collective=int(s["collective"]),
        )
        for s in spans
    ]


def _found_waiting(spans: Spans, names: Sequence[str], table: StepTable, origin: int) -> list[Bar]:
    """The part of each collective in which its rank waited for the last one."""
    collective = spans[spans["kind"] == KIND["communication"]]
    until = table.arrivals.waits_until(collective)
    waits = collective["start"] < until
    return [
        Bar(
            rank=int(s["rank"]),
            lane=LANES[s["lane"]],
            kind="waiting",
            name=names[s["name"]],
            step=int(s["step"]),
            start=(int(s["start"]) - origin) / 1e9,
            seconds=(int(end) - int(s["start"])) / 1e9,
            bytes=0,
            collective=int(s["collective"]),
            found=True,
        )
        for s, end in zip(collective[waits], until[waits], strict=True)
    ]


def _blocked(spans: Spans, table: StepTable, origin: int) -> list[Bar]:
    """When ranks waited or communicated with nothing to compute meanwhile."""
    bars = []
    for rank in np.unique(spans["rank"]):
        mine = spans[spans["rank"] == rank]
        account = attribution_of(mine, table.arrivals)
        cut = np.flatnonzero(np.diff(account.kind, prepend=-1) != 0)
        ends = np.append(account.start[cut[1:]], account.start[-1:] + account.length[-1:])
        for start, end, kind in zip(
            account.start[cut].tolist(), ends.tolist(), account.kind[cut].tolist(), strict=True
        ):
            if kind in (KIND["waiting"], KIND["communication"]) and end > start:
                step = int(mine["step"][np.searchsorted(mine["start"], start, side="right") - 1])
                times = ((start - origin) / 1e9, (end - start) / 1e9)
                bars.append(Bar(int(rank), "main", KINDS[kind], "", step, *times, bytes=0, collective=-1, found=True))
    return bars
