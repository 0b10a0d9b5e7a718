"""What a predictor from the byte before needs for a text: a figure to compare a model of bytes with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def bigram_entropy(train: Sequence[bytes], held_out: Sequence[bytes]) -> float:
    """Nats a byte that a predictor from the byte before needs on `held_out`; its counts are from `train`, plus one."""
    counts = torch.ones(256, 256, dtype=torch.float64)
    for pairs, number in map(_pairs, train):
        counts.view(-1).index_add_(0, pairs, number)
    surprise = -(counts / counts.sum(1, keepdim=True)).log().view(-1)
    total = sum(float((surprise[pairs] * number).sum()) for pairs, number in map(_pairs, held_out))
    return total / sum(max(len(text) - 1, 0) for text in held_out)


def _pairs(text: bytes) -> tuple[Tensor, Tensor]:
    """Which pairs of neighbouring bytes a text has, as first * 256 + second, and how often."""
    if len(text) < 2:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pairs, counts = (codes[:-1] * 256 + codes[1:]).unique(return_counts=True)
    return pairs, counts.double()
