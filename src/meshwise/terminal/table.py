"""Lines that fit: aligned columns, of which whole ones are left out, and sentences that keep a number by its unit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

UNIT = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|min|h|B|[KMGTP]iB)(?![^\W_]))")
GLUE = "\ue000"  # stands for a space at which a line must not end


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


def wrap(text: Text, width: int, console: Console) -> list[Text]:
    """The text in lines of at most `width` characters, none of which parts a number from its unit."""
    text = text.copy()
    text.plain = UNIT.sub(GLUE, text.plain)
    lines = list(text.wrap(console, width))
    for line in lines:
        line.plain = line.plain.replace(GLUE, " ")
        line.rstrip()
    return lines
