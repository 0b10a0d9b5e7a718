"""Compute QR, singular values and eigenvalues.

Matrices and stacks may be split along any dim.

Stacks are computed where they lie (`stacks.py`). A tall matrix that is split by rows, or a wide one that is split by
columns, is factored part by part (`factors.py`). Other matrices are gathered. This gives a warning for large matrices,
and always for eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from meshwise.arrays import elementwise, factors, layout, products, reductions
from meshwise.arrays.array import Array, like
from meshwise.arrays.dtypes import real_of
from meshwise.arrays.gathering import WITHOUT_RULE
from meshwise.arrays.moves import reshard
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.sharding import evenly
from meshwise.arrays.stacks import (
    adjoint,
    as_matrices,
    called,
    is_large,
    is_one_split,
    matrix_of_each,
    of_each,
    one_matrix,
    with_stack,
)


class QR(NamedTuple):
    """The result of `qr`."""

    Q: Array
    R: Array


class SVD(NamedTuple):
    """The result of `svd`."""

    U: Array
    S: Array
    Vh: Array


class Eigen(NamedTuple):
    """The result of `eigh` and `eig`."""

    eigenvalues: Array
    eigenvectors: Array


def qr(x: Array, /, *, mode: str = "reduced") -> QR:
    """Return the QR decomposition."""
    if mode not in ("reduced", "complete"):
        raise ValueError(f"qr: mode must be 'reduced' or 'complete', but it is {mode!r}.")
    x = as_matrices("qr", x)
    if mode == "reduced" and x.shape[-2] >= x.shape[-1] and (tall := _tall(x)) is not None:
        done = factors.tall_qr(tall, "qr")
        return QR(with_stack(done.q(), x), with_stack(done.small, x))
    return QR(*of_each(x, "qr", partial(torch.linalg.qr, mode=mode)))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVD:
    """Return the singular value decomposition."""
    x = as_matrices("svd", x)
    wide = x.shape[-2] < x.shape[-1]
    tall = _tall(adjoint(x) if wide else x)
    if tall is None or (full_matrices and x.shape[-2] != x.shape[-1]):
        return SVD(*of_each(x, "svd", partial(torch.linalg.svd, full_matrices=full_matrices)))
    done = factors.tall_qr(tall, "svd")
    small = [called("svd", partial(torch.linalg.svd, full_matrices=False), part) for part in done.small.parts]
    u = done.q(small[0][0] if small else None)
    lies, n = done.small.sharding, tall.shape[1]
    s = Array(tuple(each[1] for each in small), lies, (n,), real_of(x.dtype), x.space)
    vh = Array(tuple(each[2] for each in small), lies, (n, n), x.dtype, x.space)
    u, vh = (adjoint(vh), adjoint(u)) if wide else (u, vh)
    return SVD(*(with_stack(each, x) for each in (u, s, vh)))


def svdvals(x: Array, /) -> Array:
    """Return the singular values in descending order."""
    x = as_matrices("svdvals", x)
    tall = _tall(adjoint(x) if x.shape[-2] < x.shape[-1] else x)
    if tall is None:
        return matrix_of_each(x, "svdvals", torch.linalg.svdvals)
    small = factors.tall_qr(tall, "svdvals").small
    values = tuple(called("svdvals", torch.linalg.svdvals, part) for part in small.parts)
    return with_stack(Array(values, small.sharding, small.shape[:1], real_of(x.dtype), x.space), x)


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    """Return the pseudo-inverse of matrices."""
    x = as_matrices("pinv", x)
    u, s, vh = svd(x, full_matrices=False)
    kept = elementwise.FUNCTIONS["greater"](s, _cutoff(x, s, rtol))
    where = zip(s.parts, reshard(kept, s.sharding, "pinv").parts, strict=True)
    inverse = like(s, [torch.where(keep, 1 / part, 0) for part, keep in where])
    scaled = elementwise.FUNCTIONS["multiply"](adjoint(vh), layout.expand_dims(inverse, axis=-2))
    return products.matmul(scaled, adjoint(u))


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    """Return the number of singular values that are greater than `rtol` times the largest one."""
    x = as_matrices("matrix_rank", x)
    s = svdvals(x)
    return reductions.count_nonzero(elementwise.FUNCTIONS["greater"](s, _cutoff(x, s, rtol)), axis=-1)


def _cutoff(x: Array, s: Array, rtol: Any) -> Array:
    """Return the limit up to which singular values count as 0, with a last dim of length 1."""
    if s.shape[-1] == 0:
        return s
    share = max(x.shape[-2:]) * torch.finfo(s.dtype).eps if rtol is None else rtol
    if isinstance(share, Array) and share.shape:
        share = layout.expand_dims(share, axis=-1)
    largest = reductions.FUNCTIONS["max"](s, axis=-1, keepdims=True)
    return elementwise.FUNCTIONS["multiply"](largest, share)


def _eigen(name: str, result: Callable[[tuple[Array, ...]], Any]) -> Callable[..., Any]:
    """Make a function that computes eigenvalues."""
    WITHOUT_RULE.add(f"linalg.{name}")

    def rule(x: Array, /) -> Any:
        x = as_matrices(name, x, square=True)
        return result(of_each(x, name, getattr(torch.linalg, name), told=True))

    return named(rule, name, f"Compute `{name}` of square matrices. A split matrix is gathered, with a warning.")


def _tall(x: Array) -> Array | None:
    """Return `x` as a matrix that is divided by rows, if it is so tall that each part can first be factored alone
    (`tall_qr`), otherwise None."""
    if not is_one_split(x) or any(length != 1 for length in x.shape[:-2]):
        return None
    flat = one_matrix(x)
    (m, n), held = flat.shape, flat.sharding
    lies = held if held.dim == 0 else evenly(m, held.places)
    if m < n or 2 * sum(min(size, n) for size in lies.sizes) > m or not (held.dim == 0 or is_large(x)):
        return None
    return reshard(flat, lies, "tall matrix by rows")


FUNCTIONS = by_name(qr, svd, svdvals, pinv, matrix_rank)
FUNCTIONS |= {name: _eigen(name, lambda found: Eigen(*found)) for name in ("eigh", "eig")}
FUNCTIONS |= {name: _eigen(name, lambda found: found[0]) for name in ("eigvalsh", "eigvals")}
