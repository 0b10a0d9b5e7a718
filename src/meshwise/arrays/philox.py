"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): 64 random bits of a key and a count, on any device.

torch calculates with signed 64-bit integers: a product of two 32-bit numbers keeps all its bits in one, and a mask
after a shift gives them as unsigned ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
BLOCK = 1 << 15
"""Counts that are turned into bits at a time on a CPU, so that they stay in its cache."""


def words(low: Tensor, high: Tensor, stream: int, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits for each count, whose lower and upper word are given, in int64."""
    a, b = low, high
    c, d = torch.full_like(low, stream & _LOW), torch.full_like(low, stream >> 32 & _LOW)
    k0, k1 = key & _LOW, key >> 32 & _LOW
    for _ in range(_ROUNDS):
        first, second = _product(a, _MULTIPLIERS[0]), _product(c, _MULTIPLIERS[1])
        a, b, c, d = second[1] ^ b ^ k0, second[0], first[1] ^ d ^ k1, first[0]
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d


def _product(words: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """(lower, upper) word of a product of words."""
    found = words * by
    return found & _LOW, (found >> 32) & _LOW


def bits(first: int, count: int, stream: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(upper, lower) 32 bits of the elements from `first` on: each a function of its index, stream and key alone.

    Two elements share a count: the even one has its first two words, the odd one the other two.
    """
    begin, end = first // 2, (first + count + 1) // 2
    upper = torch.empty(2 * (end - begin), dtype=torch.int64, device=device)
    lower = torch.empty_like(upper)
    step = BLOCK if device.type == "cpu" else max(end - begin, 1)
    for at in range(begin, end, step):
        counts = torch.arange(at, min(at + step, end), dtype=torch.int64, device=device)
        a, b, c, d = words(counts & _LOW, (counts >> 32) & _LOW, stream, key)
        place = slice(2 * (at - begin), 2 * (at - begin + len(counts)))
        upper[place] = torch.stack([a, c], 1).view(-1)
        lower[place] = torch.stack([b, d], 1).view(-1)
    skip = first - 2 * begin
    return upper[skip : skip + count], lower[skip : skip + count]
