"""Linear algebra: NumPy's values however matrices lie, in stacks and in blocks, and the bytes of each rule.

Also for arrays/solving.py, arrays/spectra.py, arrays/norms.py, arrays/stacks.py, arrays/factors.py.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from meshwise.arrays import stacks
from tests.arrays.layouts import RNG, XP, drawn, layouts, moved, same

LA = XP.linalg
SLOW = pytest.mark.slow
SHAPES = [(5, 5), (2, 3, 3), (0, 2, 2)]
NEAR = {"float32": 2e-3}


def squares(shape: Any, dtype: str) -> Any:
    """Matrices that are far from singular."""
    values = drawn(shape) + (1j * drawn(shape) if dtype == "complex128" else 0)
    return (values + 9 * np.eye(shape[-1])).astype(dtype)


def positive(shape: Any, dtype: str) -> Any:
    values = squares(shape, dtype)
    return values @ np.conj(np.swapaxes(values, -1, -2))


@pytest.fixture(params=["one place", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stacks, "LARGE", stacks.LARGE if request.param == "one place" else 0)
    with mw.guard("allow"):
        yield


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "shape, dtype",
    [
        *itertools.product(SHAPES, ["float64", "complex128"]),
        ((5, 5), "float32"),
        ((1, 4, 4), "float64"),
        ((1, 1), "float64"),
    ],
)
def test_square_matrices(shape: Any, dtype: str) -> None:
    values, hermitian, near = squares(shape, dtype), positive(shape, dtype), NEAR.get(dtype, 1e-9)
    for how in layouts(shape):
        x, h = XP.asarray(values, sharding=how), XP.asarray(hermitian, sharding=how)
        same(LA.inv(x), np.linalg.inv(values), near)
        same(LA.det(x), np.linalg.det(values), near)
        for found, expected in zip(LA.slogdet(x), np.linalg.slogdet(values), strict=True):
            same(found, expected, near)
        same(LA.cholesky(h), np.linalg.cholesky(hermitian), near)
        same(LA.cholesky(h, upper=True), np.linalg.cholesky(hermitian, upper=True), near)
        same(LA.eigvalsh(h), np.linalg.eigvalsh(hermitian), near)
        eigenvalues, eigenvectors = LA.eigh(h)
        close(h @ eigenvectors, eigenvectors * XP.expand_dims(eigenvalues, axis=-2), near)
        eigenvalues, eigenvectors = LA.eig(x)
        close(x @ eigenvectors, eigenvectors * XP.expand_dims(eigenvalues, axis=-2), near)
        for n in (-2, 0, 1, 5):
            same(LA.matrix_power(x / 9, n), np.linalg.matrix_power(values / 9, n).astype(dtype), near)


def close(found: Any, expected: Any, near: float) -> None:
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=near, atol=near * 100)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "one, other",
    [
        ((5, 5), (5,)),
        ((5, 5), (5, 7)),
        ((2, 3, 3), (3,)),
        pytest.param((2, 3, 3), (2, 3, 4), marks=SLOW),
        pytest.param((3, 3), (2, 3, 1), marks=SLOW),
    ],
)
def test_solve(one: Any, other: Any) -> None:
    for dtype in ("float64", "complex128"):
        a, b = squares(one, dtype), drawn(other)
        expected = np.linalg.solve(a, b)
        for lies in itertools.product(layouts(one), layouts(other)):
            x, y = (XP.asarray(each, sharding=how) for each, how in zip((a, b), lies, strict=True))
            same(LA.solve(x, y), expected, 1e-9)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    "shape",
    [(12, 2), (2, 12), (4, 3), (4, 0), *(pytest.param(each, marks=SLOW) for each in [(2, 4, 3), (1, 12, 2), (7, 1)])],
)
def test_orthogonal_factors(shape: Any, dtype: str) -> None:
    values, near = drawn(shape), NEAR.get(dtype, 1e-9)
    values = (values + 1j * drawn(shape) if dtype == "complex128" else values).astype(dtype)
    singular = np.linalg.svdvals(values)
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for mode in ("reduced", "complete"):
            q, r = LA.qr(x, mode=mode)
            assert (q.shape, r.shape) == tuple(each.shape for each in np.linalg.qr(values, mode=mode))
            close(q @ r, x, near)
            close(LA.matrix_transpose(XP.conj(q)) @ q, XP.eye(q.shape[-1]) + 0 * q[..., :1, :1], near)
            assert not np.tril(r.numpy(), -1).any()
        for full in (False, True):
            u, s, vh = LA.svd(x, full_matrices=full)
            assert (u.shape, s.shape, vh.shape) == tuple(e.shape for e in np.linalg.svd(values, full_matrices=full))
            same(s, singular, near)
            k = s.shape[-1]
            close((u[..., :k] * XP.expand_dims(s, axis=-2)) @ vh[..., :k, :], x, near)
        same(LA.svdvals(x), singular, near)
        if min(shape):
            same(LA.pinv(x), np.linalg.pinv(values).astype(dtype), near)
            same(LA.matrix_rank(x), np.linalg.matrix_rank(values))


@pytest.mark.parametrize("shape, dtype", [((5, 4), "float64"), ((2, 3, 3), "complex128"), ((4, 1), "float32")])
def test_norms_and_diagonals(shape: Any, dtype: str) -> None:
    values = (drawn(shape) + (1j * drawn(shape) if dtype == "complex128" else 0)).astype(dtype)
    near = NEAR.get(dtype, 1e-9)
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for ord in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
            same(LA.matrix_norm(x, ord=ord), np.linalg.matrix_norm(values, ord=ord), near)
        same(LA.matrix_norm(x, keepdims=True), np.linalg.matrix_norm(values, keepdims=True), near)
        for ord in (0, 1, 2, 3, -1, np.inf, -np.inf):
            for axis in (None, 0, -1, (0, 1)):
                words: Any = {"ord": ord, "axis": axis}
                same(LA.vector_norm(x, **words), np.linalg.vector_norm(values, **words), near)
        for offset in (-9, -2, 0, 1, 2):
            same(LA.diagonal(x, offset=offset), np.linalg.diagonal(values, offset=offset))
            same(LA.trace(x, offset=offset), np.linalg.trace(values, offset=offset), near)


def test_cross() -> None:
    for one, other, axis in (((4, 3), (3,), -1), ((3, 2), (3, 1), -2), ((1, 3), (4, 3), -1)):
        for dtype in ("int32", "complex128"):
            a, b = drawn(one, dtype), drawn(other, dtype)
            for lies in itertools.product(layouts(one), layouts(other)):
                x, y = (XP.asarray(each, sharding=how) for each, how in zip((a, b), lies, strict=True))
                same(LA.cross(x, y, axis=axis), np.linalg.cross(a, b, axis=axis), 1e-12)


def test_bytes_are_those_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    n, item = 12, 8
    x = XP.asarray(RNG.normal(size=(600, 4)))
    assert moved(lambda: LA.qr(x)) == moved(lambda: LA.svd(x, full_matrices=False)) == 2 * 2 * 4 * 4 * item
    assert moved(lambda: LA.svdvals(x)) == 2 * 4 * 4 * item
    stack = XP.asarray(squares((6, 4, 4), "float64"))
    assert moved(lambda: LA.inv(stack)) == moved(lambda: LA.solve(stack, XP.ones((6, 4, 2)))) == 0
    columns = XP.ones((n, 9), sharding=XP.shard(1))
    assert moved(lambda: LA.solve(XP.eye(n, sharding=XP.replicated()), columns)) == 0
    monkeypatch.setattr(stacks, "LARGE", 0)
    matrix = XP.asarray(positive((n, n), "float64"), sharding=XP.shard(1))
    panels = (2 * n * 4 + 1 * 8 * 4) * item + (2 * 4 + 4) * 4  # and pivots
    vector = (8 + 4) * item + (8 + 4) * item
    assert moved(lambda: LA.slogdet(matrix), "slogdet") == panels + 2 * 2 * item
    assert moved(lambda: LA.solve(matrix, XP.ones((n,), device="cpu:0")), "solve") == panels + vector
    rows = matrix.reshard(XP.shard(0))
    assert (
        moved(lambda: LA.solve(rows, XP.ones((n,), device="cpu:0")), "solve") == panels + vector + n * n * item * 2 // 3
    )
    assert moved(lambda: LA.cholesky(rows)) == (2 + 1) * 16 * item + 16 * item


def test_what_has_no_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x = XP.asarray(positive((6, 6), "float64"))
    with mw.guard("error"):
        for name in ("inv", "det", "slogdet", "cholesky", "qr", "svd", "svdvals", "pinv"):
            getattr(LA, name)(x)
        with pytest.raises(mw.UsageError, match="eigh cannot run on the shards"):
            LA.eigh(x)
    monkeypatch.setattr(stacks, "LARGE", 0)
    with mw.guard("error"):
        LA.solve(x, XP.ones(6))
        with pytest.raises(mw.UsageError, match="qr cannot run on the shards"):
            LA.qr(x)


@pytest.mark.usefixtures("blocks")
def test_singular_matrices() -> None:
    x = XP.ones((6, 6))
    with pytest.raises(np.linalg.LinAlgError, match="solve: "):
        LA.solve(x, XP.ones(6))
    with pytest.raises(np.linalg.LinAlgError, match="inv: "):
        LA.inv(x)
    with pytest.raises(np.linalg.LinAlgError, match="cholesky: "):
        LA.cholesky(-x)
    assert float(LA.det(x)) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="needs square matrices"):
        LA.inv(XP.ones((2, 3)))
    with pytest.raises(ValueError, match="the second array needs 3 rows"):
        LA.solve(XP.eye(3), XP.ones((2, 2)))
    with pytest.raises(ValueError, match="'reduced' or 'complete'"):
        LA.qr(XP.eye(3), mode="raw")
    with pytest.raises(ValueError, match="ord must be 'fro'"):
        LA.matrix_norm(XP.eye(3), ord=3)
    with pytest.raises(ValueError, match="its length 3"):
        LA.cross(XP.ones((2, 2)), XP.ones((2, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LA.inv(XP.eye(5, dtype=XP.int64))
