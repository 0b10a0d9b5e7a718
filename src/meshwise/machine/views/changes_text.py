"""Show what changed between two measurements in a terminal, worse ones first.

Tested in tests/machine/test_machine_compare.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from meshwise.machine.compare import Change
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import table_lines

STYLES = {"worse": "bold red", "gone": "red", "changed": "yellow", "new": "cyan", "better": "green"}
"""The style of each kind of change, in the order in which the kinds are listed."""
MOST_ROWS = 40


def changes_text(changes: Sequence[Change], width: int | None = None) -> RenderableType:
    """Return the changes between two measurements of a machine, formatted for a terminal.

    width: the largest number of characters in a line. The default is the width of the console.
    """
    return Drawn(lambda screen: _lines(changes, screen), width)


def _lines(changes: Sequence[Change], screen: Screen) -> list[Text]:
    order = [*STYLES]
    clear = sorted((c for c in changes if c.kind in STYLES), key=lambda c: (order.index(c.kind), -_size(c)))
    table = []
    if clear:
        rows = [_row(change) for change in clear[:MOST_ROWS]]
        table = table_lines(["what changed", "old", "new", "speed", ""], rows, screen.table_width)
    more = [Text(f"and {len(clear) - MOST_ROWS} more; --json has all", "dim")] if len(clear) > MOST_ROWS else []
    return spaced([table, more + screen.wrap(Text(_summary(changes), "bold" if clear else ""))], None)


def _size(change: Change) -> float:
    """Return the factor by which the speed changed, whether faster or slower. Returns 0 for a change without a
    speed."""
    return max(change.speed, 1 / change.speed) if change.speed else 0.0


def _row(change: Change) -> list[str | Text]:
    speed = "" if change.speed is None else f"x {change.speed:.2f}"
    style = STYLES[change.kind]
    return [change.what, change.old or "-", change.new or "-", speed, Text(change.kind, style)]


def _summary(changes: Sequence[Change]) -> str:
    counted = Counter(change.kind for change in changes)
    clear = ", ".join(f"{counted[kind]} {kind}" for kind in STYLES if counted[kind])
    same = f"no clear change in {counted['same']} figures" if counted["same"] else ""
    return "; ".join(filter(None, (clear, same))) or "nothing to compare: the two have no measured figure in common"
