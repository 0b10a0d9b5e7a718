"""Lines of aligned columns, for a terminal or a file: what does not fit is left out as a column, never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text


def columns(titles: Sequence[str], rows: Sequence[list[Text]], width: int) -> list[Text]:
    """Lines of aligned columns, the first to the left, the others to the right; the last ones are left out where they
    do not fit."""
    head = [Text(title) for title in titles]
    wide = [max(cell_len(line[at].plain) for line in [head, *rows]) for at in range(len(head))]
    many = len(wide)
    while many > 1 and sum(wide[:many]) + 2 * (many - 1) > width:
        many -= 1
    lines = []
    for cells, style in [(head, "dim"), *((row, "") for row in rows)]:
        line = Text(style=style)
        for at, cell in enumerate(cells[:many]):
            space = Text(" " * (wide[at] - cell_len(cell.plain)))
            line.append_text(cell + space if at == 0 else Text("  ") + space + cell)
        line.rstrip()
        lines.append(line)
    return lines
