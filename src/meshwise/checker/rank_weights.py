"""Solve for the weights by which ranks' gradients add up.

The gradients are those of each rank's own loss, before any exchange between ranks.

The plan's gradient is a weighted sum of these gradients, and so is one device's. Both sets of weights are found by
least squares over all parameters, on random projections, and count only if the residual is rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.checker.difference import LIMIT, largest
from meshwise.checker.noise import NOISE
from meshwise.checker.sketches import pieces
from meshwise.checker.trace import StepTrace

ROUNDING = 100 * LIMIT  # relative to the target, and loose because a step can magnify a difference of 1e-13


@dataclass(frozen=True)
class RankWeights:
    """The weights of the ranks' own gradients, one for each microbatch, on both sides; empty if none."""

    columns: list[tuple[int, int]]
    one: list[float]
    plan: list[float]
    unique: bool

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a weight, in ascending order."""
        return sorted({rank for rank, _ in self.columns})


def weights_in(reference: StepTrace, actual: StepTrace, names: Iterable[str] | None = None) -> RankWeights | None:
    """Find weights with which the ranks' own gradients add up to those of both sides."""
    own = {column: g for column, g in sorted(actual.own_gradients.items()) if g}
    most = NOISE * largest(reference.gradients.values())
    wanted = [n for n, g in reference.gradients.items() if largest([g]) > most] if names is None else list(names)
    held = [n for n in wanted if any(n in g for g in own.values())]
    if not held or (names is None and len(held) < len(wanted)):  # `own` lacks divided gradients: no rank has them whole
        return None
    columns = list[Tensor]()
    wanted_of: tuple[list[Tensor], list[Tensor]] = [], []
    for name in held:
        sides = [pieces(side.gradients[name]) if name in side.gradients else None for side in (reference, actual)]
        found = next(g[name] for g in own.values() if name in g)
        if any(side is not None and side.shape != found.shape for side in sides):
            return None
        size = max(float(t.norm()) for g in own.values() if (t := g.get(name)) is not None) or 1.0
        columns.append(torch.stack([g.get(name, torch.zeros_like(found)) for g in own.values()], 1) / size)
        for to, side in zip(wanted_of, sides, strict=True):
            to.append((torch.zeros_like(found) if side is None else side) / size)
    matrix = torch.cat(columns)
    there = [column for column, of in zip(own, matrix.T, strict=True) if bool(of.any())]
    matrix = matrix[:, matrix.any(0)]
    one, plan = (solve(matrix, torch.cat(side)) for side in wanted_of)
    unique = all(found is None or found[1] for found in (one, plan))
    return RankWeights(there, one[0] if one else [], plan[0] if plan else [], unique)


def solve(columns: Tensor, wanted: Tensor) -> tuple[list[float], bool] | None:
    """Return the weights with which `columns` add up to `wanted`, and whether they are unique."""
    if not bool(wanted.isfinite().all() and columns.isfinite().all()) or columns.shape[1] == 0:
        return None
    rank = int(torch.linalg.matrix_rank(columns, rtol=1e-8))
    if columns.shape[0] <= rank:
        return None
    weights = torch.linalg.lstsq(columns, wanted[:, None], rcond=1e-8, driver="gelsd").solution[:, 0]
    rest = float((columns @ weights - wanted).norm())
    return (weights.tolist(), rank == columns.shape[1]) if rest <= ROUNDING * float(wanted.norm()) else None


def shown(weights: Iterable[float]) -> str:
    """Format weights, separated by commas, for messages."""
    return ", ".join(f"{weight:.6g}" for weight in weights)
