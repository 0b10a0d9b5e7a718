"""What changed between two measurements, in a terminal: worse first, in red, better in green, the rest in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwise.machine.compare import Change
from meshwise.terminal.kind_marks import fitting
from meshwise.terminal.table import columns, wrap

STYLES = {"worse": "bold red", "gone": "red", "changed": "yellow", "new": "cyan", "better": "green"}
"""Kinds of change in the order in which they are told."""
MOST_ROWS = 40


def changes_text(changes: Sequence[Change], width: int | None = None) -> RenderableType:
    """The changes, at most `width` characters wide (None: as wide as the console)."""
    return _CompareText(tuple(changes), width)


@dataclass(frozen=True)
class _CompareText:
    """Drawn when it is printed: only the console knows how wide it is."""

    changes: tuple[Change, ...]
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        clear = [change for kind in STYLES for change in sorted(self._of(kind), key=_size, reverse=True)]
        lines = []
        if clear:
            rows = [_row(change) for change in clear[:MOST_ROWS]]
            lines += [*columns(["what changed", "old", "new", "speed", ""], rows, width), Text()]
        if len(clear) > MOST_ROWS:
            lines.append(Text(f"and {len(clear) - MOST_ROWS} more; --json tells all", "dim"))
        lines += wrap(Text(_summary(self.changes), "bold" if clear else ""), width, console)
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
            line.plain = fitting(line.plain, options.ascii_only)
        yield from lines

    def _of(self, kind: str) -> list[Change]:
        return [change for change in self.changes if change.kind == kind]


def _size(change: Change) -> float:
    """How large a change of speed is, either way."""
    return max(change.speed, 1 / change.speed) if change.speed else 0.0


def _row(change: Change) -> list[Text]:
    speed = "" if change.speed is None else f"x {change.speed:.2f}"
    style = STYLES[change.kind]
    return [Text(change.what), Text(change.old or "-"), Text(change.new or "-"), Text(speed), Text(change.kind, style)]


def _summary(changes: Sequence[Change]) -> str:
    counted = {kind: sum(change.kind == kind for change in changes) for kind in (*STYLES, "same")}
    told = [f"{count} {kind}" for kind, count in counted.items() if count and kind != "same"]
    same = f"no clear change in {counted['same']} figures" if counted["same"] else ""
    return "; ".join([", ".join(told), same] if told and same else [*told, *([same] if same else [])]) or (
        "nothing to compare: the two have no measured figure in common"
    )
