"""The checksum changes with any bit and any order, and only with those."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from meshwise.transfer.checksum import BLOCK_BYTES, block_sums, first_difference

SIZES = [1, 2, 3, 4, 5, 7, 8, 63, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 2]


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_one_flipped_bit_is_seen_where_it_is(size: int) -> None:
    data = random_bytes(size)
    other = data.clone()
    assert first_difference(data, other) is None and block_sums(data) == block_sums(other)
    for at in {0, size // 2, size - 1}:
        for bit in (1, 128):
            other[at] ^= bit
            assert first_difference(data, other) == at
            assert block_sums(data) != block_sums(other)
            other[at] ^= bit


@hypothesis.given(st.integers(0, 2**18 - 1), st.integers(0, 7))
def test_any_bit_of_zeros_or_of_anything_is_seen(at: int, bit: int) -> None:
    for data in (torch.zeros(2**18, dtype=torch.uint8), torch.full((2**18,), 255, dtype=torch.uint8)):
        before = block_sums(data)
        data[at] ^= 1 << bit
        assert block_sums(data) != before


@pytest.mark.parametrize("words", [1, 2, 16, 1024, BLOCK_BYTES // 4, BLOCK_BYTES // 2])
def test_two_swapped_blocks_are_seen_wherever_they_lie(words: int) -> None:
    data = torch.randn(6 * words + 4 * BLOCK_BYTES // 4)
    for start in (0, words, 3 * words):
        for distance in (words, 2 * words):
            other = data.clone()
            a, b = slice(start, start + words), slice(start + distance, start + distance + words)
            other[a], other[b] = data[b], data[a]
            assert (first_difference(data, other) or 0) // 4 >= start
            assert block_sums(data) != block_sums(other)


def test_swapped_values_that_differ_in_their_sign_alone_are_seen() -> None:
    # They differ in the top bit: a sum of products with odd 64-bit keys of 64-bit words would be blind to them.
    for dtype in (torch.float64, torch.float32, torch.int64):
        for at in range(1, 2000):
            data = torch.zeros(2000, dtype=dtype)
            data[0], data[at] = 3, -3
            other = data.clone()
            other[0], other[at] = -3, 3
            assert first_difference(data, other) == (0 if dtype == torch.int64 else dtype.itemsize - 1)


def test_zeros_instead_of_data_differ() -> None:
    data = random_bytes(100_000)
    assert first_difference(data, torch.zeros_like(data)) is not None
    assert 0 not in block_sums(torch.zeros(BLOCK_BYTES, dtype=torch.uint8))


def test_sums_that_are_read_as_zeros_are_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(100)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [0] * self.numel())
    assert first_difference(data, data) == 0


def test_nans_are_bits_and_layout_is_none() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00001, 0x7FC00002))
    assert first_difference(quiet, quiet.clone()) is None
    assert first_difference(quiet, other) == 0
    assert block_sums(torch.tensor([0.0])) != block_sums(torch.tensor([-0.0]))
    square = torch.randn(6, 6)
    assert block_sums(square.t()) == block_sums(square.t().contiguous()) != block_sums(square)
    z = torch.randn(5, dtype=torch.complex64)
    assert block_sums(z.conj()) == block_sums(z.conj().resolve_conj()) != block_sums(z)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1)])
def test_small_shapes_of_any_stride(shape: tuple[int, ...]) -> None:
    spaced = torch.ones([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]
    assert block_sums(spaced) == block_sums(torch.ones(shape))
    assert first_difference(spaced, torch.ones(shape)) is None


def test_bytes_at_any_offset_of_their_storage() -> None:
    data = random_bytes(1000)
    for start in range(9):
        part = data[start : start + 500]
        assert block_sums(part) == block_sums(part.clone())
