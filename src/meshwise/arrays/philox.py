"""Generate counter-based random bits with Philox4x32-10, on any device.

A key and a counter give 128 random bits (Salmon, Moraes, Dror, Shaw, SC 2011).

torch calculates with signed 64-bit integers. One such integer holds all bits of a product of two 32-bit numbers, and a
mask after a shift gives its upper half as an unsigned number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def words(low: Tensor, high: Tensor, stream: int, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words for each value of a 64-bit counter, as int64 tensors."""
    a, b = low, high
    c, d = torch.full_like(low, stream & _LOW), torch.full_like(low, stream >> 32 & _LOW)
    k0, k1 = key & _LOW, key >> 32 & _LOW
    for _ in range(_ROUNDS):
        first, second = _product(a, _MULTIPLIERS[0]), _product(c, _MULTIPLIERS[1])
        a, b, c, d = second[1] ^ b ^ k0, second[0], first[1] ^ d ^ k1, first[0]
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d


def _product(words: Tensor, by: int) -> tuple[Tensor, Tensor]:
    found = words * by
    return found & _LOW, (found >> 32) & _LOW


def bits(first: int, count: int, stream: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 64 random bits for each of `count` elements from index `first` on, as (upper 32 bits, lower 32 bits)."""
    begin, end = first // 2, (first + count + 1) // 2
    counts = torch.arange(begin, end, dtype=torch.int64, device=device)
    a, b, c, d = words(counts & _LOW, (counts >> 32) & _LOW, stream, key)
    skip = first - 2 * begin
    upper, lower = torch.stack([a, c], 1).view(-1), torch.stack([b, d], 1).view(-1)
    return upper[skip : skip + count], lower[skip : skip + count]


def bits_at(index: Tensor, stream: int, key: int) -> tuple[Tensor, Tensor]:
    """Return 64 random bits for the elements at these indices, in any order, as (upper 32 bits, lower 32 bits)."""
    counts, odd = index >> 1, (index & 1).bool()
    a, b, c, d = words(counts & _LOW, (counts >> 32) & _LOW, stream, key)
    return torch.where(odd, c, a), torch.where(odd, d, b)
