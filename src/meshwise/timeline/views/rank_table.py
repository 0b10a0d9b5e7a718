"""Show a table of a run's devices, a row each.

A row shows what the time of the device's steps went into, how often it was last, and its memory.

For more than MOST_ROWS devices, the table shows each column's minimum, median and maximum, and devices that stand out.

Tested in tests/timeline/views/test_report_text.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, percent_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, mark_of, style_of
from meshwise.terminal.table import Cell, table_lines, width_of
from meshwise.timeline.run_report import COMPUTING, OUTSIDE_STEPS, RankReport, Report

MOST_ROWS = 8
MOST_OUTLIERS = 4
FOUND = "bold #ff5f00"
LEAST_BAR, MOST_BAR = 10, 60
OF_STEP = tuple(kind for kind in MARKS if kind not in OUTSIDE_STEPS)
# Columns that are left out first where the table is too wide. The first two never are.
LESS_NEEDED = ("last", "cost", "memory", "wait", "comm", "compute")


@dataclass(frozen=True)
class _Column:
    """A column of the table of ranks.

    write: formats a number.
    read: returns the number of a rank, or None if it is unknown.
    """

    write: Callable[[float], str]
    read: Callable[[RankReport], float | None]


COLUMNS: Mapping[str, _Column] = {
    "step": _Column(seconds_text, lambda r: r.step_seconds if r.steps else None),
    "compute": _Column(percent_text, lambda r: sum(r.step_shares[k] for k in COMPUTING) if r.step_shares else None),
    "comm": _Column(percent_text, lambda r: r.step_shares.get("communication")),
    "wait": _Column(percent_text, lambda r: r.step_shares.get("waiting")),
    "last": _Column(lambda times: f"{count_text(times)}×", lambda r: r.last_steps if r.sync_points else None),
    "cost": _Column(seconds_text, lambda r: r.straggler_seconds if r.sync_points else None),
    "memory": _Column(bytes_text, lambda r: r.peak_memory),
}


@dataclass(frozen=True)
class _Row:
    """One row of the table.

    numbers: the number in each column, or None if unknown.
    seconds: seconds by kind of time, which are drawn as a bar. None draws no bar.
    """

    name: Text
    numbers: Mapping[str, float | None]
    seconds: Mapping[str, float] | None

    def cell(self, title: str) -> str:
        value = self.numbers[title]
        return "" if value is None else COLUMNS[title].write(value)


def rank_table(report: Report, width: int, ascii_only: bool) -> list[Text]:
    """Draw the table of ranks, in lines of at most `width` characters. The title row is first. Returns [] if there are
    no ranks."""
    rows = _rows(report)
    if not rows:
        return []
    titles = [title for title in COLUMNS if any(row.cell(title) for row in rows)]
    for left_out in range(len(LESS_NEEDED) + 1):
        kept = [title for title in titles if title not in LESS_NEEDED[:left_out]]
        for gap in (2, 1):
            room = width - width_of(_lines(rows, kept, 0, gap, ascii_only)) - gap
            if room >= (0 if left_out else LEAST_BAR):
                lines = _lines(rows, kept, min(room, MOST_BAR), gap, ascii_only)
                return lines + _left_out([title for title in titles if title not in kept])
    return _lines(rows, kept, 0, 1, ascii_only) + _left_out([title for title in titles if title not in kept])


def _left_out(titles: Sequence[str]) -> list[Text]:
    """Return a line that names the columns which are left out because the table is too wide. The line says that
    `--json` prints them."""
    return [Text(f"--json has {' '.join(titles)}", "dim")] if titles else []


def _lines(rows: Sequence[_Row], titles: Sequence[str], bar: int, gap: int, ascii_only: bool) -> list[Text]:
    """Draw the table as lines of text, with the columns `titles`.

    bar: the width of the bar that shows what the time of a step went into. If it is less than LEAST_BAR, no bar is
        drawn.
    gap: the number of spaces between two columns.
    """
    at = titles.index("step") + 2 if "step" in titles else 1
    cells: list[list[Cell]] = [[row.name, *(row.cell(title) for title in titles)] for row in rows]
    heads = ["rank", *titles]
    if bar >= LEAST_BAR:
        heads.insert(at, "its step")
        for row, line in zip(rows, cells, strict=True):
            line.insert(at, bar_text(row.seconds or {}, bar, ascii_only))
    return table_lines(heads, cells, left=(0, at) if bar >= LEAST_BAR else (0,), gap=gap)


def whole_parts(shares: Sequence[float], whole: int) -> list[int]:
    """Scale the shares to integers that add up to `whole`, rounding by the largest remainders. All are 0 if the shares
    add up to 0."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / total * whole for share in shares]
    parts = [int(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda at: (parts[at] - exact[at], at))
    for at in order[: whole - sum(parts)]:
        parts[at] += 1
    return parts


def bar_text(seconds: Mapping[str, float], width: int, ascii_only: bool) -> Text:
    """Draw the time of a step as a bar of exactly `width` characters. Each kind of time has its own mark and color."""
    bar = Text()
    for kind, many in zip(OF_STEP, whole_parts([seconds.get(kind, 0.0) for kind in OF_STEP], width), strict=True):
        bar.append(mark_of(kind, ascii_only) * many, style_of(kind))
    bar.append(" " * (width - len(bar)))
    return bar


def _rows(report: Report) -> list[_Row]:
    if len(report.ranks) <= MOST_ROWS:
        return [_row(rank, report) for rank in report.ranks]
    numbers = [_numbers(rank) for rank in report.ranks]
    rows = []
    for name, pick in (("min", min), ("median", median), ("max", max)):
        known = {title: [n for of_rank in numbers if (n := of_rank[title]) is not None] for title in COLUMNS}
        picked = {title: pick(values) if values else None for title, values in known.items()}
        rows.append(_Row(Text(name), picked, report.kinds if name == "median" else None))
    return rows + [_row(rank, report) for rank in outliers(report)]


def _row(rank: RankReport, report: Report) -> _Row:
    """Return the row of a rank. Its name includes the host and the device if these differ between ranks."""
    hosts, devices = {r.host for r in report.ranks}, {r.device for r in report.ranks}
    parts = [str(rank.rank), rank.host if len(hosts) > 1 else "", rank.device if len(devices) > 1 else ""]
    found = any(finding.rank == rank.rank for finding in report.findings)
    return _Row(Text(" ".join(filter(None, parts)), FOUND if found else ""), _numbers(rank), rank.seconds)


def outliers(report: Report) -> list[RankReport]:
    """Return the ranks that get a row of their own in the table when there are too many ranks to show. At most
    MOST_OUTLIERS ranks are returned.

    These are the ranks that a finding names, the rank with the most expensive delays, and the rank that uses the most
    memory. The last two are returned only if their value is above 1.5 times the median.
    """
    named = [finding.rank for finding in report.findings if finding.rank is not None]
    for value in (
        {rank.rank: rank.straggler_seconds for rank in report.ranks},
        {rank.rank: rank.peak_memory or 0.0 for rank in report.ranks},
    ):
        most = max(value, key=lambda rank: value[rank])
        if value[most] > 1.5 * median(value.values()):
            named.append(most)
    by_rank = {rank.rank: rank for rank in report.ranks}
    return [by_rank[rank] for rank in dict.fromkeys(named) if rank in by_rank][:MOST_OUTLIERS]


def _numbers(rank: RankReport) -> dict[str, float | None]:
    return {title: column.read(rank) for title, column in COLUMNS.items()}
