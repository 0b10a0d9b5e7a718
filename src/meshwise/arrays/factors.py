"""Factor a matrix that is divided over devices, in blocks.

LU factors a matrix that is sharded by columns, Cholesky a matrix that is sharded by rows. QR and SVD factor tall
matrices.

Elements moved, for an n x n matrix on p devices, where device k holds n_k columns (or rows) from index o_k on:

    LU, solve, inv    a transpose, unless the matrix is sharded by columns; each panel of (n - o_k) n_k elements to all
                      later devices; a right-hand side of r columns passes from each device to the next, with
                      r (n - o_k) elements on the way forward and r o_k on the way back
    Cholesky          each diagonal block of n_k^2 to all later devices; block (j, k), of n_j n_k, to those after j
    QR, SVD (m x n)   each factor R, of min(m_k, n) n elements, to the device of the longest part, and as much back
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array, like, numbered
from meshwise.arrays.indexing import counted
from meshwise.arrays.lanes import fullest
from meshwise.arrays.moves import Move, exchange, reshard
from meshwise.arrays.sharding import evenly, sharding

Own = dict[int, Tensor]
"""Tensors of the local parts, by the number of the part."""


class _Moves:
    """Sends tensors between the devices that hold the parts of a sharded matrix."""

    def __init__(self, x: Array, name: str) -> None:
        self.x, self.held, self.name = x, x.sharding, name
        self.here = [part for part, _ in numbered(x)]
        self.filled = [part for part, size in enumerate(x.sharding.sizes) if size]

    def send(
        self,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        source: int,
        targets: Iterable[int],
        dtype: torch.dtype | None = None,
    ) -> Own:
        """Send a tensor from part `source` to the parts `targets`, and return the copies that arrived at local
        parts."""
        places = self.held.places
        pieces = [Move(places[source], places[k], k, shape, dtype or self.x.dtype, tensor) for k in targets]
        found = exchange(self.x.space, pieces, self.name)
        return {k: found[k] for k in self.here if k in found}

    def check(self, bad: Own, why: str) -> None:
        """Raise LinAlgError on all ranks if LAPACK failed for a part on any rank."""
        told = [int(bad[k]) if k in bad else 0 for k in self.here]
        if any(counted(self.x, self.held, told)):
            raise np.linalg.LinAlgError(f"{self.name}: {why}")


def cholesky(x: Array) -> Array:
    """Return the lower Cholesky factor of a Hermitian matrix."""
    n = x.shape[0]
    x = x if x.sharding.dim == 0 else reshard(x, evenly(n, x.sharding.places), "cholesky")
    held, moves = x.sharding, _Moves(x, "cholesky")
    rows = {k: part.clone() for k, part in numbered(x)}
    bad: Own = {}
    for k in moves.filled:
        begin, width = held.offsets[k], held.sizes[k]
        block = slice(begin, begin + width)
        later = [j for j in moves.filled if j > k]
        if k in rows:
            made, bad[k] = torch.linalg.cholesky_ex(rows[k][:, block])
            rows[k][:, block] = made
        corner = moves.send(rows[k][:, block] if k in rows else None, (width, width), k, later)
        for j, factor in corner.items():
            below = rows[j][:, block]
            rows[j][:, block] = torch.linalg.solve_triangular(factor.mH, below, upper=True, left=False)
        for j in later:
            panel = rows[j][:, block] if j in rows else None
            for i, factor in moves.send(panel, (held.sizes[j], width), j, [i for i in later if i >= j]).items():
                columns = slice(held.offsets[j], held.offsets[j] + held.sizes[j])
                rows[i][:, columns] -= rows[i][:, block] @ factor.mH
    moves.check(bad, "the matrix is not positive-definite.")
    parts = tuple(rows[k].tril_(held.offsets[k]) for k in moves.here)
    return like(x, parts)


class LU:
    """The LU factorization, with partial pivoting, of a square matrix that is sharded by columns."""

    def __init__(self, x: Array, name: str, right: Array | None = None) -> None:
        """Factor `x`, and apply the same steps to the right-hand sides `right`."""
        x = x if x.sharding.dim == 1 else reshard(x, evenly(x.shape[0], x.sharding.places, 1), name)
        self.x, self.held, self.moves, self.n = x, x.sharding, _Moves(x, name), x.shape[0]
        self.filled, self.spans = self.moves.filled, self.held.spans(1, self.n)
        self.own: Own = {k: part.clone() for k, part in numbered(x)}
        self.right: Own = {}
        self.wide: list[int] = []
        if right is not None:
            self.right = {k: part.clone() for k, part in numbered(right)}
            self.wide = [k for k, size in enumerate(right.sharding.sizes) if size]
        self.pivots: Own = {}
        self.bad: Own = {}
        for k in self.filled:
            self._panel(k)

    def _panel(self, k: int) -> None:
        """Do one step of the factorization: factor the columns of part k, and update all later columns and the
        right-hand sides."""
        begin, width = self.spans[k]
        if k in self.own:
            factor, self.pivots[k], self.bad[k] = torch.linalg.lu_factor_ex(self.own[k][begin:])
            self.own[k][begin:] = factor
        targets = sorted({j for j in self.filled if j > k} | set(self.wide))
        panel = self.own[k][begin:] if k in self.own else None
        panels = self.moves.send(panel, (self.n - begin, width), k, targets)
        swaps = self.moves.send(self.pivots.get(k), (width,), k, targets, torch.int32)
        for j, factor in panels.items():
            order = _exchanged(swaps[j], self.n - begin)
            if j > k:
                self.own[j][begin:] = _forward(self.own[j][begin:], factor, order)
            if j in self.wide:
                self.right[j][begin:] = _forward(self.right[j][begin:], factor, order)

    def invertible(self) -> None:
        """Raise LinAlgError if the matrix is singular. Waits until the factorization is computed."""
        self.moves.check(self.bad, "the matrix is singular.")

    def solution(self) -> list[Tensor]:
        """Return the solutions for all right-hand sides, as the local parts of an array with the sharding of the
        right-hand sides."""
        for k in reversed(self.filled):
            begin, width = self.spans[k]
            upper = self.own[k][: begin + width] if k in self.own else None
            for j, factor in self.moves.send(upper, (begin + width, width), k, self.wide).items():
                solved = _upper(factor[begin:], self.right[j][begin : begin + width])
                self.right[j][begin : begin + width] = solved
                self.right[j][:begin] -= factor[:begin] @ solved
        return [self.right[k] for k in self.moves.here]

    def solve_travelling(self, right: Array) -> list[Tensor]:
        """Solve for a few right-hand sides, all of which lie on the device that holds the first columns of the
        matrix."""
        count, kept = right.shape[1], {}
        left = right.parts[0] if right.parts else None
        for k, after in zip_longest(self.filled, self.filled[1:]):
            begin, width = self.spans[k]
            if k in self.own:
                assert left is not None
                done = _forward(left, self.own[k][begin:], _exchanged(self.pivots[k], self.n - begin))
                kept[k], left = done[:width], done[width:]
            if after is not None:
                left = self.moves.send(left, (self.n - begin - width, count), k, [after]).get(after)
        taken: Tensor | None = None
        for k, after in zip_longest(self.filled[::-1], self.filled[-2::-1]):
            begin, width = self.spans[k]
            if k in self.own:
                found = kept[k] if taken is None else kept[k] - taken[begin:]
                kept[k] = _upper(self.own[k][begin : begin + width], found)
                taken = self.own[k][:begin] @ kept[k] + (0 if taken is None else taken[:begin])
            if after is not None:
                taken = self.moves.send(taken, (begin, count), k, [after]).get(after)
        return [kept.get(k, part.new_zeros(0, count)) for k, part in numbered(self.x)]

    def signs_and_logs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what the local parts contribute to the determinant of the matrix, as (signs, logarithms of absolute
        values)."""
        signs, logs = [], []
        for k in self.moves.here:
            begin, width = self.spans[k]
            diagonal = self.own[k][begin : begin + width].diagonal()
            unmoved = torch.arange(1, width + 1, device=diagonal.device)
            odd = (self.pivots[k] != unmoved).sum() % 2 if width else torch.zeros((), device=diagonal.device)
            signs.append(torch.sgn(diagonal).prod() * (1 - 2 * odd))
            logs.append(diagonal.abs().log().sum())
        return signs, logs


def _exchanged(pivots: Tensor, rows: int) -> Tensor:
    """Return the row order after the row exchanges of an LU factorization."""
    order = list(range(rows))
    for at, other in enumerate(pivots.tolist()):
        order[at], order[other - 1] = order[other - 1], order[at]
    return torch.tensor(order, device=pivots.device)


def _forward(columns: Tensor, factor: Tensor, order: Tensor) -> Tensor:
    """Apply one step of the LU elimination to columns that are not factored yet, or to right-hand sides."""
    width, columns = factor.shape[1], columns[order]
    top = torch.linalg.solve_triangular(factor[:width], columns[:width], upper=False, unitriangular=True)
    columns[:width] = top
    columns[width:] -= factor[width:] @ top
    return columns


def _upper(factor: Tensor, columns: Tensor) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(factor, columns, upper=True)
    return solved


@dataclass(frozen=True)
class Tall:
    """The QR factorization of a matrix that is sharded by rows and has at least as many rows as columns."""

    x: Array
    name: str
    owns: list[Tensor]
    tops: list[Tensor]
    small: Array

    def q(self, turn: Tensor | None = None) -> Array:
        """Return Q, or `Q @ turn`, sharded by rows like the factored matrix."""
        x, moves = self.x, _Moves(self.x, self.name)
        n, centre = x.shape[1], x.sharding.places.index(self.small.sharding.places[0])
        parts = dict(zip(moves.here, self.owns, strict=True))
        for k, rows in enumerate(min(size, n) for size in x.sharding.sizes):
            top = self.tops[k] if self.tops else None
            if top is not None and turn is not None:
                top = top @ turn
            for j, came in moves.send(top, (rows, n), centre, [k] if rows else []).items():
                parts[j] = parts[j] @ came
        return like(x, [part if part.shape[1] == n else part.new_zeros(0, n) for part in parts.values()])


def tall_qr(x: Array, name: str) -> Tall:
    """Compute the QR factorization of a tall matrix that is sharded by rows."""
    held, moves, n = x.sharding, _Moves(x, name), x.shape[1]
    place = fullest(held)
    centre = held.places.index(place)
    alone = [torch.linalg.qr(part) for part in x.parts]
    came: list[Tensor] = []
    for k, rows in enumerate(min(size, n) for size in held.sizes):
        own = alone[moves.here.index(k)][1] if k in moves.here else None
        came += moves.send(own, (rows, n), k, [centre] if rows else []).values()
    owns, lies = [q for q, _ in alone], sharding((place,))
    if centre not in moves.here:
        return Tall(x, name, owns, [], Array((), lies, (n, n), x.dtype, x.space))
    q, r = torch.linalg.qr(torch.cat(came)) if came else (x.parts[0][:0], x.parts[0].new_zeros(n, n))
    tops = list(q.split([min(size, n) for size in held.sizes]))
    return Tall(x, name, owns, tops, Array((r,), lies, (n, n), x.dtype, x.space))
