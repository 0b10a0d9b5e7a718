"""Draw a step as a Gantt chart, of characters or for Mermaid.

In characters, each column shows the kind of time that takes most of its slice, by the report's attribution.
Idle time shows only in columns that hold nothing else. The thin row below a rank shows the collectives that overlap
with the rank's computing. Where a pipeline stage begins a microbatch, the last digit of the microbatch's number is
drawn.

Mermaid's chart fits into a README, an issue or a notebook. Mermaid only supports whole milliseconds. If the bars take
less than 0.1 s, their times are written in µs as if these were ms, and the axis is labeled in µs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rich.text import Text

from meshwise.reports.run_report import Bar, Report, StepTimes, StepWindow
from meshwise.reports.spans import KINDS, Timeline, stage_and_microbatch
from meshwise.spec.errors import UsageError
from meshwise.spec.units import count_text, plural, seconds_text
from meshwise.terminal.kind_marks import MARKS, style_of

OVERLAPPED = "communication"
NOTHING = ""
LEAST_WIDTH = 10
TICK_STEPS = (1.0, 2.0, 5.0, 10.0)


def gantt_text(
    window: StepWindow,
    ranks: Sequence[int],
    width: int,
    *,
    step: int | None = None,
    overlapped: bool = True,
) -> list[Text]:
    """Draw a Gantt chart in lines of at most `width` characters."""
    times = StepTimes(0, 0.0, window.seconds) if step is None else window.step(step)
    if times is None or times.seconds <= 0:
        return []
    label = len(f"rank {max(ranks, default=0)} ")
    columns = max(width - label, LEAST_WIDTH)
    lines: list[Text] = []
    for rank in ranks:
        row = _with_gaps(column_kinds(_of(window.attributed, rank, step), times, columns))
        begins = _begins(_of(window.bars, rank, step), row, times)
        lines.append(_line(f"{f'rank {rank}':<{label}}", row, True, begins))
        collectives = [bar for bar in _of(window.bars, rank, step) if bar.lane == OVERLAPPED]
        if overlapped and collectives:
            row = column_kinds(collectives, times, columns)
            lines.append(_line(f"{'  comm':<{label}}", row, False, {}))
    return [*lines, _axis(label, columns, times.seconds)]


def _of(bars: Sequence[Bar], rank: int, step: int | None) -> list[Bar]:
    return [bar for bar in bars if bar.rank == rank and step in (None, bar.step)]


def column_kinds(bars: Sequence[Bar], times: StepTimes, columns: int) -> list[str]:
    """Divide `times` into `columns` equal slices, and return for each slice the kind of time that takes most of it."""
    share = [dict.fromkeys(KINDS, 0) for _ in range(columns)]
    whole = max(round(times.seconds * 1e9), 1)  # in whole ns: float errors could put a span's end in the next column
    for bar in bars:
        first, last = (round((at - times.start) * 1e9) * columns for at in (bar.start, bar.start + bar.seconds))
        for column in range(max(0, first // whole), min(columns, -(-last // whole))):
            share[column][bar.kind] += min(last, (column + 1) * whole) - max(first, column * whole)
    best = [max(KINDS, key=lambda kind: of_kind[kind]) for of_kind in share]
    return [kind if of_kind[kind] > 0 else NOTHING for kind, of_kind in zip(best, share, strict=True)]


def _with_gaps(row: list[str]) -> list[str]:
    """Return the row with "idle" in each empty column that has a filled column before it and after it."""
    filled = [column for column, kind in enumerate(row) if kind]
    inside = range(filled[0], filled[-1]) if filled else ()
    return [kind or ("idle" if column in inside else NOTHING) for column, kind in enumerate(row)]


def _begins(bars: Sequence[Bar], row: Sequence[str], times: StepTimes) -> dict[int, str]:
    """Return where to write microbatch numbers in a row, as {column: last digit of the number}."""
    found = {}
    for bar in bars:
        if place := stage_and_microbatch(bar.name):
            first, last = (
                int((at - times.start) / times.seconds * len(row)) for at in (bar.start, bar.start + bar.seconds)
            )
            own = [column for column in range(first, min(last + 1, len(row))) if row[column] == bar.kind]
            if own:
                found[own[0]] = str(place[1] % 10)
    return found


def _line(label: str, row: Sequence[str], filled: bool, begins: Mapping[int, str]) -> Text:
    line = Text(label, no_wrap=True)
    for column, kind in enumerate(row):
        mark = begins.get(column) or (MARKS[kind].mark if kind else " ")
        line.append(mark, style_of(kind, filled) if kind else "")
    line.rstrip()
    return line


def _axis(label: int, columns: int, seconds: float) -> Text:
    """Draw a time axis with ticks at round times. The time is written after each tick."""
    every = _tick(seconds, columns)
    digits = max(0, -math.floor(math.log10(every * 1e3) + 1e-9))
    line = [" "] * columns
    at = 0
    while at * every <= seconds:
        column = round(at * every * 1e9) * columns // max(round(seconds * 1e9), 1)
        text = f"╵{at * every * 1e3:,.{digits}f}" if at else "╵0 ms"
        if column + len(text) > columns:
            break
        line[column : column + len(text)] = text
        at += 1
    return Text(" " * label + "".join(line).rstrip(), "dim", no_wrap=True)


def _tick(seconds: float, columns: int) -> float:
    """Return the distance between two ticks of the time axis in seconds."""
    least = seconds * 12 / columns
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in TICK_STEPS if power * step >= least * (1 - 1e-9))


MOST_BARS = 60
IN_MICROSECONDS = 0.1  # in seconds; the axis of a shorter chart is in µs
TAGS = {"waiting": "crit, ", "communication": "active, "}
PLAIN = re.compile(r"[^\w .,/+*=()·±-]")
"""Matches characters to replace with character codes, since `:`, `;`, `#` and others have a meaning in Mermaid."""


def render(report: Report, timeline: Timeline) -> str:
    """Draw the steps that the user chose, or one step of usual length, as a Gantt chart."""
    if not report.views:
        raise UsageError("this run has no steps to draw: it ended before its first step, or it was not recorded.")
    window = report.views[0]
    bars = [bar for bar in window.bars if bar.step == window.usual_step or report.chosen_steps]
    return gantt(report, bars)


def gantt(report: Report, bars: Sequence[Bar]) -> str:
    """Draw bars as a Gantt chart. Only the longest MOST_BARS bars are drawn."""
    origin = min(bar.start for bar in bars)
    per_second, axis, unit = _scale(max(bar.start + bar.seconds for bar in bars) - origin)
    drawn = _longest(bars)
    first, last = min(bar.step for bar in bars), max(bar.step for bar in bars)
    steps = f"step {count_text(first)}" if first == last else f"steps {count_text(first)} to {count_text(last)}"
    predicted = "" if report.source == "measured" else f", {report.source}"
    lines = [
        "gantt",
        f"    title {_escaped(f'{report.title}, {steps}{predicted} ({unit})')}",
        "    dateFormat x",
        f"    axisFormat {axis}",
        "    todayMarker off",
        "    %% crit: waits for another rank. active: communicates.",
    ]
    if len(drawn) < len(bars):
        lines.append(f"    %% {plural(len(bars) - len(drawn), 'shorter bar')} left out.")
    if len(report.clocks) > 1:
        lines.append(f"    %% times of different ranks agree to ±{seconds_text(report.error_seconds)}.")
    for rank in sorted({bar.rank for bar in drawn}):
        device = next((f" · {known.device}" for known in report.ranks if known.rank == rank), "")
        lines.append(f"    section {_escaped(f'rank {rank}{device}')}")
        lines += [_task(bar, origin, per_second) for bar in drawn if bar.rank == rank]
    return "\n".join(lines) + "\n"


def _longest(bars: Sequence[Bar]) -> list[Bar]:
    """Return the longest bars, at most MOST_BARS, sorted by rank and then by start."""
    longest = sorted(bars, key=lambda bar: -bar.seconds)[:MOST_BARS]
    return sorted(longest, key=lambda bar: (bar.rank, bar.start, -bar.seconds))


def _scale(seconds: float) -> tuple[float, str, str]:
    """Return the time units per second, the time format and the axis title of a chart that covers `seconds`."""
    if seconds < IN_MICROSECONDS:
        return 1e6, "%Q", "axis in µs"
    return (1e3, "%S.%L", "axis in s") if seconds < 60 else (1e3, "%M:%S", "axis in min:s")


def _task(bar: Bar, origin: float, per_second: float) -> str:
    start = round((bar.start - origin) * per_second)
    end = max(round((bar.start + bar.seconds - origin) * per_second), start + 1)
    text = _escaped(f"{bar.kind} {bar.name}".strip() + f", {seconds_text(bar.seconds)}")
    return f"    {text} :{TAGS.get(bar.kind, '')}{start}, {end}"


def _escaped(text: str) -> str:
    """Put text on one line, and replace special characters with Mermaid's codes, such as `#58;` for a colon."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", " ", text).split())
    return PLAIN.sub(lambda found: f"#{ord(found[0])};", line)
