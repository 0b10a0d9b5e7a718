"""Cumulative sums and products: NumPy's values however the array lies, and one slab from part to part."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from meshwise.arrays.sharding import Sharding
from tests.arrays.layouts import XP, drawn, layouts, moved, same


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8", "uint64", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(7,), (0,), (5, 4), (2, 3, 4), (1, 1), (0, 3)])
def test_cumulative(shape: Any, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        values = drawn(shape, dtype)
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for axis in range(len(shape)):
            for initial in (False, True):
                words: Any = {"axis": axis, "include_initial": initial}
                same(XP.cumulative_sum(x, **words), np.cumulative_sum(values, **words), 1e-5)
                same(XP.cumulative_prod(x, **words), np.cumulative_prod(values, **words), 1e-5)


def test_a_product_that_overflows_in_one_part_alone() -> None:
    same(XP.cumulative_prod(XP.asarray([0.0, 1e200, 1e200, 1e200, 1e200, 1e200])), np.zeros(6))


def test_one_slab_moves_between_parts_that_are_not_empty() -> None:
    x = XP.ones((7, 4), sharding=Sharding((0, 1, 2), 0, (3, 0, 4)))
    assert moved(lambda: XP.cumulative_sum(x, axis=0)) == 4 * 8
    assert moved(lambda: XP.cumulative_sum(x, axis=1)) == 0
    assert moved(lambda: XP.cumulative_sum(XP.ones((7, 4)), axis=0)) == 2 * 4 * 8


def test_dtype_and_refusals() -> None:
    same(XP.cumulative_sum(XP.arange(5), dtype=XP.float32), np.arange(5).cumsum(dtype=np.float32))
    with pytest.raises(ValueError, match="needs an axis"):
        XP.cumulative_sum(XP.ones((2, 2)))
    with pytest.raises(IndexError, match="axes -2 to 1"):
        XP.cumulative_prod(XP.ones((2, 2)), axis=2)
