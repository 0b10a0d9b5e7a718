"""unique_*, searchsorted and isin: NumPy's values however the arrays lie.

Also for arrays/lookup.py.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from tests.arrays.layouts import XP, drawn, layouts, moved, same

DTYPES = ["float64", "float32", "int32", "uint8", "uint64", "bool", "complex128"]


def values_of(shape: Any, dtype: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return drawn(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70,), (7,), (0,), (5, 4), (2, 3, 4), (1, 1), (9, 1), (1, 5), ()])
def test_unique(shape: Any, dtype: str) -> None:
    values = values_of(shape, dtype)
    if dtype == "float64" and values.size > 5:
        values = values.round()
        values.flat[::4] = np.nan
        values.flat[1:4] = np.inf, -0.0, 0.0
    unique = np.unique(values, return_index=True, return_inverse=True, return_counts=True, equal_nan=False)
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for found, expected in zip(XP.unique_all(x), unique, strict=True):
            same(found, expected)
        same(XP.unique_values(x), unique[0])
        same(XP.unique_counts(x).counts, unique[3])
        same(XP.unique_inverse(x).inverse_indices, unique[2])


def test_the_values_alone_move_once_a_place() -> None:
    x = XP.asarray(np.arange(3000) % 2)
    assert moved(lambda: XP.unique_values(x), "unique_values") <= 6 * 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table, wanted", [((7,), (3, 4)), ((3,), (40,)), ((0,), (5,)), ((5,), ()), ((9,), (0,))])
def test_lookup(table: Any, wanted: Any, dtype: str) -> None:
    a, b = np.sort(values_of(table, dtype)), values_of(wanted, dtype)
    if dtype == "float64":
        a = np.sort(np.where(np.arange(a.size) % 3 == 0, np.nan, a.round()))
        b = np.where(b > 2, np.nan, b.round())
    for one, other in itertools.product(layouts(table), layouts(wanted)):
        x, y = XP.asarray(a, sharding=one), XP.asarray(b, sharding=other)
        if dtype != "complex128":
            same(XP.searchsorted(x, y), np.searchsorted(a, b))
            same(XP.searchsorted(x, y, side="right"), np.searchsorted(a, b, side="right"))
        same(XP.isin(y, x), np.isin(b, a))
        same(XP.isin(x, y, invert=True), np.isin(a, b, invert=True))


def test_numbers_are_looked_up() -> None:
    x = XP.arange(5)
    same(XP.isin(x, 3), np.arange(5) == 3)
    same(XP.isin(3, x), True)
    same(XP.searchsorted(x, 2.5), np.int64(3))


def test_the_smaller_is_sent() -> None:
    long, short = XP.arange(900), XP.arange(9)
    assert moved(lambda: XP.searchsorted(long, short)) == 2 * 9 * 8 + 2 * 9 * 8  # values there, answers added
    assert moved(lambda: XP.searchsorted(short, long)) == 2 * 9 * 8


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'left' or 'right'"):
        XP.searchsorted(XP.arange(3), XP.arange(3), side="middle")
    with pytest.raises(TypeError, match="numbers have none"):
        XP.searchsorted(XP.arange(3) * 1j, XP.arange(3))
