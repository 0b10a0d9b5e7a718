"""Compare what a script prints and logs on different device counts.

A script computes these numbers itself, so no trace has them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal

Printed = Sequence[tuple[str, str]]
"""Source lines of the script, such as train.py:31, each with a text that the line prints, in the order of printing."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[a-z]+")
_CLOSE = Decimal("1e-6")  # largest relative difference of numbers that count as equal: both sides compute in float64
MOMENT = Decimal("0.1")  # a number that changes by more than this fraction in a second run is measured, not rounded
_UNIT = re.compile(
    r"\s*([kmgt]?i?b|bytes|[nuµm]?s|secs?|seconds?|mins?|minutes?|m|h|hours?|devices?|ranks?|workers?|gpus?|processes)"
    r"(?![a-z])|\s*[a-z]*\s*(/|per)\s*(s|sec|second|min|minute)(?![a-z])|:\d",
    re.IGNORECASE,
)
MEASURED = {
    *("runtime", "second"),
    *("time", "elapsed", "took", "eta", "duration", "sec", "secs", "seconds", "ms", "dt", "fps", "speed", "throughput"),
    *("memory", "mem", "allocated", "reserved", "rss"),
    *("devices", "device", "rank", "ranks", "world", "workers", "gpus"),
}
"""Words that mark the number after them as a time, a speed, a size of memory, or a device count."""
ALONE = "This counts the samples of one rank only: use mw.sum(total) / mw.sum(count)."
"""The advice to the user if only printed numbers differ from one device, and all compared values are equal."""


def printed_otherwise(one: Printed, many: Printed, devices: str, again: Printed = ()) -> tuple[list[str], list[str]]:
    """Return sentences on lines that print other numbers on `devices`: wrong ones, harmless ones."""
    wrong, harmless = list[str](), list[str]()
    ours, theirs, once_more = map(_by_line, (one, many, again))
    for line in sorted(ours.keys() & theirs.keys()):
        for place, (text, other) in enumerate(zip(ours[line], theirs[line], strict=False)):
            apart = _apart(text, other)
            if not apart:
                continue
            says = f"{line} shows {other[:100]!r} on {devices} and {text[:100]!r} on one device"
            repeated = once_more[line][place] if len(once_more.get(line, ())) > place else text
            if all(_is_measured(text, n) or _is_of_the_moment(text, repeated, n) for n in apart):
                harmless.append(f"{says}: a time, memory or devices.")
            else:
                wrong.append(f"{says}.")
                break
    return wrong, list(dict.fromkeys(harmless))


def _by_line(shown: Printed) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line, text in shown:
        found[line].append(text)
    return found


def _apart(text: str, other: str) -> list[int]:
    """Return the positions of numbers that differ by more than their last printed digit."""
    numbers, others = _NUMBER.findall(text), _NUMBER.findall(other)
    if len(numbers) != len(others):
        return []
    return [n for n, pair in enumerate(zip(numbers, others, strict=True)) if not _close(*map(Decimal, pair))]


def numbers_apart(text: str, other: str, again: str) -> list[tuple[Decimal, Decimal]]:
    """Return the numbers that differ between two texts, except measurements."""
    numbers, others = _NUMBER.findall(text), _NUMBER.findall(other)
    measured = _apart(text, again)
    apart = [n for n in _apart(text, other) if n not in measured and not _is_measured(text, n)]
    return [(Decimal(numbers[n]), Decimal(others[n])) for n in apart]


def _close(a: Decimal, b: Decimal) -> bool:
    if a.as_tuple().exponent == b.as_tuple().exponent == 0:  # whole numbers are counts, which must be equal
        return a == b
    last = Decimal(1).scaleb(max(int(a.as_tuple().exponent), int(b.as_tuple().exponent)))
    return abs(a - b) <= max(last, _CLOSE * abs(a))


def _is_measured(text: str, number: int) -> bool:
    """Return whether the words around a number mark it as a time, a speed, a size of memory, or a device count."""
    found = list(_NUMBER.finditer(text))
    before = text[found[number - 1].end() if number else 0 : found[number].start()]
    clock = before == ":" and len(found[number][0]) == 2
    return (
        clock or bool(_UNIT.match(text, found[number].end())) or not MEASURED.isdisjoint(_WORD.findall(before.lower()))
    )


def _is_of_the_moment(text: str, again: str, number: int) -> bool:
    """Return whether a printed number changes greatly from one run on one device to the next."""
    numbers, others = _NUMBER.findall(text), _NUMBER.findall(again)
    if len(numbers) != len(others):
        return False
    a, b = Decimal(numbers[number]), Decimal(others[number])
    return not _close(a, b) and abs(a - b) > MOMENT * max(abs(a), abs(b))
