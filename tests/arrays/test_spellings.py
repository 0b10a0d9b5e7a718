"""Programs in NumPy's spelling compute the same, with arrays that are divided over places.

Also for arrays/counting.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshwise as mw

HALF = np.float64(0.5)  # one of NumPy's own scalars
XP = mw.array_namespace("3xcpu")


def heat(np: Any) -> Any:
    u = np.zeros((9, 7), np.float64)
    u[0, :] = 100.0
    for _ in range(5):
        u[1:-1, 1:-1] += 0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1])
    return u


def statistics(np: Any) -> Any:
    x = np.linspace(-2, 3, 24).reshape(4, 6)
    y = x - x.mean(axis=0)
    y /= np.std(x, axis=0, keepdims=True) + HALF
    return y.sum(1) + np.max(x, axis=1) * x.argmax(1) + np.ptp(x, 1) + np.average(x, 0, weights=[1, 2, 3, 4]).sum()


def products(np: Any) -> Any:
    x, y = np.arange(4.0), np.array([1.0, 2, 3])
    table = np.add.outer(x, y) + np.outer(x, y) + np.multiply.outer(x, y)
    return np.concatenate([table, np.transpose(table[:3]).reshape(-1, 3), np.vstack([y, y]), np.hstack([y])[None]])


def names(np: Any) -> Any:
    x = np.array([0.25, 0.5, 0.75])
    return (
        np.power(np.arctan2(np.arcsin(x), np.arccos(x)), 2)
        + np.absolute(-x)
        + np.conjugate(x)
        + np.mod(x, 0.3)
        + np.sqrt(HALF)
        + x.copy().clip(0.3, 0.6)
        + np.maximum(x, 0.5)
        + np.round(x * 3)
        + np.sum(np.logspace(0, 1, 3))
        + np.exp2(x)
    )


def grids(np: Any) -> Any:
    y, x = np.mgrid[0:4, 0:3]
    a, b = np.ogrid[0:4, 0:1:3j]
    return (x + 10 * y) + (a * b) + np.diag(np.diag(np.eye(4) * 3.0))[:, :3] + np.trace(np.identity(3))


def counts(np: Any) -> Any:
    x = np.sin(np.arange(50.0) * 7) * 3
    plain, edges = np.histogram(x, bins=5)
    weighed, _ = np.histogram(x, bins=np.array([-3.0, -1, 0, 2, 3]), weights=np.abs(x))
    ranged = np.histogram(x, 4, (-1, 1))[0]
    return np.concatenate([plain * 1.0, edges, weighed, ranged, np.bincount(np.array([1, 3, 3])) * 1.0])


def comparisons(np: Any) -> Any:
    x = np.arange(6.0)
    x[2] = np.nan
    y = np.nan_to_num(x, nan=-1.0)
    y.fill(3)
    y[::2] = np.array([7.0, 8, 9])
    close = np.isclose(x, x + 1e-12, equal_nan=True)
    return y + close * 1.0 + np.allclose(y, y) + np.array_equal(y, x) + (y.copy().T.ravel().tolist()[1])


@pytest.mark.parametrize("program", [heat, statistics, products, names, grids, counts, comparisons])
def test_a_program_in_numpys_spelling(program: Callable[[Any], Any]) -> None:
    expected, found = program(np), program(XP)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_ufuncs_reduce() -> None:
    x = XP.arange(6.0).reshape(2, 3)
    assert XP.add.reduce(x).numpy().tolist() == [3, 5, 7]
    assert float(XP.maximum.reduce(x, axis=None)) == 5
    assert XP.broadcast_shapes((2, 1), (3,)) == (2, 3)
    with pytest.raises(mw.UsageError, match="mgrid"):
        XP.mgrid[:]
