"""Shorten names and clean foreign texts for use in a sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_LINES, MOST_CHARACTERS = 20, 2000
"""The most shown of a foreign text, such as an exception's: a screenful."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Write `rank 1`, `ranks 0, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def readable(text: str) -> str:
    """Return a foreign text without control characters, cut at a screenful."""
    whole = without_control(text)
    lines = whole.splitlines()
    cut = "\n".join(lines[:MOST_LINES])[:MOST_CHARACTERS]
    left = len(whole.rstrip()) - len(cut.rstrip())
    return cut if left <= 0 else f"{cut} … ({left:,} more characters)"


def without_control(text: str) -> str:
    """Remove from a foreign text what moves a cursor, colours a terminal or rings its bell."""
    return _CONTROL.sub("", text)


def printable(text: str) -> str:
    """Return a file's text without control characters and lone surrogates, which no terminal takes."""
    return without_control(text.encode("utf-8", "replace").decode("utf-8"))


def error_text(error: BaseException) -> str:
    """Write `ValueError: no such layer`, readable; an error without text is only its name."""
    text = readable(text_of(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(thing: object) -> str:
    """Return `str(thing)`, also for the user's classes, where that may fail."""
    try:
        return str(thing)
    except Exception:
        return "(its text cannot be made)"
