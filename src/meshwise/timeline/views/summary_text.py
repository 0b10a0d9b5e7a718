"""What a run did, as data and as text: metrics, throughput, where the time went, and what to type next.

Not covered: where the time went step by step; the spans of the run folder have that.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from meshwise.spec.units import bytes_text, count_text, percent_text, seconds_text
from meshwise.timeline.run_summary import RunSummary
from meshwise.timeline.spans import KINDS

OTHER = "other"
DEFAULT_WIDTH = 80
BLOCKS = " ▏▎▍▌▋▊▉█"
MOST_RANK_COLUMNS = 8
MOST_BAR, LEAST_BAR = 24, 8


def summary_text(summary: RunSummary, width: int | None) -> RenderableType:
    """What to print at the end of a run, at most `width` characters wide (None: as wide as the console)."""
    return _SummaryText(summary, width)


@dataclass(frozen=True)
class _SummaryText:
    """Drawn when it is printed: only the console knows whether it can show blocks."""

    summary: RunSummary
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        parts = [*_head(self.summary), Text()]
        if _rows(self.summary):
            parts += [*_time_table(self.summary, width, ascii_only=options.ascii_only), Text()]
        yield Group(*parts, *_end(self.summary))


def metric_text(name: str, value: float) -> str:
    """`accuracy 96.62 %`, and any other metric with four decimals."""
    return f"{name} {percent_text(value, 2)}" if name == "accuracy" else f"{name} {value:.4f}"


def mean_seconds(summary: RunSummary) -> dict[str, float]:
    """Seconds of each phase averaged over ranks, in the order in which a step goes; `other` is what is in none.

    Phases that took no time on any rank are left out.
    """
    return {kind: fmean(row) for kind, row in _rows(summary).items()}


def _head(s: RunSummary) -> list[Text]:
    done = f"{_plural(s.epochs, 'epoch')} and {_plural(s.steps, 'step')}"
    lines = [Text(f"{s.job} {s.status} after {done} in {seconds_text(s.seconds)}", style="bold", no_wrap=False)]
    facts = [metric_text(name, value) for name, value in s.metrics.items()]
    if facts:
        lines.append(Text("test        " + "   ".join(facts), no_wrap=False))
    lines.append(
        Text(f"throughput  {count_text(s.samples_per_second)} samples/s on {_plural(len(s.devices), 'device')}")
    )
    if any(size is not None for size in s.memory):
        lines.append(Text(f"memory      peak {_memory_text(s.memory)}", no_wrap=False))
    return lines


def _memory_text(memory: Sequence[int | None]) -> str:
    if len(memory) <= 4:
        return ", ".join("unknown" if size is None else bytes_text(size) for size in memory)
    known = [size for size in memory if size is not None]
    return f"{bytes_text(min(known))} to {bytes_text(max(known))}"


def _end(s: RunSummary) -> list[Text]:
    lines = [Text(s.verdict, no_wrap=False)] if s.verdict else []
    lines += [Text(note, no_wrap=False) for note in s.notes]
    if not s.folder:
        return lines
    # Paths are never cut where they are printed with soft_wrap, so that they can be copied.
    lines.append(Text(f"records     {s.folder}"))
    lines.append(Text(f"more with   meshwise report {shlex.quote(s.folder)}"))
    if s.status == "stopped":
        return [*lines, Text(f"go on with  meshwise run --resume {shlex.quote(s.folder)}")]
    return [*lines, Text(f"weights     {s.folder.rstrip('/')}/weights.safetensors")]


def _rows(s: RunSummary) -> dict[str, list[float]]:
    """Seconds of each phase on each rank."""
    kinds = [*KINDS, *sorted({kind for phases in s.phases for kind in phases} - {*KINDS})]
    rows = {kind: [phases.get(kind, 0.0) for phases in s.phases] for kind in kinds}
    rows[OTHER] = [max(0.0, s.train_seconds - sum(phases.values())) for phases in s.phases]
    return {kind: row for kind, row in rows.items() if any(row)}


def _time_table(s: RunSummary, width: int, *, ascii_only: bool) -> list[Text]:
    rows = _rows(s)
    rows["total"] = [sum(row[rank] for row in rows.values()) for rank in range(len(s.phases))]
    total = fmean(rows["total"])
    unit, numbers = _in_one_unit(rows)
    means = _column(unit, [numbers(fmean(row)) for row in rows.values()])
    names = max(map(len, rows))
    columns, gap, bar = _columns(rows, width - names - 2 - means[1] - 7, numbers)
    several = f", mean of {len(s.phases)} ranks" if len(s.phases) > 1 else ""
    head = f"{'':{names}}  {unit:>{means[1]}}  share" + (f"  {'':{bar}}" if bar else "")
    lines = [Text(f"Where the time went{several}", style="bold")]
    lines.append(Text((head + "".join(f"{gap}{title:>{wide}}" for title, wide, _ in columns)).rstrip(), style="dim"))
    for at, (kind, row) in enumerate(rows.items()):
        share = fmean(row) / total
        text = f"{kind:{names}}  {means[2][at]:>{means[1]}}  {_share_text(share)}"
        if bar:
            text += f"  {_bar_text(0.0 if kind == 'total' else share, bar, ascii_only):{bar}}"
        text += "".join(f"{gap}{cells[at]:>{wide}}" for _, wide, cells in columns)
        lines.append(Text(text.rstrip(), style="dim" if kind == "total" else ""))
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    if "communication" in rows:
        note = "communication: from the last rank's arrival on, where no computing hides it"
        lines.append(Text(note, style="dim", no_wrap=False))
    return lines


Column = tuple[str, int, list[str]]  # title, width, cells
Numbers = Callable[[float], str]


def _columns(rows: Mapping[str, Sequence[float]], room: int, numbers: Numbers) -> tuple[list[Column], str, int]:
    """The columns beside the means, the gap before each, and the width that is left for bars (0: none).

    One a rank where they fit, else the least, the median and the most of all ranks, else none: no number is ever cut.
    """
    ranks = len(next(iter(rows.values())))
    if ranks == 1:
        return [], "", _bar_width(room)
    if ranks <= MOST_RANK_COLUMNS:
        cells = [[numbers(row[rank]) for row in rows.values()] for rank in range(ranks)]
        for word, gap, least in (("rank ", "  ", LEAST_BAR), ("r", " ", LEAST_BAR), ("r", " ", 0)):
            columns = [_column(f"{word}{rank}", texts) for rank, texts in enumerate(cells)]
            left = room - sum(wide + len(gap) for _, wide, _ in columns)
            if left >= least + (2 if least else 0):
                return columns, gap, _bar_width(left)
    columns = [
        _column(title, [numbers(pick(row)) for row in rows.values()])
        for title, pick in (("min", min), ("median", median), ("max", max))
    ]
    left = room - sum(wide + 2 for _, wide, _ in columns)
    return (columns, "  ", _bar_width(left)) if left >= 0 else ([], "", _bar_width(room))


def _column(title: str, texts: list[str]) -> Column:
    return title, max(map(len, [title, *texts])), texts


def _bar_width(room: int) -> int:
    return 0 if room - 2 < LEAST_BAR else min(MOST_BAR, room - 2)


def _bar_text(share: float, width: int, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return (BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8]).strip()


def _share_text(share: float) -> str:
    return " <1 %".rjust(5) if 0 < share < 0.005 else f"{100 * share:3.0f} %"


def _in_one_unit(rows: Mapping[str, Sequence[float]]) -> tuple[str, Numbers]:
    """The unit in which the row `total` reads well, and how seconds are written in it: all with one precision."""
    most = max(rows["total"])
    units = (("ms", 1e3, 1.0), ("seconds", 1.0, 600.0), ("minutes", 1 / 60, 10800.0), ("hours", 1 / 3600, math.inf))
    unit, factor = next((unit, factor) for unit, factor, limit in units if most < limit)
    digits = 3 if most * factor < 9.9995 else 2 if most * factor < 99.995 else 1
    return unit, lambda seconds: f"{seconds * factor:,.{digits}f}"


def _plural(count: int, noun: str) -> str:
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"
