"""How much the outputs of a module differ: samples of the ranks, put together, against those of one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwise.equivalence.tolerance import FLOOR, LIMIT, apart, largest, ratio
from meshwise.equivalence.trace import Output


def output_difference(one: Output, ranks: Sequence[Output]) -> tuple[float, float] | None:
    """Relative and absolute size of the difference of a call on one device and on ranks; None where they cannot be
    compared.

    Ranks may have had other samples, or more of them, than one device: nothing is taken for granted.
    """
    for layout, dim in (("0", 0), ("1", 1)):
        parts = [rank.sketches[layout] for rank in ranks if layout in rank.sketches]
        if layout in one.sketches and len(parts) == len(ranks) and _fits(one, ranks, dim):
            mine = one.sketches[layout]
            if sum(map(len, parts)) == len(mine):
                found = rows_difference(mine, torch.cat(parts))
                return None if found[0] > LIMIT and _same_rows(one, ranks) else found
    sizes = []
    if "each" in one.sketches and _fits(one, ranks, 0, padded=True):
        each = [rank.sketches["each"] for rank in ranks if "each" in rank.sketches]
        sizes = _positions_difference(one.sketches["each"], each)
    if not _all_equal(sizes) and all(rank.shape == one.shape for rank in ranks):  # the same on every rank
        sizes = [rows_difference(one.sketches["whole"], rank.sketches["whole"]) for rank in ranks]
    return max(sizes) if _all_equal(sizes) else None  # of what differs it is not known whether it is of the samples


def _same_rows(one: Output, ranks: Sequence[Output]) -> bool:
    """Whether the ranks have the rows of one device in another order: tokens, sorted by the expert that they go to."""
    parts = [rank.sketches["unordered"] for rank in ranks if "unordered" in rank.sketches]
    if "unordered" not in one.sketches or len(parts) < len(ranks):
        return False
    return rows_difference(one.sketches["unordered"], torch.stack(parts).sum(0))[0] <= LIMIT


def _all_equal(sizes: Sequence[tuple[float, float]]) -> bool:
    return bool(sizes) and all(relative <= LIMIT for relative, _ in sizes)


def _fits(one: Output, ranks: Sequence[Output], dim: int, padded: bool = False) -> bool:
    """Whether what each rank has is a part of what one device has, in dim `dim`.

    padded: a rank's samples may have fewer positions in dim 1.
    """
    return all(
        len(one.shape) == len(rank.shape) > max(dim, int(padded))
        and one.shape[dim] * rank.rows == rank.shape[dim] * one.rows
        and all(
            a == b or (padded and d == 1 and b < a)
            for d, (a, b) in enumerate(zip(one.shape, rank.shape, strict=True))
            if d != dim
        )
        for rank in ranks
    )


def _positions_difference(mine: Tensor, ranks: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Each rank's samples against theirs on one device, as far as the rank's go. Empty where they are not as many."""
    if sum(map(len, ranks)) != len(mine):
        return []
    parts = mine.split([len(part) for part in ranks])
    return [
        rows_difference(part[:, : own.shape[1]].flatten(0, 1), own.flatten(0, 1))
        for part, own in zip(parts, ranks, strict=True)
        if own.numel()
    ]


def rows_difference(mine: Tensor, other: Tensor) -> tuple[float, float]:
    """Of sketches: what is not finite in a row makes its sketch so, on both sides."""
    lengths, difference = mine.norm(dim=1), apart(other, mine).norm(dim=1)
    scale = lengths.nan_to_num(0.0, 0.0).clamp(min=FLOOR * largest([lengths]))
    return ratio(difference, scale), float(difference.max()) if len(difference) else 0.0
