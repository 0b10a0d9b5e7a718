"""How far the outputs of a module are apart: samples of the ranks, put together, against those of one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwise.equivalence.seen import Output
from meshwise.equivalence.sizes import FLOOR, LIMIT, ratio


def outputs_apart(one: Output, plan: Output) -> tuple[float, float] | None:
    """Relative and absolute size of the difference of two calls; None where they cannot be compared.

    Ranks may have had other samples, or more of them, than one device: nothing is taken for granted.
    """
    if len(one.shapes) != 1 or not plan.shapes:
        return None
    (shape,), (rows,) = one.shapes, one.rows
    for layout, dim in (("0", 0), ("1", 1)):
        if layout in one.prints and all(
            _is_part(shape, rows, s, r, dim) for s, r in zip(plan.shapes, plan.rows, strict=True)
        ):
            parts = plan.prints.get(layout, ())
            if len(parts) == len(plan.shapes) and sum(map(len, parts)) == len(one.prints[layout][0]):
                return _rows_apart(one.prints[layout][0], torch.cat(parts))
    if "each" in one.prints and all(
        _is_shorter(shape, rows, s, r) for s, r in zip(plan.shapes, plan.rows, strict=True)
    ):
        sizes = _positions_apart(one.prints["each"][0], plan.prints.get("each", ()))
        if sizes and all(
            relative <= LIMIT for relative, _ in sizes
        ):  # of padding alone, where they differ, or of more: unknown
            return max(sizes)
    if plan.shapes and all(s == shape for s in plan.shapes):  # equal on every rank: not of the batch, and equal then
        sizes = [_rows_apart(one.prints["whole"][0], part) for part in plan.prints["whole"]]
        if all(relative <= LIMIT for relative, _ in sizes):
            return max(sizes)
    return None


def _is_part(whole: Sequence[int], total: int, shape: Sequence[int], rows: int, dim: int) -> bool:
    return (
        len(whole) == len(shape)
        and len(whole) > dim
        and whole[dim] * rows == shape[dim] * total
        and all(a == b for d, (a, b) in enumerate(zip(whole, shape, strict=True)) if d != dim)
    )


def _is_shorter(whole: Sequence[int], total: int, shape: Sequence[int], rows: int) -> bool:
    """Whether a rank's samples are padded to fewer positions than those of one device."""
    return (
        len(whole) == len(shape)
        and len(whole) > 1
        and whole[0] * rows == shape[0] * total
        and shape[1] <= whole[1]
        and whole[2:] == shape[2:]
    )


def _positions_apart(mine: Tensor, ranks: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Each rank's samples against theirs on one device, as far as the rank's go. Empty where they are not as many."""
    if sum(map(len, ranks)) != len(mine):
        return []
    parts = mine.split([len(part) for part in ranks])
    return [
        _rows_apart(part[:, : own.shape[1]].flatten(0, 1), own.flatten(0, 1))
        for part, own in zip(parts, ranks, strict=True)
        if own.numel()
    ]


def _rows_apart(mine: Tensor, other: Tensor) -> tuple[float, float]:
    lengths, apart = mine.norm(dim=1), (other - mine).norm(dim=1)
    scale = lengths.clamp(min=FLOOR * float(lengths.max()) if len(lengths) else 0.0)
    return ratio(apart, scale), float(apart.max()) if len(apart) else 0.0
