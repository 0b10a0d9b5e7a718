"""Choose the few steps that are shown span by span.

A window also shows how each rank spent each moment of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwise.reports.arrivals import Arrivals, Whole, attribution_of, session_of
from meshwise.reports.run_report import Bar, StepTimes, StepWindow
from meshwise.reports.spans import KIND, KINDS, LANES, Spans, Timeline
from meshwise.reports.step_table import StepTable
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text, seconds_text

MOST_BARS = 900
"""A window gets fewer steps if it would show more bars.
It has at least one step, and all steps that the user chose."""
WINDOW_STEPS = 5


def step_windows(timeline: Timeline, table: StepTable, steps: tuple[int, int] | None) -> list[StepWindow]:
    """Return the steps to show in detail: the given `steps`, or a few typical, slowest, first and last steps."""
    rows = np.flatnonzero(table.trained)
    if steps is not None:
        inside = rows[(table.step[rows] >= steps[0]) & (table.step[rows] <= steps[1])]
        if not len(inside):
            known = f"{table.step[rows].min()} to {table.step[rows].max()}" if len(rows) else "none"
            raise UsageError(f"--steps {steps[0]}:{steps[1]}: the run has no steps in this range. It has {known}.")
        return [_window("chosen", timeline, table, inside)]
    if table.present[rows].all(axis=1).any():  # during a run, use only steps that all ranks have written
        rows = rows[table.present[rows].all(axis=1)]
    if not len(rows):
        return []
    many = max(1, min(WINDOW_STEPS, MOST_BARS * len(rows) // max(len(timeline.spans), 1)))
    if len(rows) <= many:
        return [_window("all", timeline, table, rows)]
    seconds = table.step_seconds()[rows]
    steady = np.flatnonzero(table.steady[rows])
    typical = steady[np.abs(seconds[steady] - np.median(seconds[steady])).argmin()]
    slowest = steady[seconds[steady].argmax()]
    starts = {"typical": typical - many // 2, "slowest": slowest - many // 2, "first": 0, "last": len(rows) - many}
    usual = {"typical": float(seconds[typical])}
    return [
        _window(name, timeline, table, rows[max(0, min(at, len(rows) - many)) :][:many], usual.get(name))
        for name, at in starts.items()
    ]


def _window(name: str, timeline: Timeline, table: StepTable, rows: Whole, usual: float | None = None) -> StepWindow:
    """Build the window of the steps in `rows`, which are row numbers of the step table."""
    spans = timeline.of_steps(int(table.step[rows].min()), int(table.step[rows].max()))
    spans = spans[np.isin(session_of(spans["start"], timeline.sessions), table.session[rows])]
    usual = float(np.median(table.step_seconds()[table.trained])) if usual is None else usual
    return window_of(name, spans, timeline.names, table.arrivals, usual)


def window_of(name: str, spans: Spans, names: Sequence[str], arrivals: Arrivals, usual: float = 0.0) -> StepWindow:
    """Build the window of the steps of these spans."""
    start, end = int(spans["start"].min()), int(spans["end"].max())
    steps = [_times(spans[spans["step"] == step], start) for step in np.unique(spans["step"])]
    return StepWindow(
        name,
        first_step=steps[0].step,
        last_step=steps[-1].step,
        start=start / 1e9,
        seconds=(end - start) / 1e9,
        bars=_bars(spans, names, arrivals, start),
        attributed=list(_attributed(spans, arrivals, start)),
        steps=steps,
        usual_step=min(steps, key=lambda times: abs(times.seconds - usual)).step,
    )


def _times(spans: Spans, origin: int) -> StepTimes:
    start, end = int(spans["start"].min()), int(spans["end"].max())
    return StepTimes(int(spans["step"][0]), (start - origin) / 1e9, (end - start) / 1e9)


def _bars(spans: Spans, names: Sequence[str], arrivals: Arrivals, origin: int) -> list[Bar]:
    """Return a bar for each span, then a bar for each time in which a rank waits for another rank in a collective."""
    until = arrivals.waits_until(spans).tolist()
    bars, waits = [], []
    for s, split in zip(spans, until, strict=True):
        start, end, name = int(s["start"]) - origin, int(s["end"]) - origin, names[s["name"]]
        bars.append(_bar(s, KINDS[s["kind"]], name, split - origin, end, int(s["bytes"])))
        if split - origin > start:
            waits.append(_bar(s, "waiting", name, start, split - origin, found=True))
    return bars + waits


def _bar(s: np.void, kind: str, name: str, start: int, end: int, size: int = 0, *, found: bool = False) -> Bar:
    facts = [bytes_text(size)] if size else []
    facts += [f"collective {s['collective']}"] if s["collective"] >= 0 else []
    text = ", ".join([_time_text(start, end), *facts])
    place = (int(s["rank"]), LANES[s["lane"]], kind, name, int(s["step"]))
    return Bar(*place, start / 1e9, (end - start) / 1e9, size, int(s["collective"]), found, text)


def _attributed(spans: Spans, arrivals: Arrivals, origin: int) -> Iterator[Bar]:
    """Yield bars that divide the time of each rank into kinds of time without overlap (see arrivals.py)."""
    for rank in np.unique(spans["rank"]).tolist():
        mine = spans[spans["rank"] == rank]
        found = attribution_of(mine, arrivals)
        step = mine["step"][np.searchsorted(mine["start"], found.start, side="right") - 1]
        cut = np.flatnonzero((np.diff(found.kind, prepend=-1) != 0) | (np.diff(step, prepend=-1) != 0))
        starts = found.start[cut] - origin
        ends = np.append(starts[1:], found.start[-1:] + found.length[-1:] - origin)
        for at, start, end in zip(cut.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if found.kind[at] != KIND["idle"] and end > start:
                times = (start / 1e9, (end - start) / 1e9)
                kind, text = KINDS[found.kind[at]], _time_text(start, end)
                yield Bar(rank, "main", kind, "", int(step[at]), *times, found=True, text=text)


def _time_text(start: int, end: int) -> str:
    """Describe an interval given in ns, such as `8.0 ms from 24 ms`."""
    return f"{seconds_text((end - start) / 1e9)} from {seconds_text(start / 1e9)}"
