"""Define a character and a color for each kind of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True)
class KindMark:
    """How one kind of time, such as forward or communication, is drawn."""

    mark: str
    colour: str
    word: str


# The colors of Okabe and Ito (https://jfly.uni-koeln.de/color/). Color-blind people can tell them apart, and they stay
# different on terminals with 16 colors.
MARKS: Mapping[str, KindMark] = {
    "data": KindMark("d", "#e69f00", "data"),
    "transfer": KindMark("t", "#f0e442", "transfer"),
    "forward": KindMark("f", "#56b4e9", "forward"),
    "backward": KindMark("b", "#4169e1", "backward"),
    "communication": KindMark("═", "#d070d0", "communication"),
    "waiting": KindMark("░", "#ff5f00", "waiting"),
    "optimizer": KindMark("o", "#009e40", "optimizer"),
    "evaluate": KindMark("e", "#b0b0b0", "evaluate"),
    "checkpoint": KindMark("s", "#8c564b", "saving"),
    "idle": KindMark("·", "bright_black", "idle"),
}
NOT_FILLED = ("waiting", "idle")
GLUE = "\ue000"  # stands for a space at which a line must not break
# Replacements for consoles without these characters. Each is one character, so that columns stay aligned.
ASCII = str.maketrans("µ·±…×╵–→═░█▉▊▋▌▍▎▏", "u.~.x|->=~#####   ")


def style_of(kind: str, filled: bool = True) -> str:
    """Return rich's style for the character of a kind of time, such as `forward`: black on the kind's color.

    If `filled` is False, or the kind is `waiting` or `idle`, the character itself has the color, without a background.
    """
    colour = MARKS[kind].colour
    return f"black on {colour}" if filled and kind not in NOT_FILLED else colour


def legend(kinds: Iterable[str]) -> Text:
    """Return a legend for a chart of these kinds of time, such as `forward`, to be wrapped by `Screen.wrap`."""
    marks = {kind: MARKS[kind] for kind in kinds}
    return Text("  ").join(
        Text.assemble((mark.mark, style_of(kind)), (f"{GLUE}{mark.word}", "dim")) for kind, mark in marks.items()
    )


def printable(text: str, ascii_only: bool) -> str:
    """Return `text` in characters that the console can show. With `ascii_only`, all other characters are replaced."""
    return text.translate(ASCII).encode("ascii", "replace").decode() if ascii_only else text
