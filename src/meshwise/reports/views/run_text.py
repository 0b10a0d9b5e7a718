"""Show a run's summary, a list of runs, or a comparison.

The summary has metrics, throughput, time and what to type next. `meshwise report` shows where a step's time went.
The comparison has the verdict, a row for each kind of time, and figures of the runs as a whole.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.console import RenderableType
from rich.text import Text

from meshwise.records.folder import BEST
from meshwise.records.metrics import Best
from meshwise.records.run_list import RunEntry
from meshwise.reports.compare_runs import Figure, RunComparison, TimeDifference, clearly, signed
from meshwise.reports.spans import KINDS
from meshwise.reports.views.live_progress import memory_text
from meshwise.reports.views.report_text import SPREAD
from meshwise.spec.units import bytes_text, count_text, percent_text, plural, rate_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, style_of
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import Bar, Cell, columns_lines, table_lines


@dataclass(frozen=True)
class WholeRun:
    """All sessions of a resumed run together.

    steps: the number of steps. A step that was repeated counts once.
    seconds: the wall time of all sessions.
    """

    sessions: int
    epochs: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class RunSummary:
    """What a run did. For a resumed run, this is what its newest session did. In JSON (`json_value`), a non-finite
    metric is null.

    status: "finished" or "stopped".
    seconds: the total wall time.
    train_seconds: the wall time of training and evaluating.
    phases: the seconds of each phase, one mapping per rank. "communication" is the part that did not overlap with
        computing.
    memory: the peak bytes of each rank, or None if unknown.
    folder: the folder of the run's records, or "" if none are kept.
    verdict: what limited the run.
    best: the best evaluation, if the job defines one. Its parameters are in best.safetensors.
    whole: all sessions of a resumed run together.
    """

    job: str
    plan: str
    devices: tuple[str, ...]
    status: str
    epochs: int
    steps: int
    samples: int
    seconds: float
    train_seconds: float
    samples_per_second: float
    metrics: Mapping[str, float]
    phases: tuple[Mapping[str, float], ...]
    memory: tuple[int | None, ...]
    folder: str
    notes: tuple[str, ...]
    verdict: str = ""
    best: Best | None = None
    whole: WholeRun | None = None


OTHER = "other"
BLOCKS = " ▏▎▍▌▋▊▉█"
BAR, LEAST_BAR, MOST_BAR = " ", 8, 24


def summary_text(summary: RunSummary, width: int | None) -> RenderableType:
    """Draw the summary of a run.

    width: the largest number of characters in a line. The default is the width of the console.
    """
    return Drawn(lambda screen: _summary_lines(summary, screen), width)


def _summary_lines(s: RunSummary, screen: Screen) -> list[Text]:
    table = [*_time_table(s, screen), Text()] if _rows(s) else []
    lines = [*_head(s), Text(), *table, *_end(s)]
    for line in lines:  # let all lines wrap except those of tables: `Drawn` does not wrap a line with None
        line.no_wrap = bool(line.no_wrap)
    return lines


def metric_text(name: str, value: float) -> str:
    """Format a metric with its name, such as `accuracy 96.62 %`. Metrics other than accuracy have four decimals."""
    return f"{name} {metric_value(name, value)}"


def metric_value(name: str, value: float) -> str:
    """Format the value of a metric. An accuracy is written as `96.62 %`, any other metric with four decimals."""
    return percent_text(value, 2) if name == "accuracy" else f"{value:.4f}"


def _head(s: RunSummary) -> list[Text]:
    done = f"{plural(s.epochs, 'epoch')} and {plural(s.steps, 'step')}"
    since = " more" if s.whole else ""
    lines = [Text(f"{s.job} {s.status} after {done}{since} in {seconds_text(s.seconds)}", style="bold")]
    if s.whole:
        whole = f"{plural(s.whole.epochs, 'epoch')} and {plural(s.whole.steps, 'step')} in {s.whole.sessions} sessions"
        lines.append(Text(f"in all      {whole}, {seconds_text(s.whole.seconds)}"))
    facts = [metric_text(name, value) for name, value in s.metrics.items()]
    if facts:
        lines.append(Text("test        " + "   ".join(facts)))
    if s.best is not None:
        lines.append(Text(f"best        {metric_text(s.best.metric, s.best.value)} in epoch {s.best.epoch}"))
    lines.append(
        Text(f"throughput  {count_text(s.samples_per_second)} samples/s on {plural(len(s.devices), 'device')}")
    )
    if any(size is not None for size in s.memory):
        lines.append(Text(f"memory      peak {memory_text(s.memory)}"))
    return lines


def _end(s: RunSummary) -> list[Text]:
    lines = [Text(s.verdict)] if s.verdict else []
    lines += [Text(note) for note in s.notes]
    if not s.folder:
        return lines
    # These lines are printed with soft_wrap, which never cuts paths, so paths can be copied.
    lines.append(Text(f"records     {s.folder}"))
    lines.append(Text(f"more with   meshwise report {shlex.quote(s.folder)}"))
    if s.best is not None:
        lines.append(Text(f"best        {s.folder.rstrip('/')}/{BEST}"))
    if s.status == "stopped":
        return [*lines, Text(f"go on with  meshwise run --resume {shlex.quote(s.folder)}")]
    return [*lines, Text(f"weights     {s.folder.rstrip('/')}/weights.safetensors")]


def _rows(s: RunSummary) -> dict[str, list[float]]:
    """Return the seconds of each phase on each rank. Phases that took no time on any rank are left out."""
    rows = {kind: [phases.get(kind, 0.0) for phases in s.phases] for kind in KINDS}
    rows[OTHER] = [max(0.0, s.train_seconds - sum(phases.values())) for phases in s.phases]
    return {kind: row for kind, row in rows.items() if any(row)}


def _time_table(s: RunSummary, screen: Screen) -> list[Text]:
    """Return a table of the time of each phase: the mean over ranks, and the share with a bar."""
    rows, ranks = _rows(s), len(s.phases)
    rows["total"] = [sum(of_rank) for of_rank in zip(*rows.values(), strict=True)]
    total, several = fmean(rows["total"]), f", mean of {ranks} ranks" if ranks > 1 else ""
    columns = {title: list[Cell]() for title in ("", "time", "share", BAR, *(SPREAD if several else ()))}
    for kind, row in rows.items():
        mean, style = fmean(row), "dim" if kind == "total" else ""
        draw = partial(_bar_text, 0.0 if kind == "total" else mean / total)
        picked = [seconds_text(pick(row)) for pick in SPREAD.values()]
        texts = [Text(text, style) for text in (kind, seconds_text(mean), percent_text(mean / total), *picked)]
        cells: list[Cell] = [*texts[:3], Bar(draw, LEAST_BAR, MOST_BAR), *texts[3:]]
        for column, cell in zip(columns.values(), cells, strict=False):
            column.append(cell)
    table = columns_lines(columns, screen.width, left=("", BAR), less_needed=(BAR, *SPREAD))
    lines = [Text(f"Where the time went{several}", style="bold"), *table]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    if "communication" in rows:
        note = "communication: from the last rank's arrival on, not overlapped with computing"
        lines.append(Text(note, style="dim"))
    return lines


def _bar_text(share: float, width: int) -> Text:
    eighths = round(share * width * 8)
    blocks = BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8]
    return Text(f"{blocks.strip():{width}}")


COLOURS = {"failed": "red", "unreadable": "red", "running": "green", "stopped": "yellow", "queued": "cyan"}
HINTS = (
    "meshwise logs RUN    what it printed, and what the launcher showed",
    "meshwise stop RUN    save and end it for good, queued or running",
    "meshwise submit RUN  send a stopped or failed one again",
)
"""Hints that are shown below the table if some of its runs were submitted to Slurm."""


def run_list_text(entries: Sequence[RunEntry], folder: Path) -> RenderableType:
    """Draw a table with a row for each run, the oldest first."""
    return Drawn(lambda screen: _list_lines(entries, folder, screen))


def _list_lines(entries: Sequence[RunEntry], folder: Path, screen: Screen) -> list[Text]:
    if not entries:
        return screen.wrap(Text(f"No such run in {folder}/. `meshwise run` makes one; --in DIR lists another folder."))
    titles, rows = (
        ["run", "job", "plan", "status", "metric", "last", "best", "time", "size"],
        list(map(_run_row, entries)),
    )
    sent = any(entry.scheduler_job for entry in entries)
    if sent:
        pods = any("/" in entry.scheduler_job for entry in entries)  # of Kubernetes: kind, namespace/name
        titles.insert(3, "cluster" if pods else "Slurm")
        for row, entry in zip(rows, entries, strict=True):
            row.insert(3, f"{entry.scheduler_job} {entry.partition}".rstrip())
    table = table_lines(titles, rows, screen.table_width, left=(0, 1, 2, 3, 4, *([5] if sent else [])))
    total = f"{plural(len(entries), 'run')}, {bytes_text(sum(entry.size for entry in entries))}"
    hints = [Text(line, "dim") for line in HINTS] if sent else []
    return [*table, Text(), *hints, Text(total, "dim")]


def _run_row(entry: RunEntry) -> list[str | Text]:
    values = ["" if value is None else metric_value(entry.metric, value) for value in (entry.last, entry.best)]
    time = "" if entry.seconds is None else seconds_text(entry.seconds)
    times = f", {len(entry.attempts)} attempts" if len(entry.attempts) > 1 else ""
    queue = f", {entry.queue}" if entry.queue else ""
    status = Text(f"{entry.status}{queue}{times}", COLOURS.get(entry.status, ""))
    job = entry.job if len(entry.job) <= 30 else f"…{entry.job[-29:]}"
    args = entry.args if len(entry.args) <= 30 else f"{entry.args[:29]}…"
    what = f"{job} {args}".rstrip()
    return [entry.name, what, entry.plan, status, entry.metric, *values, time, bytes_text(entry.size)]


WRITE: Mapping[str, Callable[[float], str]] = {
    "share": percent_text,
    "samples/s": lambda rate: f"{rate_text(rate)} samples/s",
    "bytes": bytes_text,
    "seconds": seconds_text,
    "metric": lambda value: f"{value:.6g}",
}
"""For each unit of a figure, the function that formats a value."""
CLEAR_STYLES = {True: "bold red", False: "bold green"}


def run_comparison_text(comparison: RunComparison, width: int | None = None) -> RenderableType:
    """Draw the comparison."""
    return Drawn(lambda screen: _comparison_lines(comparison, screen), width)


def _comparison_lines(c: RunComparison, screen: Screen) -> list[Text]:
    runs = [
        Text(f"{letter}  {name} · {plural(ranks, 'rank')}, {plural(steps, 'step')}")
        for letter, name, ranks, steps in zip("AB", (c.first, c.second), c.ranks, c.steps, strict=True)
    ]
    steps, figures = [], []
    if c.step is not None:
        rows = list(map(_time_row, [*c.kinds, c.step]))
        steps = table_lines(["a step", "A", "B", "B - A", "B / A", "95 %", ""], rows, screen.table_width)
    if c.figures:
        figures = table_lines(["the run", "A", "B", "B - A"], [_figure_row(f) for f in c.figures], screen.table_width)
    notes = screen.wrap(*(Text(note, "yellow") for note in c.notes))
    differs = [Text("differs in: " + ", ".join(c.differs))] if c.differs else []
    return spaced([screen.wrap(*runs, *differs, Text(c.verdict, "bold")), steps, figures, notes], None)


def _time_row(d: TimeDifference) -> list[Cell]:
    """Return the cells of a row: kind, both medians, difference, ratio and its interval, "clear" or "within noise"."""
    name = Text(f"the {d.kind}", "bold")
    if d.kind in MARKS:
        name = Text(MARKS[d.kind].mark, style_of(d.kind)).append(f" {MARKS[d.kind].word}", "default")
    style = CLEAR_STYLES[d.difference > 0] if d.clear else "dim"
    interval = "" if d.low is None or d.high is None else f"{_ratio(d.low)} to {_ratio(d.high)}"
    ratio = "" if d.ratio is None else _ratio(d.ratio)
    cells = [signed(d.difference), ratio, interval, clearly(d)]
    return [name, _time(d.first), _time(d.second), *(Text(cell, style) for cell in cells)]


def _ratio(ratio: float) -> str:
    """Format a ratio with four digits, or with more if it is at least 10,000."""
    return count_text(ratio) if ratio >= 1000 else f"{ratio:.{3 if ratio < 10 else 2 if ratio < 100 else 1}f}"


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "–"


def _figure_row(figure: Figure) -> list[str]:
    """Return the cells of a row: the figure's name, its values in the two runs, and the change."""
    a, b = figure.first, figure.second
    change = ""
    if a is not None and b is not None:
        if figure.unit == "share":
            change = f"{round(100 * (b - a)):+d} points"
        elif a > 0:
            change = f"{round(100 * (b / a - 1)):+,d} %"
    return [figure.name, _value(a, figure.unit), _value(b, figure.unit), change]


def _value(value: float | None, unit: str) -> str:
    return "unknown" if value is None else WRITE[unit](value)
