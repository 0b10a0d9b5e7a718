"""Shorten lists of names, and clean texts from outside meshwise, for sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_LINES, MOST_CHARACTERS = 20, 2000
"""The maximum number of lines and characters to show of a foreign text, such as the message of an exception."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def some(names: Iterable[object], most: int = 3) -> str:
    """Format the first `most` names, and the number of the other names: `a, b, c and 4 more`."""
    shown = list(map(str, names))
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 1` or `ranks 0, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def readable(text: str) -> str:
    """Clean a text from outside meshwise, such as the message of an exception, so that it can be printed.

    Control characters are removed. A text that is longer than a screenful is cut, and ends with the number of omitted
    characters.
    """
    whole = without_control(text)
    lines = whole.splitlines()
    cut = "\n".join(lines[:MOST_LINES])[:MOST_CHARACTERS]
    left = len(whole.rstrip()) - len(cut.rstrip())
    return cut if left <= 0 else f"{cut} … ({left:,} more characters)"


def without_control(text: str) -> str:
    """Remove control characters, such as those that move the cursor or color the text, from a text."""
    return _CONTROL.sub("", text)


def printable(text: str) -> str:
    """Return a file's text without control characters and lone surrogates, which a terminal cannot print."""
    return without_control(text.encode("utf-8", "replace").decode("utf-8"))


def error_text(error: BaseException) -> str:
    """Format an error as `ValueError: no such layer`. An error without a text becomes the name of its type.

    Control characters are removed, and a long text is cut to a screenful.
    """
    text = readable(text_of(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(thing: object) -> str:
    """Return `str(thing)`. If that raises, as it may for a user's class, return a substitute."""
    try:
        return str(thing)
    except Exception:
        return "(its text cannot be made)"
