"""Read message sizes such as `1K:1G`, and fit them to memory.

This is done before anything is allocated.
"""

from __future__ import annotations

import re

from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text

DEFAULT = "1K:1G"
FACTOR = 4
SHARE_OF_MEMORY = 0.8
"""The share of free memory that may be used for buffers. The program needs the rest."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WRITE = "Write --sizes 1K:1G, one size (64M), or 1K:1G:2 to double from size to size."


def read_sizes(words: str) -> tuple[int, ...]:
    """Parse a range of sizes. Raises UsageError if the words are not a range of sizes.

    `1K:1G` means 1 KiB, 4 KiB and so on to 1 GiB. `1K:1G:2` doubles from size to size. `64M` is one size.
    """
    parts = words.strip().split(":")
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"--sizes {words} is not a range of sizes. {_WRITE}")
    first = _size(words, parts[0])
    last = _size(words, parts[1]) if len(parts) > 1 else first
    factor = int(parts[2]) if len(parts) == 3 and parts[2].isdigit() else FACTOR if len(parts) < 3 else 0
    if last < first:
        raise UsageError(f"--sizes {words}: the range must begin with the smaller size. {_WRITE}")
    if factor < 2:
        raise UsageError(f"--sizes {words}: the factor must be a whole number of at least 2. {_WRITE}")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes) if sizes[-1] == last else (*sizes, last)


def fitting(sizes: tuple[int, ...], free: int, buffers: int, asked: bool) -> tuple[int, ...]:
    """Return the message sizes for which there is enough memory. Measuring a size takes `buffers` buffers of that size,
    which may use at most SHARE_OF_MEMORY of the `free` bytes. The smallest size is always returned.

    asked: True if the user chose the sizes. UsageError is then raised if any size needs too much memory.
    """
    most = int(free * SHARE_OF_MEMORY) // buffers
    small = tuple(size for size in sizes if size <= most)
    if asked and len(small) < len(sizes):
        most_word = _word(most) if sizes[0] > most else f"{_word(sizes[0])}:{_word(most)}"
        raise UsageError(
            f"--sizes: to measure {bytes_text(sizes[-1])}, {buffers} buffers with {bytes_text(sizes[-1] * buffers)} in "
            f"all are needed, but only {bytes_text(free)} are free. Write at most --sizes {most_word}."
        )
    return small or sizes[:1]


def _size(words: str, text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or not 1 <= int(found[1]) * _UNITS[found[2].upper()] <= 1 << 50:
        raise UsageError(f"--sizes {words}: '{text}' is not a size. {_WRITE}")
    return int(found[1]) * _UNITS[found[2].upper()]


def _word(size: int) -> str:
    """Round a size down to a power of two, and format it for --sizes, such as `64M`."""
    power = 1 << max(size.bit_length() - 1, 0)
    unit = next((unit for unit in "TGMK" if power >= _UNITS[unit]), "")
    return f"{power // _UNITS[unit]}{unit}"
