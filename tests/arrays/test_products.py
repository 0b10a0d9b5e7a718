"""Products: NumPy's values however the operands lie, and no byte more than the least."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from meshwise.arrays import products
from tests.arrays.layouts import XP, drawn, layouts, moved, same

MATMULS = [
    ((5, 4), (4, 3)),
    ((4,), (4, 3)),
    ((5, 4), (4,)),
    ((4,), (4,)),
    ((2, 1, 5, 4), (3, 4, 2)),
    ((3, 0), (0, 2)),
    ((2, 5, 4), (4,)),
]


def in_all_layouts(found: Any, expected: Any, *values: Any) -> None:
    want = expected(*values)
    for lies in itertools.product(*(list(layouts(each.shape)) for each in values)):
        arrays = [XP.asarray(each, sharding=how) for each, how in zip(values, lies, strict=True)]
        same(found(*arrays), want, 1e-9)


@pytest.mark.parametrize("blocks_from", [products.BLOCKS_FROM, 0])
@pytest.mark.parametrize("one, other", MATMULS)
def test_matmul(one: Any, other: Any, blocks_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCKS_FROM", blocks_from)
    in_all_layouts(XP.matmul, np.matmul, drawn(one), drawn(other))


@pytest.mark.parametrize("blocks_from", [products.BLOCKS_FROM, 0])
@pytest.mark.parametrize("one, other", [("int32", "uint8"), ("uint16", "uint8"), ("complex128", "float32")])
def test_matmul_of_dtypes(one: str, other: str, blocks_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCKS_FROM", blocks_from)
    in_all_layouts(XP.matmul, np.matmul, abs(drawn((4, 3))).astype(one), abs(drawn((3, 2))).astype(other))


def test_other_products() -> None:
    in_all_layouts(XP.outer, np.outer, drawn((4,)), drawn((3,)))
    x, y = drawn((2, 3, 1)) * 1j, drawn((3, 4))
    in_all_layouts(lambda a, b: XP.vecdot(a, b, axis=-2), lambda a, b: np.vecdot(a, b, axis=-2), x, y)
    for axes, one, other in [(((0, 2), (1, 0)), (2, 3, 4), (4, 2, 2)), (0, (2, 3), (2,)), (1, (2, 3), (3, 2))]:
        in_all_layouts(
            lambda a, b, axes=axes: XP.tensordot(a, b, axes=axes),
            lambda a, b, axes=axes: np.tensordot(a, b, axes=axes),
            drawn(one),
            drawn(other),
        )


def test_operator() -> None:
    x = XP.arange(6.0)
    assert float(x @ x) == 55
    same(XP.eye(6) @ np.arange(6.0), np.arange(6.0), 1e-12)
    same(np.arange(6.0) @ XP.eye(6), np.arange(6.0), 1e-12)


def test_bytes_are_the_least() -> None:
    n, item = 12, 8
    rows, columns, whole = (
        XP.ones((n, n)),
        XP.ones((n, n), sharding=XP.shard(1)),
        XP.ones((n, n), sharding=XP.replicated()),
    )
    assert moved(lambda: rows @ whole) == moved(lambda: whole @ columns) == 0
    assert moved(lambda: columns @ rows) == 2 * n * n * item  # the sums alone
    assert moved(lambda: rows @ rows) == 2 * n * n * item  # one operand to the two others
    thin = XP.ones((n, 3))
    assert moved(lambda: rows @ thin) == 2 * thin.nbytes
    short, inner = XP.ones((3, n)), thin.reshard(XP.shard(1))
    assert moved(lambda: inner @ short) == thin.nbytes * 2 // 3 + 2 * short.nbytes  # less than the sums of k x k
    batch = XP.ones((6, 4, 4))
    assert moved(lambda: batch @ batch) == 0
    x = XP.ones((n,))
    assert moved(lambda: rows @ x) == 2 * n * item
    assert moved(lambda: x @ x) == 2 * item


def test_a_large_operand_comes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCKS_FROM", 0)
    x = XP.ones((12, 12))
    with mw.comm_log() as log:
        x @ x
    assert {row.bytes for row in log} == {4 * 12 * 8}
    assert len(log) == 6


def test_refusals() -> None:
    x = XP.ones((2, 3))
    with pytest.raises(
        ValueError, match=r"matmul of shapes \(2, 3\) and \(2, 3\): x1 has 3 columns, but x2 has 2 rows"
    ):
        x @ x
    with pytest.raises(ValueError, match=r"Write x1 \* x2"):
        XP.matmul(x, XP.asarray(1.0))
    with pytest.raises(TypeError, match="both arrays are bool"):
        XP.outer(XP.ones(2) > 0, XP.ones(2) > 0)
    with pytest.raises(ValueError, match="axis must be negative and exist in both"):
        XP.vecdot(x, x, axis=0)
    with pytest.raises(ValueError, match="must pair dims of the two arrays with equal lengths"):
        XP.tensordot(x, x, axes=((0,), (1,)))
    with pytest.raises(ValueError, match="must be vectors"):
        XP.outer(x, x)
