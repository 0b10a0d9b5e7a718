"""Arrays on several places compute what NumPy computes, however their parts lie.

Also for arrays/creation.py, arrays/elementwise.py, arrays/reductions.py, arrays/statistics.py, arrays/reading.py,
arrays/methods.py, arrays/namespace.py, arrays/align.py, arrays/sharding.py, arrays/space.py, arrays/moves.py,
arrays/dtypes.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw

XP = mw.array_namespace("3xcpu")
LAYOUTS = [
    XP.shard(0),
    XP.shard(1),
    XP.shard(0, sizes=[0, 4, 1]),
    XP.shard(1, sizes=[3, 0, 0]),
    XP.replicated(),
    XP.single(2),
]


def same(found: Any, expected: Any) -> None:
    """The array has NumPy's shape, dtype and values."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.numpy().dtype == expected.dtype
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("one, other", list(itertools.product(range(len(LAYOUTS)), repeat=2)))
def test_two_arrays_are_added_however_they_lie(one: int, other: int) -> None:
    a, b = np.arange(15.0).reshape(5, 3), np.arange(15.0, 30).reshape(5, 3)
    x, y = XP.asarray(a, sharding=LAYOUTS[one]), XP.asarray(b, sharding=LAYOUTS[other])
    same(x + y, a + b)
    same(x[...] * y if hasattr(x, "__getitem__") else x * y, a * b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (5, 1), (1, 1), (), (2, 5, 3), (2, 1, 1)])
def test_shapes_broadcast(layout: Any, shape: tuple[int, ...]) -> None:
    a, b = np.arange(15.0).reshape(5, 3), np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    x = XP.asarray(a, sharding=layout)
    same(x / XP.asarray(b), a / b)
    same(XP.asarray(b) - x, b - a)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), ()])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "argmax", "argmin"])
def test_reductions(name: str, axis: Any, keepdims: bool, layout: Any) -> None:
    values = np.random.default_rng(0).integers(-3, 4, (5, 3)).astype(float)
    if name.startswith("arg") and isinstance(axis, tuple):
        return
    found = getattr(XP, name)(XP.asarray(values, sharding=layout), axis=axis, keepdims=keepdims)
    same(found, getattr(np, name)(values, axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_reduction_whose_result_is_empty(places: int) -> None:
    xp = mw.array_namespace(f"{places}xcpu")
    x = xp.asarray(np.zeros((2, 0, 4)), sharding=xp.shard(2))
    for name in ("max", "min", "any", "sum", "mean", "var", "argmax"):
        found = getattr(xp, name)(x, axis=2)
        assert found.shape == found.numpy().shape == (2, 0)


def test_a_reduction_moves_partial_results_only() -> None:
    x = XP.ones((6, 5))
    with mw.comm_log() as log:
        x.sum(axis=1)
    assert not log
    with mw.comm_log() as log:
        float(x.sum())
    assert [(row.operation, row.source, row.target, row.bytes) for row in log] == [
        ("sum", "cpu:1", "cpu:0", 8),
        ("sum", "cpu:2", "cpu:0", 8),
    ]


def test_a_sum_has_the_same_bits_while_somebody_watches_what_moves() -> None:
    xp = mw.array_namespace("7xcpu")
    for dtype in (xp.float32, xp.bfloat16, xp.complex64):
        drawn = xp.random.default_rng(3).normal(0, 1, 1000)
        x = drawn.reshard(xp.shard(0, weights=[5, 0, 1, 9, 2, 3, 4])).astype(dtype)
        alone = complex(x.sum()), complex(x.mean())
        with mw.comm_log() as log:
            assert (complex(x.sum()), complex(x.mean())) == alone
        assert len(log) > 0


def test_of_equal_elements_the_first_is_the_greatest_and_nan_before_all() -> None:
    for values in ([1.0, 5, 5, 2, 5, 0, 5], [1.0, 5, np.nan, 2, np.nan, 0, 5]):
        assert int(XP.argmax(XP.asarray(values))) == np.argmax(values)
        grid = np.array([values, values[::-1]])
        same(XP.argmax(XP.asarray(grid, sharding=XP.shard(1))), np.argmax(grid))
        same(XP.asarray(grid, sharding=XP.shard(1)).argmax(axis=0), np.argmax(grid, axis=0))


def test_the_more_costly_operand_stays() -> None:
    large, row = XP.ones((300, 4)), XP.ones((1, 4), sharding=XP.shard(1))
    with mw.comm_log() as log:
        result = large + row
    assert result.sharding == large.sharding
    assert sum(move.bytes for move in log) == 2 * 4 * 8  # of four elements each place lacks some


def test_operands_of_numpy_and_torch_and_numbers() -> None:
    a = np.arange(5.0)
    x = XP.asarray(a, dtype=np.float32)
    for found, expected in [
        (x + 1, a + 1),
        (2 - x, 2 - a),
        (1 / (x + 1), 1 / (a + 1)),
        (2**x, 2**a),
        (x > 2.5, a > 2.5),
        (-abs(-x), -a),
        (x // 2, a // 2),
        (5 % (x + 1), 5 % (a + 1)),
    ]:
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert (x + 1.5).dtype is torch.float32
    assert (x + np.float64(1.5)).dtype is torch.float64
    assert (x + torch.ones(5, dtype=torch.float64)).dtype is torch.float64
    assert (XP.asarray([1, 2]) + 0.5).dtype is torch.float64
    assert (XP.asarray(1.0) + x).dtype is torch.float64  # arrays without dims promote as all do
    assert XP.sqrt(4).numpy() == 2.0
    with pytest.raises(OverflowError, match=r"300 does not fit torch.uint8 \(0 to 255\)"):
        XP.asarray([1], dtype="uint8") + 300


def test_in_place() -> None:
    x = XP.arange(5.0)
    same_array = x
    x += 1
    x *= XP.arange(5.0)
    same(same_array, (np.arange(5.0) + 1) * np.arange(5.0))
    with pytest.raises(TypeError, match=r"an in-place operation cannot change torch.int64 to torch.float64"):
        y = XP.arange(5)
        y /= 2


def test_creation_is_placed_and_right() -> None:
    same(XP.arange(7), np.arange(7))
    same(XP.arange(1.0, -2, -0.25), np.arange(1.0, -2, -0.25))
    same(XP.linspace(0, 1, 7), np.linspace(0, 1, 7))
    same(XP.linspace(0, 1, 7, endpoint=False), np.linspace(0, 1, 7, endpoint=False))
    same(XP.eye(4, 5, k=1, sharding=XP.shard(1)), np.eye(4, 5, k=1))
    same(XP.eye(2, k=-(2**70)), np.zeros((2, 2)))
    same(XP.full((2, 3), 7), np.full((2, 3), 7))
    same(XP.full_like(XP.ones((2, 3)), 7), np.full_like(np.ones((2, 3)), 7))
    same(XP.zeros_like(XP.ones((2, 3), sharding=XP.shard(1))), np.zeros((2, 3)))
    assert XP.zeros_like(XP.ones((2, 3), sharding=XP.shard(1))).sharding.dim == 1
    assert XP.zeros((4, 4), device="cpu:1").device == "cpu:1"
    assert XP.zeros((4, 4)).device == "all"
    assert XP.ones(10, sharding=XP.shard(0, weights=[1, 2, 2])).sharding.sizes == (2, 4, 4)


def test_values_are_read() -> None:
    assert float(XP.asarray([2.5])) == 2.5
    assert int(XP.asarray(3)) == 3
    assert list(range(XP.asarray(3))) == [0, 1, 2]
    assert bool(XP.asarray([1]).any())
    assert complex(XP.asarray(1j)) == 1j
    with pytest.raises(TypeError, match="cannot become one Python number"):
        float(XP.ones(2))
    with pytest.raises(ValueError, match=r"x.any\(\) or x.all\(\)"):
        bool(XP.ones(2))
    assert XP.ones(3).torch().tolist() == [1, 1, 1]
    assert XP.ones(3).torch("cpu:1").tolist() == [1, 1, 1]


def test_text_says_where_the_parts_lie() -> None:
    assert repr(XP.arange(3)) == "Array([0, 1, 2], dtype=int64, dim 0 over cpu:0 (1), cpu:1 (1), cpu:2 (1))"
    large = repr(XP.arange(3000, dtype="float32"))
    assert large.startswith("Array([0, 1, 2, ..., 2997, 2998, 2999], dtype=float32, shape=(3000,), dim 0 over cpu:0")


def test_no_part_of_a_copy_is_shared() -> None:
    x = XP.ones(6)
    for y in (XP.asarray(x, copy=True), x.reshard(XP.shard(0)), x.to_device("cpu:0"), +x):
        y += 1
        assert float(x.sum()) == 6


def test_what_cannot_be_is_one_sentence() -> None:
    other = mw.array_namespace("2xcpu")
    for wrong, error, words in [
        (lambda: XP.zeros(3, device="cuda:7"), mw.UsageError, "this array namespace. Use one of cpu:0, cpu:1, cpu:2"),
        (lambda: XP.zeros(3, sharding=XP.shard(1)), mw.UsageError, "has no dim 1"),
        (lambda: XP.zeros(3, sharding=XP.shard(0, sizes=[1, 1, 2])), mw.UsageError, "add up to 3"),
        (lambda: XP.shard(0, sizes=[1, 1]), mw.UsageError, "for each of the 3 devices"),
        (lambda: XP.zeros(3) + other.zeros(3), mw.UsageError, "arrays belong to two array namespaces"),
        (lambda: XP.asarray(torch.ones(3, requires_grad=True)), mw.UsageError, "detach"),
        (lambda: XP.zeros(3) + XP.zeros(4), ValueError, "do not broadcast"),
        (lambda: XP.zeros(3, dtype="float31"), TypeError, "is not supported for arrays"),
        (lambda: XP.zeros(3).sum(axis=1), IndexError, "Use -1 to 0"),
        (lambda: XP.zeros((0, 2)).max(axis=0), ValueError, "needs at least one element"),
        (lambda: mw.array_namespace("5xgpu"), mw.UsageError, "cuda"),
        (lambda: mw.array_namespace([]), mw.UsageError, "pass devices like"),
        (lambda: XP.sqare(XP.zeros(3)), AttributeError, "square"),
    ]:
        with pytest.raises(error, match=words):
            wrong()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "and"])
@pytest.mark.parametrize("other", [2, "same", "row"])
def test_in_place_is_what_numpy_does(name: str, other: Any) -> None:
    dtype = np.int64 if name in ("lshift", "and") else np.float64
    values = np.arange(1, 16).reshape(5, 3).astype(dtype)
    given: Any = {"same": values[::-1] % 3 + 1, "row": values[:1] % 3 + 1}.get(other, other)
    x = XP.asarray(values)
    copy, alias = XP.asarray(x, copy=True), x
    changed = getattr(x, f"__i{name}__")(given if other == 2 else XP.asarray(given))
    same(alias, getattr(values.copy(), f"__i{name}__")(given))
    same(copy, values)
    assert changed is x


def test_in_place_uses_the_memory_that_is_there() -> None:
    x = XP.ones(1000)
    before = [part.data_ptr() for part in x.shards]
    x += XP.ones(1000)
    x *= 3
    assert [part.data_ptr() for part in x.shards] == before
    x += XP.ones((1,))
    x -= np.float32(1)
    assert [part.data_ptr() for part in x.shards] == before
    shown = x[:900]
    x += 1
    assert float(shown.max()) == 7
    x += x
    assert float(x.max()) == 14


def test_what_torch_does_otherwise_than_numpy() -> None:
    z = np.array([complex(-np.inf, 1), 2 + 1j, complex(0, np.inf)])
    same(XP.asarray(z) + XP.asarray(z), z + z)
    same(XP.asarray(z) - 1.5, z - 1.5)
    same(1j + XP.asarray(z), 1j + z)
    whole = np.array([7, -7, 5])
    same(XP.asarray(whole) // XP.asarray([2, 0, -2]), [3, 0, -3])
    same(XP.asarray(whole) % XP.asarray([2, 0, -2]), [1, 0, -1])
    same(7 % XP.asarray([2, 0, 4]), [1, 0, 3])
    same(XP.signbit(XP.asarray([-0.0, 0.0, 4.0]) % XP.asarray([2.0, -2.0, -2.0])), [False, True, True])
    same(XP.asarray(whole) - True, whole - True)
    same(XP.sign(XP.asarray([np.nan, -2.0])), [np.nan, -1.0])
    with pytest.raises(TypeError, match="subtract does not support bool"):
        XP.asarray([True]) - XP.asarray([False])
