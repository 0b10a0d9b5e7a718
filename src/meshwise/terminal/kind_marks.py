"""Give each kind of time a colour, and a mark without colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text


@dataclass(frozen=True)
class KindMark:
    """How one kind of time, such as forward or communication, is drawn."""

    mark: str
    plain: str
    colour: str
    word: str


# After Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with weak red-green sight read too, and such that
# they stay apart on terminals of 16 colours.
MARKS: Mapping[str, KindMark] = {
    "data": KindMark("d", "d", "#e69f00", "data"),
    "transfer": KindMark("t", "t", "#f0e442", "transfer"),
    "forward": KindMark("f", "f", "#56b4e9", "forward"),
    "backward": KindMark("b", "b", "#4169e1", "backward"),
    "communication": KindMark("═", "=", "#d070d0", "communication"),
    "waiting": KindMark("░", "~", "#ff5f00", "waiting"),
    "optimizer": KindMark("o", "o", "#009e40", "optimizer"),
    "evaluate": KindMark("e", "e", "#b0b0b0", "evaluate"),
    "checkpoint": KindMark("s", "s", "#8c564b", "saving"),
    "idle": KindMark("·", ".", "bright_black", "idle"),
}
NOT_FILLED = ("waiting", "idle")
# What a console without these characters gets instead, one for one, so that columns stay.
ASCII = str.maketrans({"µ": "u", "·": "|", "±": "~", "…": ".", "×": "x", "╵": "|", "–": "-", "→": ">"})


def mark_of(kind: str, ascii_only: bool) -> str:
    """Return the character with which a text view draws a kind of time, such as `forward`."""
    return MARKS[kind].plain if ascii_only else MARKS[kind].mark


def style_of(kind: str, filled: bool = True) -> str:
    """Return the style in which rich draws the character of a kind of time, such as `forward`: black on the kind's
    color.

    If `filled` is False, and for the kinds `waiting` and `idle`, the character has the color and no background.
    """
    colour = MARKS[kind].colour
    return f"black on {colour}" if filled and kind not in NOT_FILLED else colour


def legend(kinds: Iterable[str], width: int, ascii_only: bool) -> list[Text]:
    """Return a legend for a chart of these kinds of time, such as `forward`. It has lines of at most `width`
    characters, and the kinds in the order of MARKS.
    """
    present = set(kinds)
    lines = [Text(no_wrap=True)]
    for kind, mark in MARKS.items():
        if kind not in present:
            continue
        if lines[-1].plain and cell_len(lines[-1].plain) + len(mark.word) + 4 > width:
            lines.append(Text(no_wrap=True))
        if lines[-1].plain:
            lines[-1].append("  ")
        lines[-1].append(mark_of(kind, ascii_only), style_of(kind)).append(f" {mark.word}", "dim")
    return lines if lines[0].plain else []


def printable(text: str, ascii_only: bool) -> str:
    """Return `text` in characters that the console can show. With `ascii_only`, all other characters are replaced."""
    return text.translate(ASCII).encode("ascii", "replace").decode() if ascii_only else text
