"""Ways in which an array of three places may lie, for tests of rules: whole, in even, uneven and empty parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import meshwise as mw
from meshwise.arrays.sharding import Sharding, evenly

XP = mw.array_namespace("3xcpu")
RNG = np.random.default_rng(0)


def layouts(shape: tuple[int, ...]) -> Iterator[Any]:
    yield XP.single(0)
    yield XP.replicated()
    for dim, length in enumerate(shape):
        yield evenly(length, (0, 1, 2), dim)
        yield Sharding((0, 1, 2), dim, (0, length, 0))
        yield Sharding((2, 0), dim, (length // 3, length - length // 3))


def drawn(shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
    """Small numbers, with ties where they are whole."""
    return np.asarray(RNG.normal(size=shape) * 3).astype(dtype)


def same(found: Any, expected: Any, rtol: float = 0.0) -> None:
    """The array has NumPy's shape, dtype and values, and parts as its sharding says."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    values = found.numpy()
    assert values.dtype == expected.dtype
    for (number, _), part in zip(found.space.local(found.sharding), found.parts, strict=True):
        assert tuple(part.shape) == found.sharding.part_shape(found.shape, number)
        assert part.dtype is found.dtype
    if rtol:
        np.testing.assert_allclose(values, expected, rtol=rtol, atol=rtol)
    else:
        np.testing.assert_array_equal(values, expected)


def moved(function: Callable[[], Any], operation: str | None = None) -> int:
    """The bytes that `function` moves, of one operation or of all."""
    with mw.comm_log() as log:
        function()
    return sum(row.bytes for row in log if operation in (None, row.operation))
