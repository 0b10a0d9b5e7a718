"""Read and write quantities with units: `80 GB`, `3.35 TB/s`, `4 µs`.

Decimal prefixes are powers of 1000 and binary ones (KiB, MiB, GiB, TiB) of 1024. Rates may also be given in
bits (`200 Gbit/s`), which become bytes.
"""

from __future__ import annotations

import re
from decimal import Decimal

from meshwise.spec.errors import UsageError, nearest

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": Decimal(10) ** power for prefix, power in _DECIMAL.items()} | {
    f"{prefix}B": Decimal(factor) for prefix, factor in _BINARY.items()
}
_BITS = {f"{prefix}bit/s": Decimal(10) ** power / 8 for prefix, power in _DECIMAL.items()}

UNITS: dict[str, dict[str, Decimal]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()} | _BITS,
    "FLOP/s": {f"{prefix}FLOP/s": Decimal(10) ** power for prefix, power in _DECIMAL.items()},
    "seconds": {
        "ns": Decimal("1e-9"),
        "µs": Decimal("1e-6"),
        "us": Decimal("1e-6"),
        "ms": Decimal("1e-3"),
        "s": Decimal(1),
    },
}
"""The units of each kind of quantity, with their factors to the base unit."""
EXAMPLES = {"bytes": "80 GB", "bytes/s": "450 GB/s", "FLOP/s": "989.5 TFLOP/s", "seconds": "4 µs"}
_WRITTEN = {  # units for output, largest first
    "bytes": ("TB", "GB", "MB", "kB", "B"),
    "bytes/s": ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "FLOP/s": ("TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"),
    "seconds": ("s", "ms", "µs", "ns"),
}
_BINARY_BYTES = ("TiB", "GiB", "MiB", "KiB")
_QUANTITY = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]+)\s*")


def read_quantity(text: object, kind: str, where: str) -> float:
    """Parse a text such as `80 GB`, and return it in bytes, bytes/s, FLOP/s or seconds.

    Raises UsageError unless the text is a positive finite number (seconds may be zero) with a unit of that kind.
    kind: a key of UNITS.
    where: the name of the value, for error messages.
    """
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    write = f'Write it as "{EXAMPLES[kind]}".'
    if found is None:
        raise UsageError(f"{where} = {value_text(text)} is not a number with a unit. {write}")
    units = UNITS[kind]
    if found[2] not in units:
        why = f"not a unit of {kind}.{nearest(found[2][:20], units)}"
        for other, known in UNITS.items():
            if found[2] in known:
                why = f"a unit of {other}, but {kind} are needed."
        raise UsageError(f"{where} = {value_text(text)}: '{found[2][:20]}' is {why} {write}")
    try:
        exact = Decimal(found[1])
        value = float(exact * units[found[2]])
    except (ArithmeticError, ValueError):
        raise UsageError(f"{where} = {value_text(text)} must be above zero and finite. {write}") from None
    if value == float("inf") or (value == 0 and (exact or kind != "seconds")):  # a time may be 0
        raise UsageError(f"{where} = {value_text(text)} must be above zero and finite. {write}")
    return value


def write_quantity(value: float, kind: str) -> str:
    """Format `value` with a unit, as the shortest text that `read_quantity` converts back to exactly the same
    number."""
    exact = Decimal(repr(float(value)))
    units = UNITS[kind]
    names = [*_WRITTEN[kind], *(_BINARY_BYTES if kind == "bytes" else ())]
    fitting = [unit for unit in names if exact >= units[unit]] or [_WRITTEN[kind][-1]]
    largest = {"i" in unit: unit for unit in reversed(fitting)}  # largest fitting decimal and binary unit
    texts = [f"{(exact / units[unit]).normalize():f} {unit}" for unit in largest.values()]
    return min(texts, key=len)


def value_text(value: object) -> str:
    """Format a value for an error message. A long text is cut."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers with thousands of digits, or lists nested too deep
        return "that value"
    return text if len(text) <= 60 else f"{text[:57]}…"
