"""Prints: a tensor's rows, projected on a few fixed random directions.

The length of a print is about the length of its row, that of a difference of prints about that of the difference of the
rows, and a print of a sum is the sum of the prints: at a thousandth of the memory.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from meshwise.training.keyed import keyed_normal

DIRECTIONS = 8
LONGEST = 4096  # values that are projected together; a longer row has a print for each such piece


def print_of(value: Tensor) -> Tensor:
    """The print of a whole tensor, one row."""
    return _print(value.reshape(1, -1))


def prints_of(value: Tensor, rows: int) -> dict[str, Tensor]:
    """Prints of a tensor in every layout that it may have: `0` and `1` for the dim of the batch, `each` for samples and
    positions in them (samples, positions, ...), `whole`."""
    found = {"whole": print_of(value)}
    if rows == 0:
        return found
    if value.dim() > 0 and value.shape[0] % rows == 0:
        found["0"] = _print(value.reshape(rows, value.numel() // rows))
    if value.dim() > 1 and value.shape[1] % rows == 0:
        found["1"] = _print(value.transpose(0, 1).reshape(rows, value.numel() // rows))
    if value.dim() > 1 and value.shape[0] == rows:
        inner = math.prod(value.shape[2:])
        each = _print(value.reshape(rows * value.shape[1], inner))
        found["each"] = each.reshape(rows, value.shape[1], each.shape[1])
    return found


def _print(rows: Tensor) -> Tensor:
    if rows.numel() == 0:
        return torch.zeros(len(rows), DIRECTIONS, dtype=torch.float64)
    if rows.shape[1] > LONGEST:
        rows = nn.functional.pad(rows, (0, -rows.shape[1] % LONGEST)).unflatten(1, (-1, LONGEST))
    return (rows.to(torch.float64) @ _directions(rows.shape[-1], rows.device.type)).flatten(1).cpu()


@lru_cache(maxsize=256)
def _directions(size: int, device: str) -> Tensor:
    made = keyed_normal(size, (size, DIRECTIONS), torch.device("cpu")) / math.sqrt(DIRECTIONS)
    return made.to(device)
