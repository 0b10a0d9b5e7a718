"""Compute a position-dependent checksum of raw bits on the device.

The checksum of each block of 256 KiB is the sum, modulo 2^64, of its 32-bit words, each times a 64-bit odd key that
depends on the word's position: the multilinear hash of Carter and Wegman (1979). One changed word always changes the
sum, since an odd key times a difference below 2^32 is not 0 modulo 2^64; zeroed, swapped or shifted words go unnoticed
with a probability of at most 2^-31. Blocks are compared one by one, which locates a difference. NaNs are compared as
bits. Only the sums leave the device, no elements.

A bench sends a test pattern and checks it where it arrives: each 8-byte word is a hash of its key and index, so that a
permuted or stale part is detected. To check a sum, it uses small whole numbers, which add up exactly.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from meshwise.transfer.splitmix import GOLDEN, signed

BLOCK_WORDS = 1 << 16
BLOCK_BYTES = 4 * BLOCK_WORDS
_AT_ONCE = 16  # blocks that a device multiplies at once (8 MiB); the host takes one at a time, which fits in its cache
_ODD = signed(GOLDEN)  # also added to each sum, so that sums corrupted to zero are detected


def block_sums(tensor: Tensor) -> list[int]:
    """Return the checksum of each block of 256 KiB of the tensor's bits, in element order."""
    raw = _bits(tensor)
    whole = raw.numel() // BLOCK_BYTES
    keys = _keys(raw.device)
    sums = []
    blocks = raw[: whole * BLOCK_BYTES].view(torch.int32).view(-1, BLOCK_WORDS)
    step = 1 if raw.device.type == "cpu" else _AT_ONCE
    for start in range(0, whole, step):
        sums.append((blocks[start : start + step] * keys).sum(1))
    rest = raw[whole * BLOCK_BYTES :]
    if rest.numel():
        filled = torch.nn.functional.pad(rest, (0, -rest.numel() % 4)).view(torch.int32)
        sums.append((filled * keys[: filled.numel()]).sum(0, keepdim=True))
    return (torch.cat(sums) + _ODD).tolist() if sums else []


def first_difference(tensor: Tensor, other: Tensor) -> int | None:
    """Return the byte offset of the first difference between two tensors of equal shape and dtype, or None."""
    ours, theirs = block_sums(tensor), block_sums(other)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        if mine != its or mine == 0:
            start = number * BLOCK_BYTES
            here, there = (_bits(each)[start : start + BLOCK_BYTES].cpu() for each in (tensor, other))
            wrong = (here != there).nonzero()
            return start + (int(wrong[0]) if wrong.numel() else 0)
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bytes in order, in memory that is aligned to 4 bytes."""
    raw = raw_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    return raw.clone() if raw.storage_offset() % 4 else raw


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a uint8 tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    return words(0, BLOCK_WORDS, 0, device) | 1


_KEY = 0xD1B54A32D192ED03  # a second odd constant, which spreads the keys of `words`
_CHUNK = 1 << 20  # words generated at once: 8 MiB
LARGEST_TERM = 64  # with up to 2^17 ranks, every partial sum is exact in float32


def fill(tensor: Tensor, key: int) -> Tensor:
    """Write the test pattern of `key` to a contiguous tensor on any device, and return the tensor.

    A uint8 tensor gets bytes. Any other tensor gets whole numbers from 0 to 63, for a sum over ranks.
    """
    for start, part in _chunks(tensor):
        part.copy_(_pattern(start, part, key))
    return tensor


def first_wrong(tensor: Tensor, key: int, ranks: int = 1) -> int | None:
    """Return the index of the first element that differs from the test pattern of `key`. None if no element differs.

    tensor: a contiguous tensor.
    ranks: if above 1, `tensor` is the sum of the patterns of `key` to `key + ranks - 1`. It is exact in float32.
    """
    for start, part in _chunks(tensor):
        wrong = part != sum(_pattern(start, part, each) for each in range(key, key + ranks))
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


def _pattern(start: int, part: Tensor, key: int) -> Tensor:
    """Return the test pattern of a part that begins at element `start`."""
    if part.dtype == torch.uint8:
        return words(start // 8, (len(part) + 7) // 8, key, part.device).view(torch.uint8)[: len(part)]
    return words(start, len(part), key, part.device) & (LARGEST_TERM - 1)
