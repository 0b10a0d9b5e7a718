"""uint16, uint32 and uint64 calculate as NumPy's, though torch has no kernels of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.arrays.layouts import XP, same

EDGES = {"uint16": 2**16, "uint32": 2**32, "uint64": 2**64}
ARITHMETIC = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow, operator.xor),
    *(operator.lshift, operator.rshift, operator.lt, operator.ge, operator.eq, np.maximum, np.minimum),
)


def values(dtype: str) -> np.ndarray:
    edge = EDGES[dtype]
    return np.array([0, 1, 2, 7, edge // 2 - 1, edge // 2, edge // 2 + 1, edge - 2, edge - 1, edge // 3], dtype=dtype)


def given(array: np.ndarray) -> Any:
    return XP.asarray(array, sharding=XP.shard(0, sizes=[len(array) // 4, 0, len(array) - len(array) // 4]))


def of(rule: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(XP, rule.__name__) if isinstance(rule, np.ufunc) else rule


@pytest.mark.parametrize("rule", ARITHMETIC, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("dtype", EDGES)
def test_arithmetic(dtype: str, rule: Callable[..., Any]) -> None:
    one = np.repeat(values(dtype), 10)
    other = np.tile(np.arange(10).astype(dtype) * 8 if "shift" in rule.__name__ else values(dtype), 10)
    with np.errstate(all="ignore"):
        same(of(rule)(given(one), given(other)), rule(one, other))
        for number in (0, 1, 3, True, np.uint8(7)):
            same(of(rule)(given(one), number), rule(one, number))
            same(of(rule)(number, given(one)), rule(number, one))


@pytest.mark.parametrize("dtype", EDGES)
def test_functions_and_reductions(dtype: str) -> None:
    x = values(dtype)
    for rule in (np.negative, np.invert, np.absolute, np.sign, np.square, np.logical_not, np.max, np.min, np.ptp):
        same(getattr(XP, rule.__name__)(given(x)), rule(x))
    same(given(x)[::-1], x[::-1])
    same(XP.flipud(given(x)), x[::-1])
    same(XP.pad(given(x), 2, mode="reflect"), np.pad(x, 2, mode="reflect"))
    same(XP.clip(given(x), -1, 2**70), x)
    changed, shown = x.copy(), given(x)
    for array in (changed, shown):
        array += np.asarray(3).astype(dtype)
        array *= 5
        array //= 7
        array[2:5] -= 1
        array |= 1
    same(shown, changed)


def test_large_integers_beside_small_ones_in_a_list_are_not_rounded() -> None:
    assert XP.asarray([[2**63 + 1, 1]], dtype=XP.uint64).tolist() == [[2**63 + 1, 1]]
