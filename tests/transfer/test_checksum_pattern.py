"""The pattern that shows where bytes came from: no two keys or places alike, and every fault is located."""

from __future__ import annotations

import pytest
import torch

from meshwise.transfer.checksum import fill, first_wrong, words


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000, (8 << 20) + 5])
def test_what_was_filled_is_recognised_and_a_changed_byte_located(size: int) -> None:
    data = fill(torch.empty(size, dtype=torch.uint8), 3)
    assert first_wrong(data, 3) is None
    for at in {0, size // 2, size - 1} if size else ():
        data[at] ^= 1
        assert first_wrong(data, 3) == at
        data[at] ^= 1


def test_another_key_zeros_and_swapped_blocks_are_seen() -> None:
    data = fill(torch.empty(1 << 16, dtype=torch.uint8), 1)
    assert first_wrong(data, 2) is not None
    assert first_wrong(torch.zeros_like(data), 1) is not None
    for block in (8, 64, 4096):
        swapped = data.clone()
        swapped[:block], swapped[block : 2 * block] = data[block : 2 * block], data[:block]
        assert first_wrong(swapped, 1) is not None


def test_words_are_the_same_from_any_start_and_never_repeat() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(words(0, 100, 5, cpu)[40:], words(40, 60, 5, cpu))
    both = torch.cat([words(0, 50_000, key, cpu) for key in (-1, 0, 1, 7)])
    assert both.unique().numel() == both.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_with_a_rank_missing_or_twice_is_seen(dtype: torch.dtype) -> None:
    ranks = 4
    terms = [fill(torch.empty(1000, dtype=dtype), rank) for rank in range(ranks)]
    total = sum(terms)
    assert isinstance(total, torch.Tensor)
    assert first_wrong(total, 0, ranks) is None
    assert first_wrong(total - terms[2], 0, ranks) is not None
    assert first_wrong(total + terms[1], 0, ranks) is not None
    total[567] += 1
    assert first_wrong(total, 0, ranks) == 567
