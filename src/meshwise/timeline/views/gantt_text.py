"""One step of a view as rows of characters: who did what when, and who waited.

Every column is a slice of the time; it shows the kind that owns most of it, by the rights in `account`: a backward that
has handed over its last bucket waits, or communicates. Time in which nothing was recorded shows only where a column
holds nothing else. The thin row below a rank shows its collectives, those too that computing hides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from meshwise.terminal.kind_marks import fitting, legend, mark_of, style_of
from meshwise.timeline.run_report import Bar, StepWindow
from meshwise.timeline.spans import KINDS

MAIN, BESIDE = "main", "communication"
NOTHING = ""
LAST = ("data", "waiting", "idle")
"""Phases that own a moment only where nothing else goes on."""
LEAST_WIDTH = 10
TICK_STEPS = (1.0, 2.0, 5.0, 10.0)


Right = tuple[int, bool, float, float]


@dataclass(frozen=True)
class Piece:
    """A stretch of time in s, and the kind that owns it."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class StepTimes:
    """One step of a view: start is s since the view's."""

    step: int
    start: float
    seconds: float


def step_times(view: StepWindow) -> list[StepTimes]:
    """When the steps of a view were, from the first rank's beginning to the last one's end, in their order."""
    times: dict[int, tuple[float, float]] = {}
    for bar in view.bars:
        low, high = times.get(bar.step, (bar.start, bar.start))
        times[bar.step] = min(low, bar.start), max(high, bar.start + bar.seconds)
    return [StepTimes(step, low, high - low) for step, (low, high) in sorted(times.items())]


def step_nearest(view: StepWindow, seconds: float) -> int | None:
    """The step of a view that took most nearly so long; None in an empty view."""
    return min(step_times(view), key=lambda times: abs(times.seconds - seconds)).step if view.bars else None


def gantt_text(
    view: StepWindow,
    ranks: Sequence[int],
    width: int,
    *,
    step: int | None = None,
    ascii_only: bool = False,
    beside: bool = True,
    with_legend: bool = True,
) -> list[Text]:
    """Lines of at most `width` characters: a row a rank, one below it for its collectives beside the computing
    (`beside`), the axis in ms, and the legend (`with_legend`). step: the one to draw; None draws all of the view.
    Nothing where there is no bar."""
    drawn = [bar for bar in view.bars if step in (None, bar.step)]
    start = min((bar.start for bar in drawn), default=0.0)
    seconds = max((bar.start + bar.seconds for bar in drawn), default=0.0) - start
    if seconds <= 0:
        return []
    label = len(f"rank {max(ranks, default=0)} ")
    columns = max(width - label, LEAST_WIDTH)
    lines: list[Text] = []
    kinds: set[str] = set()
    for rank in ranks:
        bars = [bar for bar in drawn if bar.rank == rank]
        row = _with_gaps(column_kinds(owned_pieces(bars), start, seconds, columns))
        lines.append(_line(f"{f'rank {rank}':<{label}}", row, True, ascii_only))
        kinds |= {*row}
        collectives = [bar for bar in bars if bar.lane == BESIDE]
        if beside and collectives:
            row = column_kinds(owned_pieces(collectives), start, seconds, columns)
            lines.append(_line(f"{'  comm':<{label}}", row, False, ascii_only))
            kinds |= {*row}
    lines.append(_axis(label, columns, seconds, ascii_only))
    return [*lines, *legend(kinds, width, ascii_only)] if with_legend else lines


def column_kinds(pieces: Sequence[Piece], start: float, seconds: float, columns: int) -> list[str]:
    """The kind that has most of each of `columns` equal slices of `seconds` from `start`; "" where there is nothing.

    Of kinds with equal time the one that a step comes to first.
    """
    share = [dict.fromkeys(KINDS, 0) for _ in range(columns)]
    whole = max(round(seconds * 1e9), 1)  # ns, and whole: what ends where a column begins is not in it
    for piece in pieces:
        first, last = (round((time - start) * 1e9) * columns for time in (piece.start, piece.end))
        for column in range(max(0, first // whole), min(columns, -(-last // whole))):
            share[column][piece.kind] += min(last, (column + 1) * whole) - max(first, column * whole)
    best = [max(KINDS, key=lambda kind: of_kind[kind]) for of_kind in share]
    return [kind if of_kind[kind] > 0 else NOTHING for kind, of_kind in zip(best, share, strict=True)]


def owned_pieces(bars: Sequence[Bar]) -> list[Piece]:
    """The bars of one rank as pieces that do not overlap, each moment with the one that owns it (see `account`)."""
    claims = [claim for bar in bars for claim in _claims(bar, bars)]
    edges = sorted({edge for piece, _ in claims for edge in (piece.start, piece.end)})
    owned = []
    for low, high in itertools.pairwise(edges):
        there = [(right, piece.kind) for piece, right in claims if piece.start <= low and piece.end >= high]
        if there:
            owned.append(Piece(low, high, max(there)[1]))
    return owned


def _claims(bar: Bar, bars: Sequence[Bar]) -> Iterator[tuple[Piece, Right]]:
    """What a bar claims, and by which right: the highest owns the moment. Of equals it is the bar that was found (a
    waiting), then the one that began later, then the shorter."""
    end = bar.start + bar.seconds
    rest = (bar.found, bar.start, -bar.seconds)
    if bar.lane == MAIN and bar.kind == "backward":
        begun = [b.start for b in bars if b.lane == BESIDE and not b.found and bar.start <= b.start < end]
        handed = max(begun, default=end)
        yield Piece(bar.start, handed, bar.kind), (3, *rest)
        yield Piece(handed, end, bar.kind), (1, *rest)
    elif bar.lane == MAIN:
        yield Piece(bar.start, end, bar.kind), (3 if bar.found or bar.kind not in LAST else 0, *rest)
    elif bar.lane == BESIDE:
        yield Piece(bar.start, end, bar.kind), (2, *rest)


def _with_gaps(row: list[str]) -> list[str]:
    """Nothing between two kinds is time between phases; before the first and after the last it stays nothing."""
    filled = [column for column, kind in enumerate(row) if kind]
    if not filled:
        return row
    inside = range(filled[0], filled[-1] + 1)
    return [kind or ("idle" if column in inside else NOTHING) for column, kind in enumerate(row)]


def _line(label: str, row: Sequence[str], filled: bool, ascii_only: bool) -> Text:
    line = Text(label, no_wrap=True)
    for kind in row:
        line.append(mark_of(kind, ascii_only) if kind else " ", style_of(kind, filled) if kind else "")
    line.rstrip()
    return line


def _axis(label: int, columns: int, seconds: float, ascii_only: bool) -> Text:
    """Ticks under the columns in which round times lie, each with its number behind it."""
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
    return Text(" " * label + fitting("".join(line).rstrip(), ascii_only), "dim", no_wrap=True)


def _tick(seconds: float, columns: int) -> float:
    """The smallest round time (1, 2 or 5 times a power of ten) between ticks that leaves their numbers room."""
    least = seconds * 12 / columns
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in TICK_STEPS if power * step >= least * (1 - 1e-9))
