"""Format bytes, seconds, counts and rates for people to read.

A number that is not finite is formatted as `unknown`.
"""

from __future__ import annotations

import math

BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """Format bytes as `512 B`, `1.0 KiB` or `61.2 GiB` (1 KiB is 1024 bytes)."""
    if not math.isfinite(count):
        return "unknown"
    if abs(count) < 1023.5:  # a value that would round to 1024 takes the next unit
        return f"{count:.0f} B"
    value, power = count / 1024, 0
    while abs(value) >= 1023.95 and power < len(BYTE_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.1f} {BYTE_UNITS[power]}"


def seconds_text(seconds: float) -> str:
    """Format seconds as `85 µs`, `412 ms`, `3.2 s`, `2 min 05 s` or `1 h 02 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"  # one decimal, so that short steps can be told apart
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return _minutes_text(seconds)


def count_text(count: float) -> str:
    """Format a count as `12,300`, rounded to a whole number."""
    return f"{count:,.0f}" if math.isfinite(count) else "unknown"


def percent_text(share: float, digits: int = 0) -> str:
    """Format a share from 0 to 1 as `18 %`, with `digits` decimals; as `<1 %` if it is above 0 but rounds to 0 %."""
    if not math.isfinite(share):
        return "unknown"
    return "<1 %" if digits == 0 and 0 < share < 0.005 else f"{100 * share:.{digits}f} %"


def plural(count: float, noun: str) -> str:
    """Format a count with its noun: `1 step`, `4,690 steps`."""
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"


def rate_text(rate: float) -> str:
    """Format a number of things per second: `12,300`; below 10, `3.4` or `0.052`."""
    if not math.isfinite(rate) or rate >= 10 or rate <= 0:
        return count_text(rate)
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def whole_seconds_text(seconds: float) -> str:
    """Format a time that counts down on a screen, such as `8 s`. It has no tenths, which would flicker, and is never
    below `1 s`."""
    return seconds_text(max(1, round(seconds)) if math.isfinite(seconds) else seconds).replace(".0 s", " s")


def bandwidth_text(rate: float) -> str:
    """Format bytes/s as `55.4 GB/s` or `812 MB/s`, with three digits. 1 GB is 10^9 bytes, as in the data sheets of
    links."""
    return _scaled(rate, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def flops_text(rate: float) -> str:
    """Format FLOP/s as `989 TFLOP/s`, with three digits."""
    return _scaled(rate, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return "unknown"
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value) >= 99.95 or power == 0 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def _minutes_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"
