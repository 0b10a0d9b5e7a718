"""Show the comparison of two runs in a terminal.

It shows the verdict, a row for each kind of time, and figures of the runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import RenderableType
from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, percent_text, plural, rate_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, mark_of, style_of
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import Cell, table_lines
from meshwise.timeline.compare_runs import Figure, RunComparison, TimeDifference, clearly, signed

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
    """Draw the comparison.

    width: the largest number of characters in a line. The default is the width of the console.
    """
    return Drawn(lambda screen: _lines(comparison, screen), width)


def _lines(c: RunComparison, screen: Screen) -> list[Text]:
    runs = [
        Text(f"{letter}  {name} · {plural(ranks, 'rank')}, {plural(steps, 'step')}")
        for letter, name, ranks, steps in zip("AB", (c.first, c.second), c.ranks, c.steps, strict=True)
    ]
    steps, figures = [], []
    if c.step is not None:
        rows = [_row(difference, screen.ascii_only) for difference in [*c.kinds, c.step]]
        steps = table_lines(["a step", "A", "B", "B - A", "B / A", "95 %", ""], rows, screen.table_width)
    if c.figures:
        figures = table_lines(["the run", "A", "B", "B - A"], [_figure_row(f) for f in c.figures], screen.table_width)
    notes = screen.wrap(*(Text(note, "yellow") for note in c.notes))
    differs = [Text("differs in: " + ", ".join(c.differs))] if c.differs else []
    return spaced([screen.wrap(*runs, *differs, Text(c.verdict, "bold")), steps, figures, notes], None)


def _row(d: TimeDifference, ascii_only: bool) -> list[Cell]:
    """Return the cells of a row: kind, both medians, difference, ratio, interval of the ratio, whether the difference
    is clear."""
    name = Text(f"the {d.kind}", "bold")
    if d.kind in MARKS:
        name = Text(mark_of(d.kind, ascii_only), style_of(d.kind)).append(f" {MARKS[d.kind].word}", "default")
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
    """Return the cells of a row: the name of the figure, its values in the two runs, and the difference of the
    values."""
    a, b = figure.first, figure.second
    change = ""
    if a is not None and b is not None:
        if figure.unit == "share":
            points = round(100 * (b - a))
            change = f"{points:+d} points" if points else "0 points"
        elif a > 0:
            more = round(100 * (b / a - 1))
            change = f"{more:+,d} %" if more else "0 %"
    return [figure.name, _value(a, figure.unit), _value(b, figure.unit), change]


def _value(value: float | None, unit: str) -> str:
    return "unknown" if value is None else WRITE[unit](value)
