"""Sketch tensors: project rows on a few fixed random directions.

Such projections keep distances (Johnson and Lindenstrauss, 1984).

The norm of a sketch is about the norm of its row. The distance of two sketches is about the distance of their rows. The
sketch of a sum is the sum of the sketches. Sketches take a thousandth of the memory.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from meshwise.torch_compat.modules import as_real
from meshwise.training.data.keyed import keyed_normal

DIRECTIONS = 8
PIECES = 16
LONGEST = 4096  # a longer row is cut into chunks of this length, each with a sketch of its own


def sketch(value: Tensor) -> Tensor:
    """Return a sketch of a whole tensor, as one row. A sketch is a projection on a few fixed random directions."""
    return _projected(as_real(value).reshape(1, -1))


def pieces(value: Tensor) -> Tensor:
    """Return a tensor's values as a vector, or a sketch of them if there are many."""
    flat = as_real(value).reshape(-1).to(torch.float64)
    if flat.numel() <= PIECES * DIRECTIONS:
        return flat.cpu()
    return _projected(nn.functional.pad(flat, (0, -flat.numel() % PIECES)).reshape(PIECES, -1)).flatten()


def sketches(value: Tensor, rows: int) -> dict[str, Tensor]:
    """Return sketches of a tensor for each way in which several ranks may divide it."""
    value = as_real(value)
    found = {"whole": sketch(value)}
    if value.dim() == 2:
        found["unordered"] = _projected(value).pow(3).sum(0, keepdim=True)
    if rows == 0:
        return found
    for dim in range(min(2, value.dim())):
        if value.shape[dim] % rows == 0:
            found[str(dim)] = _projected(value.transpose(0, dim).reshape(rows, value.numel() // rows))
    if value.dim() > 1 and value.shape[0] == rows:
        each = _projected(value.reshape(rows * value.shape[1], math.prod(value.shape[2:])))
        found["each"] = each.reshape(rows, value.shape[1], each.shape[1])
    return found


def row_sketches(value: Tensor) -> Tensor:
    """Return a sketch of each row along dimension 0."""
    return _projected(as_real(value).flatten(1) if value.dim() > 1 else value[:, None])


def _projected(rows: Tensor) -> Tensor:
    if rows.numel() == 0:
        return torch.zeros(len(rows), DIRECTIONS, dtype=torch.float64)
    if rows.shape[1] > LONGEST:
        rows = nn.functional.pad(rows, (0, -rows.shape[1] % LONGEST)).unflatten(1, (-1, LONGEST))
    return (rows.to(torch.float64) @ _directions(rows.shape[-1], rows.device.type)).flatten(1).cpu()


@lru_cache(maxsize=256)
def _directions(size: int, device: str) -> Tensor:
    return keyed_normal(size, (size, DIRECTIONS), torch.device("cpu")).div(math.sqrt(DIRECTIONS)).to(device)
