"""Show a run's summary: metrics, throughput, time, what to type next.

Not covered: where the time of each step went, which `meshwise report` tells from the spans in the run folder.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean, median

from rich.console import RenderableType
from rich.text import Text

from meshwise.records.folder import BEST
from meshwise.spec.units import bytes_text, count_text, percent_text, plural, seconds_text
from meshwise.terminal.screen import Drawn, Screen
from meshwise.terminal.table import Bar, Cell, columns_lines, width_of
from meshwise.timeline.run_summary import RunSummary
from meshwise.timeline.spans import KINDS

OTHER = "other"
BLOCKS = " ▏▎▍▌▋▊▉█"
MOST_RANK_COLUMNS, MOST_LONG_TITLES = 8, 4
BAR, LEAST_BAR, MOST_BAR = " ", 8, 24
SPREAD: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "median": median, "max": max}


def summary_text(summary: RunSummary, width: int | None) -> RenderableType:
    """Draw the summary of a run.

    width: the largest number of characters in a line. The default is the width of the console.
    """
    return Drawn(lambda screen: _lines(summary, screen), width)


def _lines(s: RunSummary, screen: Screen) -> list[Text]:
    table = [*_time_table(s, screen), Text()] if _rows(s) else []
    lines = [*_head(s), Text(), *table, *_end(s)]
    for line in lines:  # only tables are never wrapped
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
        lines.append(Text(f"memory      peak {_memory_text(s.memory)}"))
    return lines


def _memory_text(memory: Sequence[int | None]) -> str:
    if len(memory) <= 4:
        return ", ".join("unknown" if size is None else bytes_text(size) for size in memory)
    known = [size for size in memory if size is not None]
    return f"{bytes_text(min(known))} to {bytes_text(max(known))}"


def _end(s: RunSummary) -> list[Text]:
    lines = [Text(s.verdict)] if s.verdict else []
    lines += [Text(note) for note in s.notes]
    if not s.folder:
        return lines
    # Paths are never cut where they are printed with soft_wrap, so that they can be copied.
    lines.append(Text(f"records     {s.folder}"))
    lines.append(Text(f"more with   meshwise report {shlex.quote(s.folder)}"))
    if s.best is not None:
        lines.append(Text(f"best        {s.folder.rstrip('/')}/{BEST}"))
    if s.status == "stopped":
        return [*lines, Text(f"go on with  meshwise run --resume {shlex.quote(s.folder)}")]
    return [*lines, Text(f"weights     {s.folder.rstrip('/')}/weights.safetensors")]


def _rows(s: RunSummary) -> dict[str, list[float]]:
    """Return the seconds of each phase on each rank. Phases that took no time on any rank are left out."""
    kinds = [*KINDS, *sorted({kind for phases in s.phases for kind in phases} - {*KINDS})]
    rows = {kind: [phases.get(kind, 0.0) for phases in s.phases] for kind in kinds}
    rows[OTHER] = [max(0.0, s.train_seconds - sum(phases.values())) for phases in s.phases]
    return {kind: row for kind, row in rows.items() if any(row)}


def _time_table(s: RunSummary, screen: Screen) -> list[Text]:
    """Return a table of the time of each phase: the mean over ranks, and the share with a bar."""
    rows, ranks = _rows(s), len(s.phases)
    rows["total"] = [sum(of_rank) for of_rank in zip(*rows.values(), strict=True)]
    unit, write = _in_one_unit(max(rows["total"]))
    total, word = fmean(rows["total"]), "rank " if ranks <= MOST_LONG_TITLES else "r"
    of_ranks = {f"{word}{rank}": itemgetter(rank) for rank in range(ranks) if ranks <= MOST_RANK_COLUMNS}
    several, spread = (f", mean of {ranks} ranks", SPREAD) if ranks > 1 else ("", {})
    for picks in (of_ranks if several else {}, spread, {}):
        columns = {title: list[Cell]() for title in ("", unit, "share", BAR, *picks)}
        for kind, row in rows.items():
            mean, style = fmean(row), "dim" if kind == "total" else ""
            draw = partial(_bar_text, 0.0 if kind == "total" else mean / total, ascii_only=screen.ascii_only)
            texts = [kind, write(mean), percent_text(mean / total), *(write(pick(row)) for pick in picks.values())]
            cells: list[Cell] = [Text(text, style) for text in texts]
            cells.insert(3, Bar(draw, LEAST_BAR, MOST_BAR))
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
        table = columns_lines(columns, screen.width, left=("", BAR), less_needed=(BAR,), gaps=(2, 1))
        if width_of(table) <= screen.width and len(table) == 1 + len(rows) and (picks or not spread):
            break
    lines = [Text(f"Where the time went{several}", style="bold"), *table]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    if "communication" in rows:
        note = "communication: from the last rank's arrival on, not overlapped with computing"
        lines.append(Text(note, style="dim"))
    return lines


def _bar_text(share: float, width: int, ascii_only: bool) -> Text:
    eighths = round(share * width * 8)
    blocks = BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8]
    return Text(f"{'#' * round(share * width) if ascii_only else blocks.strip():{width}}")


def _in_one_unit(most: float) -> tuple[str, Callable[[float], str]]:
    """Choose the unit in which a time of `most` seconds is easy to read."""
    units = (("ms", 1e3, 1.0), ("seconds", 1.0, 600.0), ("minutes", 1 / 60, 10800.0), ("hours", 1 / 3600, math.inf))
    unit, factor = next((unit, factor) for unit, factor, limit in units if most < limit)
    digits = 3 if most * factor < 9.9995 else 2 if most * factor < 99.995 else 1
    return unit, lambda seconds: f"{seconds * factor:,.{digits}f}"
