"""The table of a run's devices, a row each: what its steps went into, how often it was last, and its memory.

Of more devices than MOST_ROWS it shows the least, the median and the most of each column, and those that stand out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.cells import cell_len
from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, fitting, mark_of, style_of
from meshwise.timeline.run_report import MEMORY, RankReport, Report

MOST_ROWS = 8
MOST_OUTLIERS = 4
FOUND = "bold #ff5f00"
LEAST_BAR, MOST_BAR = 10, 60
OF_STEP = tuple(kind for kind in MARKS if kind not in ("evaluate", "checkpoint"))
COMPUTING = ("forward", "backward", "optimizer")
# Columns that are left out first where the table is too wide. The first two never are.
LESS_NEEDED = ("last", "cost", "memory", "wait", "comm", "compute")


@dataclass(frozen=True)
class Row:
    """One row: its name, the seconds by kind for its bar (none: no bar), and its cells by the column's title.

    found: a finding is about it.
    """

    name: str
    seconds: Mapping[str, float] | None
    cells: Mapping[str, str]
    found: bool = False


def rank_table(report: Report, width: int, ascii_only: bool) -> list[Text]:
    """The table, its title row first, at most `width` characters wide; nothing for a report without ranks."""
    if not report.ranks:
        return []
    rows = _rows(report)
    titles = [title for title in rows[0].cells if any(row.cells[title] for row in rows)]
    name = max(4, *(cell_len(row.name) for row in rows))
    for drop in (None, *LESS_NEEDED):
        titles = [title for title in titles if title != drop]
        wide = {title: max([len(title), *(cell_len(row.cells[title]) for row in rows)]) for title in titles}
        for gap in ("  ", " "):
            room = width - name - sum(wide.values()) - len(gap) * (len(titles) + 1)
            if room >= (LEAST_BAR if drop is None else 0):
                return _lines(rows, name, wide, gap, min(room, MOST_BAR), ascii_only)
    return _lines(rows, name, wide, " ", 0, ascii_only)


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of each kind of a step, evaluating and saving aside. Nothing when there was no time."""
    total = sum(seconds.get(kind, 0.0) for kind in OF_STEP)
    return {kind: seconds.get(kind, 0.0) / total for kind in OF_STEP} if total > 0 else {}


def whole_parts(shares: Sequence[float], whole: int) -> list[int]:
    """Shares as whole numbers that add up to `whole`, by largest remainders; all 0 when no share is above 0."""
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
    """The kinds of a step as a bar of exactly `width` characters, each kind with its mark and colour."""
    bar = Text()
    for kind, many in zip(OF_STEP, whole_parts([seconds.get(kind, 0.0) for kind in OF_STEP], width), strict=True):
        if many:
            bar.append(mark_of(kind, ascii_only) * many, style_of(kind))
    bar.append(" " * (width - len(bar)))
    return bar


def _rows(report: Report) -> list[Row]:
    if len(report.ranks) <= MOST_ROWS:
        return [_row(rank, report) for rank in report.ranks]
    rows = [_picked(name, report, pick) for name, pick in (("min", min), ("median", median), ("max", max))]
    return rows + [_row(rank, report) for rank in outliers(report)]


def _row(rank: RankReport, report: Report) -> Row:
    found = any(finding.rank == rank.rank for finding in report.findings)
    return Row(_name(rank, report), rank.seconds, _cells(rank), found)


def _name(rank: RankReport, report: Report) -> str:
    """The rank, with its host and device where those differ between ranks."""
    hosts, devices = {r.host for r in report.ranks}, {r.device for r in report.ranks}
    parts = [str(rank.rank), rank.host if len(hosts) > 1 else "", rank.device if len(devices) > 1 else ""]
    return " ".join(part for part in parts if part)


def outliers(report: Report) -> list[RankReport]:
    """The ranks to name of many: those of findings, then those that cost most and those with most memory, where that
    is half more than the median."""
    named = [finding.rank for finding in report.findings if finding.rank is not None]
    for value in (
        {rank.rank: rank.straggler_seconds for rank in report.ranks},
        {rank.rank: peak_bytes(rank) for rank in report.ranks},
    ):
        usual = median(value.values())
        most = max(value, key=lambda rank: value[rank])
        if value[most] > 1.5 * usual:
            named.append(most)
    by_rank = {rank.rank: rank for rank in report.ranks}
    return [by_rank[rank] for rank in dict.fromkeys(named) if rank in by_rank][:MOST_OUTLIERS]


def _numbers(rank: RankReport) -> dict[str, float | None]:
    shares = shares_of(rank.seconds)
    met = rank.sync_points > 0
    return {
        "step": rank.step_seconds if rank.steps else None,
        "compute": sum(shares[kind] for kind in COMPUTING) if shares else None,
        "comm": shares.get("communication"),
        "wait": shares.get("waiting"),
        "last": float(rank.last_arrivals) if met else None,
        "cost": rank.straggler_seconds if met else None,
        "memory": peak_bytes(rank) or None,
    }


def _cells(rank: RankReport) -> dict[str, str]:
    return {title: _cell(title, value) for title, value in _numbers(rank).items()}


def _picked(name: str, report: Report, pick: Callable[[list[float]], float]) -> Row:
    numbers = [_numbers(rank) for rank in report.ranks]
    cells = {}
    for title in numbers[0]:
        known = [value for of_rank in numbers if (value := of_rank[title]) is not None]
        cells[title] = _cell(title, pick(known) if known else None)
    return Row(name, report.kinds if name == "median" else None, cells)


def _cell(title: str, value: float | None) -> str:
    if value is None:
        return ""
    if title in ("step", "cost"):
        return seconds_text(value)
    if title == "memory":
        return bytes_text(value)
    return f"{count_text(value)}×" if title == "last" else percent(value)


def percent(share: float) -> str:
    """`18 %`; `<1 %` of what is there but rounds to nothing."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def peak_bytes(rank: RankReport) -> float:
    """The most memory of the device, or of the process where that is all that is known; 0 unknown."""
    return next((rank.memory[name] for name in MEMORY if name in rank.memory), max(rank.memory.values(), default=0.0))


def _lines(rows: Sequence[Row], name: int, wide: Mapping[str, int], gap: str, bar: int, ascii_only: bool) -> list[Text]:
    bar = bar if bar >= LEAST_BAR else 0
    first = [title for title in wide if title == "step"]
    rest = [title for title in wide if title != "step"]
    head = "rank".ljust(name) + "".join(gap + title.rjust(wide[title]) for title in first)
    head += (gap + "its step".ljust(bar) if bar else "") + "".join(gap + title.rjust(wide[title]) for title in rest)
    lines = [Text(head, style="dim", no_wrap=True)]
    for row in rows:
        line = Text(no_wrap=True).append(row.name, FOUND if row.found else "")
        line.append(" " * (name - cell_len(row.name)))
        for title in first:
            line.append(gap + fitting(row.cells[title], ascii_only).rjust(wide[title]))
        if bar:
            line.append(gap).append_text(bar_text(row.seconds or {}, bar, ascii_only))
        for title in rest:
            line.append(gap + fitting(row.cells[title], ascii_only).rjust(wide[title]))
        line.rstrip()
        lines.append(line)
    return lines
