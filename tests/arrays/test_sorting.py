"""Sorting and what stands on it: exact and stable however the array lies; elements move once, straight to their place.

Also for arrays/selection.py, arrays/quantiles.py, arrays/lanes.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from meshwise.arrays import selection
from tests.arrays.layouts import RNG, XP, drawn, layouts, moved, same

SHAPES = [(70,), (7,), (0,), (5, 4), (2, 3, 4), (1, 1), (9, 1)]


def values_of(shape: Any, dtype: str) -> Any:
    """Drawn ones; floats with nan, infinity, both zeros and ties."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        values = drawn(shape, dtype)
    if dtype == "float64" and values.size > 5:
        values = values.round()
        values.flat[::4] = np.nan
        values.flat[1:4] = np.inf, -0.0, 0.0
    return values


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8", "uint64", "bool", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sort_and_argsort(shape: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SAMPLES", 16)  # several rounds for the longest
    values = values_of(shape, dtype)
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for axis in range(len(shape)):
            same(XP.sort(x, axis=axis), np.sort(values, axis=axis, stable=True))
            same(XP.argsort(x, axis=axis), np.argsort(values, axis=axis, stable=True))
            if dtype != "complex128":
                down = torch.sort(torch.from_numpy(values), dim=axis, descending=True, stable=True)
                same(XP.sort(x, axis=axis, descending=True), down.values.numpy())
                same(XP.argsort(x, axis=axis, descending=True), down.indices.numpy())


@pytest.mark.parametrize("kind", ["drawn", "sorted", "reversed", "equal", "two values"])
def test_a_long_vector_in_several_rounds(kind: str) -> None:
    n = 40_000
    values = {
        "drawn": RNG.normal(size=n),
        "sorted": np.arange(n),
        "reversed": np.arange(n)[::-1],
        "equal": np.ones(n),
        "two values": np.arange(n) % 2,
    }[kind]
    x = XP.asarray(values, sharding=XP.shard(0, sizes=[100, n - 200, 100]))
    same(XP.sort(x), np.sort(values))
    same(XP.argsort(x), np.argsort(values, stable=True))


def test_elements_move_once_and_only_if_they_must() -> None:
    n = 3000
    ordered = XP.asarray(np.arange(n))
    assert moved(lambda: XP.sort(ordered), "sort") == 0
    assert moved(lambda: XP.sort(XP.flip(ordered) if hasattr(XP, "flip") else -ordered), "sort") == 2 * 1000 * 8
    values = RNG.permutation(n)
    stays = sum(np.sum(values[at : at + 1000] // 1000 == at // 1000) for at in range(0, n, 1000))
    x = XP.asarray(values)
    assert moved(lambda: XP.sort(x), "sort") == (n - stays) * 8
    assert moved(lambda: XP.argsort(x), "argsort") == (n - stays) * (8 + 4)
    assert moved(lambda: XP.sort(x), "samples") <= 2 * 2 * (selection.SAMPLES + 3) * 8


@pytest.mark.parametrize(
    "shape, dtype", [((7,), "float32"), ((5, 4), "float64"), ((2, 3, 4), "uint8"), ((1, 6), "int32")]
)
def test_quantiles(shape: Any, dtype: str) -> None:
    values = drawn(shape, "float64").astype(dtype) if dtype != "uint8" else abs(drawn(shape)).astype(dtype)
    if dtype == "float64":
        values[0, ...] = np.nan
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for axis in (None, 0, -1):
            for method in ("linear", "lower", "higher", "midpoint", "nearest"):
                for q in (0.3, [0.0, 0.25, 0.9, 1.0]) if method == "linear" else ([0.5, 0.7],):
                    words: Any = {"axis": axis, "method": method, "keepdims": method == "linear"}
                    same(XP.quantile(x, q, **words), np.quantile(values, q, **words).astype(result(x)), 1e-6)
            same(XP.median(x, axis=axis), np.median(values, axis=axis).astype(result(x)), 1e-6)
            same(XP.percentile(x, 30, axis=axis), np.percentile(values, 30, axis=axis).astype(result(x)), 1e-6)


def result(x: Any) -> str:
    return "float32" if x.dtype is torch.float32 else "float64"


def test_quantiles_read_samples_alone() -> None:
    x = XP.asarray(RNG.normal(size=30_000))
    assert moved(lambda: XP.quantile(x, [0.1, 0.5])) < x.nbytes / 3


@pytest.mark.parametrize("shape", [(7,), (5, 4), (2, 3, 4)])
def test_topk(shape: Any) -> None:
    values = drawn(shape, "int64")
    for how in layouts(shape):
        x = XP.asarray(values, sharding=how)
        for axis in range(len(shape)):
            for k in (0, 1, shape[axis]):
                for largest in (False, True):
                    best = torch.sort(torch.from_numpy(values), dim=axis, descending=largest, stable=True)
                    found = XP.topk(x, k, axis=axis, largest=largest)
                    same(found.values, best.values.narrow(axis, 0, k).numpy())
                    same(found.indices, best.indices.narrow(axis, 0, k).numpy())


def test_refusals() -> None:
    x = XP.arange(5.0)
    with pytest.raises(IndexError, match="axes -1 to 0"):
        XP.sort(x, axis=1)
    with pytest.raises(ValueError, match="k must be from 0 to 5, the length of the axis"):
        XP.topk(x, 6)
    with pytest.raises(ValueError, match="one of linear"):
        XP.quantile(x, 0.5, method="weibull")
    with pytest.raises(ValueError, match="q must be a number or a list of numbers from 0 to 1"):
        XP.quantile(x, 1.5)
    with pytest.raises(TypeError, match="at least one"):
        XP.median(XP.zeros((0,)))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_the_largest_and_smallest_unsigned_integers_are_found(dtype: str) -> None:
    values = np.asarray([[7, 3, 200], [3, 255, 9], [255, 0, 1]], dtype=dtype)
    values[1, 1] = np.iinfo(dtype).max
    for how in layouts(values.shape):
        x = XP.asarray(values, sharding=how)
        for axis in (None, 0, 1):
            same(XP.argmax(x, axis=axis), np.argmax(values, axis=axis))
            same(XP.argmin(x, axis=axis), np.argmin(values, axis=axis))
