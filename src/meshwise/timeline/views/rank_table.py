"""Show a table of a run's devices, a row each.

A row shows what the time of the device's steps went into, how often it was last, and its memory.

For more than MOST_ROWS devices, the table shows each column's minimum, median and maximum, and devices that stand out.

Tested in tests/timeline/views/test_report_text.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, percent_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, mark_of, style_of
from meshwise.terminal.table import Bar, Cell, columns_lines
from meshwise.timeline.run_report import COMPUTING, OUTSIDE_STEPS, RankReport, Report

MOST_ROWS = 8
MOST_OUTLIERS = 4
FOUND = "bold #ff5f00"
BAR, LEAST_BAR, MOST_BAR = "its step", 10, 60
OF_STEP = tuple(kind for kind in MARKS if kind not in OUTSIDE_STEPS)
# What is left out first where the table is too wide. The first two columns never are.
LESS_NEEDED = ("last", BAR, "cost", "memory", "wait", "comm", "compute")
SPREAD: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "median": median, "max": max}
COLUMNS: Mapping[str, tuple[Callable[[float], str], Callable[[RankReport], float | None]]] = {
    "step": (seconds_text, lambda r: r.step_seconds if r.steps else None),
    "compute": (percent_text, lambda r: sum(r.step_shares[k] for k in COMPUTING) if r.step_shares else None),
    "comm": (percent_text, lambda r: r.step_shares.get("communication")),
    "wait": (percent_text, lambda r: r.step_shares.get("waiting")),
    "last": (lambda times: f"{count_text(times)}×", lambda r: r.last_steps if r.sync_points else None),
    "cost": (seconds_text, lambda r: r.straggler_seconds if r.sync_points else None),
    "memory": (bytes_text, lambda r: r.peak_memory),
}
"""The columns of numbers: how a number is written, and which number of a rank it is. The number is None if unknown."""


def rank_table(report: Report, width: int, ascii_only: bool) -> list[Text]:
    """Draw the table of ranks, in lines of at most `width` characters. The title row is first. Returns [] if there are
    no ranks."""
    if not report.ranks:
        return []
    many = len(report.ranks) > MOST_ROWS
    shown, spread = (outliers(report), SPREAD) if many else (report.ranks, {})
    drawn = [report.kinds if name == "median" else {} for name in spread] + [rank.seconds for rank in shown]
    columns: dict[str, list[Cell]] = {"rank": [*map(Text, spread), *(_name(rank, report) for rank in shown)]}
    for title, (write, read) in COLUMNS.items():
        known = [value for rank in report.ranks if (value := read(rank)) is not None]
        numbers = [pick(known) if known else None for pick in spread.values()] + [read(rank) for rank in shown]
        columns[title] = ["" if number is None else write(number) for number in numbers]
        if title == "step":
            draws = [partial(bar_text, seconds, ascii_only=ascii_only) for seconds in drawn]
            columns[BAR] = [Bar(draw, LEAST_BAR, MOST_BAR) for draw in draws]
    return columns_lines(columns, width, left=("rank", BAR), less_needed=LESS_NEEDED, gaps=(2, 1), rest="--json has")


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


def _name(rank: RankReport, report: Report) -> Text:
    """Return the name of a rank. It includes the host and the device if these differ between ranks."""
    hosts, devices = {r.host for r in report.ranks}, {r.device for r in report.ranks}
    parts = [str(rank.rank), rank.host if len(hosts) > 1 else "", rank.device if len(devices) > 1 else ""]
    found = any(finding.rank == rank.rank for finding in report.findings)
    return Text(" ".join(filter(None, parts)), FOUND if found else "")


def outliers(report: Report) -> list[RankReport]:
    """Return the ranks that get a row of their own in the table when there are too many ranks to show. At most
    MOST_OUTLIERS ranks are returned.

    These are the ranks that a finding names, the rank with the most expensive delays, and the rank that uses the most
    memory. The last two are returned only if their value is above 1.5 times the median.
    """
    named = [finding.rank for finding in report.findings if finding.rank is not None]
    by_rank = {rank.rank: rank for rank in report.ranks}
    for read in (lambda rank: rank.straggler_seconds, lambda rank: rank.peak_memory or 0.0):
        most = max(report.ranks, key=read)
        if read(most) > 1.5 * median(map(read, report.ranks)):
            named.append(most.rank)
    return [by_rank[rank] for rank in dict.fromkeys(named) if rank in by_rank][:MOST_OUTLIERS]
