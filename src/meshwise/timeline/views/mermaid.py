"""Draw a step as a Mermaid Gantt chart.

The chart fits into a README, an issue or a notebook.

Mermaid only knows whole milliseconds. If the bars take less than 0.1 s, their times are written in µs as if these were
ms, and the axis is labelled in µs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwise.spec.errors import UsageError
from meshwise.spec.units import count_text, plural, seconds_text
from meshwise.timeline.run_report import Bar, RankReport, Report
from meshwise.timeline.timeline import Timeline

MOST_BARS = 60
IN_MICROSECONDS = 0.1  # s: what is shorter
TAGS = {"waiting": "crit, ", "communication": "active, "}
PLAIN = re.compile(r"[^\w .,/+*=()·±-]")
"""Matches characters to replace by character codes, since `:`, `;`, `#` and others have a meaning in Mermaid."""


def render(report: Report, timeline: Timeline) -> str:
    """Draw the steps that the user chose, or one step of usual length, as a Gantt chart.

    Only the longest MOST_BARS bars are drawn. Raises UsageError if the run has no steps.
    """
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
        lines.append(f"    section {_escaped(_rank_name(rank, report.ranks))}")
        lines += [_task(bar, origin, per_second) for bar in drawn if bar.rank == rank]
    return "\n".join(lines) + "\n"


def _longest(bars: Sequence[Bar]) -> list[Bar]:
    """Return the longest bars, at most MOST_BARS, sorted by rank and then by start."""
    longest = sorted(bars, key=lambda bar: -bar.seconds)[:MOST_BARS]
    return sorted(longest, key=lambda bar: (bar.rank, bar.start, -bar.seconds))


def _scale(seconds: float) -> tuple[float, str, str]:
    """Choose the scale of a chart that covers `seconds`."""
    if seconds < IN_MICROSECONDS:
        return 1e6, "%Q", "axis in µs"
    return (1e3, "%S.%L", "axis in s") if seconds < 60 else (1e3, "%M:%S", "axis in min:s")


def _rank_name(rank: int, ranks: Sequence[RankReport]) -> str:
    return next((f"rank {rank} · {known.device}" for known in ranks if known.rank == rank), f"rank {rank}")


def _task(bar: Bar, origin: float, per_second: float) -> str:
    start = round((bar.start - origin) * per_second)
    end = max(round((bar.start + bar.seconds - origin) * per_second), start + 1)
    text = _escaped(f"{bar.kind} {bar.name}".strip() + f", {seconds_text(bar.seconds)}")
    return f"    {text} :{TAGS.get(bar.kind, '')}{start}, {end}"


def _escaped(text: str) -> str:
    """Put text on one line and replace special characters by Mermaid's character codes, such as `#58;` for a colon."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", " ", text).split())
    return PLAIN.sub(lambda found: f"#{ord(found[0])};", line)
