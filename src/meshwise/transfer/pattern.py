"""Generate data from a key and offset, to verify delivery.

The data shows whether bytes arrive unchanged and at the right position.

Constant data would hide a permuted all-gather, and data with a short period would hide two swapped blocks. So each
8-byte word is a hash of its key and index, and every bit is compared. Sums are checked with small whole numbers, which
add up exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwise.transfer.splitmix import GOLDEN, signed

_ODD = signed(GOLDEN)
_KEY = 0xD1B54A32D192ED03  # another odd constant, from the same family of hashes
_CHUNK = 1 << 20  # words that are made at once: 8 MiB
LARGEST_TERM = 64  # of a sum: with up to 2^17 ranks every partial sum is exact in float32


def fill(tensor: Tensor, key: int) -> Tensor:
    """Write the test pattern of `key` to a contiguous uint8 tensor on any device, and return the tensor."""
    for start, part in _chunks(tensor):
        part.copy_(_bytes(start, part.numel(), key, part.device))
    return tensor


def first_difference(tensor: Tensor, key: int) -> int | None:
    """Return the offset of the first byte that differs from the test pattern of `key`. None if no byte differs.

    tensor: a contiguous uint8 tensor.
    """
    for start, part in _chunks(tensor):
        expected = _bytes(start, part.numel(), key, part.device)
        if not torch.equal(part, expected):
            return start + int((part != expected).nonzero()[0])
    return None


def fill_terms(tensor: Tensor, rank: int) -> Tensor:
    """Fill a contiguous floating-point tensor with test values for a sum over ranks, and return the tensor.

    The values are whole numbers from 0 to 63, and differ between ranks. `first_wrong_sum` checks the sum.
    """
    for start, part in _chunks(tensor):
        part.copy_(_terms(start, part.numel(), rank, part.device))
    return tensor


def first_wrong_sum(tensor: Tensor, ranks: int, first: int = 0) -> int | None:
    """Check a sum over ranks of tensors that `fill_terms` has filled. Return the index of the first wrong element, or
    None if all elements are right.

    tensor: the sum over the ranks `first` to `first + ranks - 1`. It is exact in float32.
    """
    for start, part in _chunks(tensor):
        expected = sum(_terms(start, part.numel(), rank, part.device) for rank in range(first, first + ranks))
        wrong = part.to(torch.int64) != expected
        if bool(wrong.any()):
            return start + int(wrong.nonzero()[0])
    return None


def _chunks(tensor: Tensor) -> list[tuple[int, Tensor]]:
    size = _CHUNK * 8 if tensor.dtype == torch.uint8 else _CHUNK
    flat = tensor.view(-1)
    return [(start, flat[start : start + size]) for start in range(0, flat.numel(), size)]


def words(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return `count` 8-byte words of the test pattern of `key`, from word number `first` on, as int64."""
    made = torch.arange(first, first + count, dtype=torch.int64, device=device)
    made.add_(1).mul_(_ODD).add_(signed(key * _KEY))
    made.bitwise_xor_(made >> 29).mul_(_ODD)
    return made.bitwise_xor_(made >> 32)


def _bytes(start: int, count: int, key: int, device: torch.device) -> Tensor:
    return words(start // 8, (count + 7) // 8, key, device).view(torch.uint8)[:count]


def _terms(start: int, count: int, rank: int, device: torch.device) -> Tensor:
    return words(start, count, rank + 1, device) & (LARGEST_TERM - 1)
