"""Two runs beside each other in a terminal: the verdict, a row a kind of time, and the runs as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, seconds_text
from meshwise.terminal.kind_marks import MARKS, fitting, mark_of, style_of
from meshwise.terminal.table import columns, wrap
from meshwise.timeline.compare_runs import Figure, RunComparison, TimeDifference, clearly, signed
from meshwise.timeline.views.live_progress import rate_text
from meshwise.timeline.views.rank_table import percent

CLEAR_STYLES = {True: "bold red", False: "bold green"}


def run_comparison_text(comparison: RunComparison, width: int | None = None) -> RenderableType:
    """The comparison, at most `width` characters wide (None: as wide as the console)."""
    return _CompareText(comparison, width)


@dataclass(frozen=True)
class _CompareText:
    """Drawn when it is printed: only the console knows how wide it is, and whether it can show blocks."""

    comparison: RunComparison
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        c, ascii_only = self.comparison, options.ascii_only
        width = min(self.width or options.max_width, options.max_width)
        lines = [
            line
            for at, (letter, name) in enumerate((("A", c.first), ("B", c.second)))
            for line in wrap(Text(f"{letter}  {name} · {_size(c, at)}"), width, console)
        ]
        lines += wrap(Text(c.verdict, "bold"), width, console)
        if c.step is not None:
            rows = [_row(difference, ascii_only) for difference in [*c.kinds, c.step]]
            lines += [Text(), *columns(["a step", "A", "B", "B - A", "B / A", "95 %", ""], rows, width)]
        if c.figures:
            rows = [_figure_row(figure) for figure in c.figures]
            lines += [Text(), *columns(["the run", "A", "B", "B - A"], rows, width)]
        notes = [line for note in c.notes for line in wrap(Text(note, "yellow"), width, console)]
        lines += [Text(), *notes] if notes else []
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
            line.plain = fitting(line.plain, ascii_only)
        yield from lines


def _size(comparison: RunComparison, at: int) -> str:
    ranks, steps = comparison.ranks[at], comparison.steps[at]
    return f"{ranks} rank{'' if ranks == 1 else 's'}, {count_text(steps)} step{'' if steps == 1 else 's'}"


def _row(difference: TimeDifference, ascii_only: bool) -> list[Text]:
    """kind, both medians, difference, ratio, its interval, whether it is clear."""
    d = difference
    name = Text()
    if d.kind in MARKS:
        name.append(mark_of(d.kind, ascii_only), style_of(d.kind)).append(f" {MARKS[d.kind].word}")
    else:
        name.append(f"the {d.kind}", "bold")
    style = CLEAR_STYLES[d.difference > 0] if d.clear else "dim"
    interval = "" if d.low is None or d.high is None else f"{_ratio(d.low)} to {_ratio(d.high)}"
    ratio = "" if d.ratio is None else _ratio(d.ratio)
    cells = [signed(d.difference), ratio, interval, clearly(d)]
    return [name, Text(_time(d.first)), Text(_time(d.second)), *(Text(cell, style) for cell in cells)]


def _ratio(ratio: float) -> str:
    """Four digits, more of what is larger."""
    return count_text(ratio) if ratio >= 1000 else f"{ratio:.{3 if ratio < 10 else 2 if ratio < 100 else 1}f}"


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "–"


def _figure_row(figure: Figure) -> list[Text]:
    """name, both values, and the difference where both are known: of shares in points, of others as a share."""
    a, b = figure.first, figure.second
    change = ""
    if a is not None and b is not None:
        if figure.unit == "share":
            points = round(100 * (b - a))
            change = f"{points:+d} points" if points else "0 points"
        elif a > 0:
            more = round(100 * (b / a - 1))
            change = f"{more:+,d} %" if more else "0 %"
    return [Text(figure.name), Text(_value(a, figure.unit)), Text(_value(b, figure.unit)), Text(change)]


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    if unit == "samples/s":
        return f"{rate_text(value)} samples/s"
    return {"share": percent, "bytes": bytes_text, "seconds": seconds_text}[unit](value)
