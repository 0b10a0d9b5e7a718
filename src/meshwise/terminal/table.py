"""Format aligned columns, and bars in them, as lines.

A view can count these lines, and so knows the height and the width of a table.

No number is ever cut, and no column is left out: if the screen is too narrow, each row becomes a block of lines.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

NO_LIMIT = 10_000
GAP = 2  # spaces between two columns
LEAST_ROOM = 24
"""On a screen that is too narrow for a table, cells are wrapped to lines of at least this many characters."""


@dataclass(frozen=True)
class Bar:
    """A cell that grows to fill the space available, between `least` and `most` characters. All bars of a table have
    the same width. `draw` renders the bar at a given width."""

    draw: Callable[[int], Text]
    least: int
    most: int


Cell = str | Text | Bar


def table_lines(
    titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int = NO_LIMIT, *, left: Sequence[int] = (0,)
) -> list[Text]:
    """Return a table as lines: a line of titles, and a line per row.

    left: the indices of the columns to align left.

    If the table is wider than `width`, each row becomes a block of lines. In a block, each cell follows the title of
    its column, on as many lines as it needs.
    """
    return _aligned(titles, rows, width, left) or _stacked(titles, rows, width)


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, left: Sequence[int]) -> list[Text]:
    """Return a table in columns, or [] if it is wider than `width`."""
    bar = next((cell for row in rows for cell in row if isinstance(cell, Bar)), None)
    lines = _drawn(titles, rows, left, bar.most if bar else 0)
    if bar and (over := width_of(lines) - width) > 0:
        lines = _drawn(titles, rows, left, max(bar.least, bar.most - over))
    return lines if width_of(lines) <= width else []


def _drawn(titles: Sequence[str], rows: Sequence[Sequence[Cell]], left: Sequence[int], bar: int) -> list[Text]:
    table = [[Text(title, "dim") for title in titles], *([_text(cell, bar) for cell in row] for row in rows)]
    for at, column in enumerate(zip(*table, strict=True)):
        width = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("left" if at in left else "right", width)
    return _stripped(Text(" " * GAP).join(row) for row in table)


def _text(cell: Cell, bar: int = 0) -> Text:
    return Text(cell) if isinstance(cell, str) else cell.copy() if isinstance(cell, Text) else cell.draw(bar)


def columns_lines(
    columns: Mapping[str, Sequence[Cell]],
    width: int,
    *,
    left: Sequence[str],
    less_needed: Sequence[str] = (),
    rest: str = "",
) -> list[Text]:
    """Return a table as lines. Columns without any text are left out.

    columns: the cells of each column, by the title of the column.
    left: the titles of the columns to align left.
    less_needed: the titles of columns that are dropped, in this order, until the table fits into `width`.
    rest: where to find the dropped columns. The line that names them begins with this text.
    """
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    for without in range(len(less_needed) + 1):
        used = {title: cells for title, cells in filled.items() if title not in less_needed[:without]}
        titles, rows = list(used), list(zip(*used.values(), strict=True))
        places = [at for at, title in enumerate(titles) if title in left]
        dropped = [title for title in filled if title not in used and not isinstance(filled[title][0], Bar)]
        last = [Text(f"{rest} {' '.join(dropped)}", "dim")] if rest and dropped else []
        if lines := _aligned(titles, rows, width, places):
            return lines + last
    return _stacked(titles, rows, width) + last


def _stacked(titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> list[Text]:
    label = max(map(cell_len, titles)) + GAP
    lines: list[Text] = []
    for row in rows:
        lines += [Text()] * bool(lines)
        for title, cell in zip(titles, row, strict=True):
            for at, line in enumerate(_wrapped(cell, max(width - label, LEAST_ROOM))):
                name = Text("" if at else title, "dim")
                name.align("left", label)
                lines.append(Text.assemble(name, line))
    return lines


def _wrapped(cell: Cell, width: int) -> list[Text]:
    text = _text(cell)
    return _stripped(text.wrap(Console(file=io.StringIO()), width)) if text else []


def _stripped(lines: Iterable[Text]) -> list[Text]:
    for line in (stripped := [*lines]):
        line.rstrip()
    return stripped


def width_of(lines: Sequence[Text]) -> int:
    """Return the width of the longest line, in characters."""
    return max((cell_len(line.plain) for line in lines), default=0)
