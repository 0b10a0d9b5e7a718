"""Hash whole numbers to random-looking bits with SplitMix64.

The bits depend only on the numbers (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd: multiplying by it spreads consecutive integers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(*numbers: int) -> int:
    """Mix `numbers` into one seed below 2**32. torch's CPU generator uses no more than 32 bits of a seed."""
    key = 0
    for number in numbers:
        key = (key + number + GOLDEN) % 2**64
        key = (key ^ (key >> 30)) * _FIRST % 2**64
        key = (key ^ (key >> 27)) * _SECOND % 2**64
        key ^= key >> 31
    return key % 2**32


def mixed_bits(bits: Tensor) -> Tensor:
    """Apply the final mixing step of SplitMix64 to each 64-bit integer of a tensor."""
    bits = (bits ^ shifted(bits, 30)) * signed(_FIRST)
    bits = (bits ^ shifted(bits, 27)) * signed(_SECOND)
    return bits ^ shifted(bits, 31)


def signed(number: int) -> int:
    """Return the lower 64 bits of `number` as a signed integer, as torch's int64 needs."""
    return (number + 2**63) % 2**64 - 2**63


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shift int64 values right by `by` bits, filling with zeros; torch's own shift would copy the sign bit."""
    right: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return right
