"""Read durations as people write them."""

from __future__ import annotations

import re

from meshwise.spec.errors import UsageError

_UNITS = {"": 1, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)")


def seconds_of(text: str, what: str) -> float:
    """Parse a duration to seconds: `90`, `90s`, `10min`, `4h`, `1h30min`, `2d`, or as in Slurm `4:00:00`, `1-12:00:00`.

    Raises UsageError for any other text, and for a duration of 0.
    what: the name of the option, for error messages.
    """
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        total: float = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    else:
        parts = _PART.findall(text.lower())
        whole = "".join(number + unit for number, unit in parts) == re.sub(r"\s", "", text.lower())
        known = len({_UNITS[unit] for _, unit in parts if unit in _UNITS}) == len(parts)
        total = sum(float(number) * _UNITS[unit] for number, unit in parts) if whole and known else 0.0
    if total <= 0:
        raise UsageError(f"{what} {text} is not a duration. Write 90s, 10min, 4h, 1h30min or 4:00:00.")
    return total
