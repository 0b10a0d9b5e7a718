"""What a script prints and logs on one device and on several: numbers that it computes itself, which no trace has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal

Shown = Sequence[tuple[str, str]]
"""Lines of the script, such as train.py:31, and what each shows, in order."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_CLOSE = Decimal("1e-6")  # of the number's size: both sides compute in float64


def shown_otherwise(one: Shown, many: Shown, devices: str) -> Iterator[str]:
    """A sentence for each line of the script that shows other numbers on `devices` than on one device."""
    ours, theirs = _by_line(one), _by_line(many)
    for line in ours.keys() & theirs.keys():
        for text, other in zip(ours[line], theirs[line], strict=False):
            if not _alike(text, other):
                yield (
                    f"{line} shows {other[:100]!r} on {devices} and {text[:100]!r} on one device. Harmless where it is "
                    "a time or memory; else it counts this rank's samples alone: use mw.sum(total) / mw.sum(count)."
                )
                break


def _by_line(shown: Shown) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line, text in shown:
        found[line].append(text)
    return found


def _alike(text: str, other: str) -> bool:
    """Whether the numbers in both are the same but for the last digit that is shown."""
    numbers, others = _NUMBER.findall(text), _NUMBER.findall(other)
    return len(numbers) != len(others) or all(map(_close, map(Decimal, numbers), map(Decimal, others)))


def _close(a: Decimal, b: Decimal) -> bool:
    last = Decimal(1).scaleb(max(int(a.as_tuple().exponent), int(b.as_tuple().exponent)))
    return abs(a - b) <= max(last, _CLOSE * abs(a))
