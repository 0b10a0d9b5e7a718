"""Measure a console's width and characters, and fit lines to it."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from meshwise.terminal.kind_marks import GLUE, printable
from meshwise.terminal.table import NO_LIMIT

UNIT = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|min|h|B|[KMGTP]iB)(?![^\W_]))")
LABEL = 10
"""Width of a column of labels, in characters."""


@dataclass(frozen=True)
class Screen:
    """The console on which lines are drawn.

    width: the largest number of characters in a line.
    table_width: the largest width of a table. In a file or a pipe, a table may be as wide as it needs.
    """

    console: Console
    width: int
    table_width: int = NO_LIMIT

    @property
    def height(self) -> int | None:
        """The number of lines that fit on a terminal and leave room for a prompt. None for a file or a pipe."""
        return self.console.size.height - 1 if self.console.is_terminal else None

    def wrap(self, *texts: Text, indent: int = 0) -> list[Text]:
        """Wrap the texts into lines, never between a number and its unit.

        indent: the number of spaces before each line of a text, except its first line.
        """
        lines = []
        for text in texts:
            glued = text.copy()
            glued.plain = UNIT.sub(GLUE, glued.plain)
            head, rest = glued[:indent], glued[indent:]
            for line in rest.wrap(self.console, self.width - indent):
                line.plain = line.plain.replace(GLUE, " ")
                line.rstrip()
                lines.append(head + line)
                head = Text(" " * indent)
        return lines


@dataclass(frozen=True)
class Drawn:
    """Lines to print. `draw` makes them only when they are printed, because the width and the characters of the console
    are known only then.

    width: the largest width of a line in characters. None for the width of the console.
    """

    draw: Callable[[Screen], Iterable[Text]]
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        limited = self.width is not None or console.is_terminal
        for line in self.draw(Screen(console, width, width if limited else NO_LIMIT)):
            if line.no_wrap is None:
                line.no_wrap, line.overflow = True, "crop" if limited else "ignore"
            line.plain = printable(line.plain, options.ascii_only)
            yield line


def spaced(parts: Iterable[list[Text]], height: int | None) -> list[Text]:
    """Join the parts into one list of lines, with an empty line between two parts.

    height: the number of lines that fit on the screen, or None for no limit. If there are more lines, empty lines are
        left out.
    """
    filled = [part for part in parts if part]
    room = len(filled) if height is None else height - sum(map(len, filled))
    lines: list[Text] = []
    for part in filled:
        if lines and room > 0:
            lines.append(Text())
            room -= 1
        lines += part
    return lines


def labelled(label: str, text: str, style: str = "dim", width: int = LABEL) -> Text:
    """Return a line with a label, in a column of `width` characters, followed by a text."""
    return Text(f"{label:<{width}}", style).append(text, "default")


def fitted(text: str, file: IO[str]) -> str:
    """Wrap a one-line text between words if `file` is a terminal. A text of several lines is returned unchanged."""
    if "\n" in text or not file.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
