"""Programs in NumPy's spelling compute the same, with arrays that are divided over places.

Also for arrays/counting.py.
"""

from __future__ import annotations

import copy
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


V = np.array([3.0, -1, 2, 7, 0, 5, 5])


def given(values: Any) -> Any:
    """In three parts, of which one is empty."""
    values = np.asarray(values)
    return XP.asarray(values, sharding=XP.shard(0, sizes=[len(values) // 3, 0, len(values) - len(values) // 3]))


@pytest.mark.parametrize(
    "program",
    [
        lambda np, x: x == [3, -1, 2, 7, 0, 5, 4],  # was False
        lambda np, x: [1, 2, 3, 4, 5, 6, 7] * x + (1,) * 7,
        lambda np, x: np.maximum(x, [4, 0, 4, 0, 4, 0, 4]),
        lambda np, x: np.where([True, False] * 3 + [True], x, 0),
        lambda np, x: np.isin(x, [3, 5]),
        lambda np, x: np.sum([x, x], axis=0),
        lambda np, x: np.maximum.reduce([x, x[::-1]]),
        lambda np, x: np.concatenate([x, [1, 2]]),
        lambda np, x: np.append(x, 3),
        lambda np, x: np.hstack([x, [1]]),
        lambda np, x: np.repeat(x, [1, 0, 2, 1, 1, 1, 1]),
        lambda np, x: x[True],  # had parts of another shape
        lambda np, x: x[False],
        lambda np, x: np.cumsum(x.reshape(7, 1) + x) + x.reshape(-1)[0],
        lambda np, x: np.cumprod(x[:2]),
        lambda np, x: np.sort(x.reshape(1, 7), axis=None),
        lambda np, x: np.round(x / 3, 2),
        lambda np, x: np.unique(x, return_counts=True)[1],
        lambda np, x: np.unique(x, return_index=True, return_inverse=True)[2],
        lambda np, x: np.clip(x, a_min=0, a_max=2),
        lambda np, x: np.float_power(x.astype(int), -1)[:1],
        lambda np, x: np.reciprocal(x[:2].astype(int)),  # was a float
        lambda np, x: np.fabs(np.asarray([-128], dtype="int32")),
        lambda np, x: np.clip(x.astype("uint8"), -1, 300),
        lambda np, x: (x.astype("uint8") < 300) & (x.astype("int8") > -1000) & (x.astype("uint8") > -1),
        lambda np, x: (x[:5].astype("int64") == 2**63) | (x[:5] == 2.0),
        lambda np, x: (x[4:] + 0j) ** (x[4:] + 0j),  # was nan for 0 ** 0
        lambda np, x: np.array([2**63, 1]),
        lambda np, x: np.add(x, 2, out=np.zeros(7)),
        lambda np, x: np.sqrt(x, where=x > 0, out=np.ones(7)),
        lambda np, x: np.divide(1, x, out=np.zeros_like(x), where=x != 0),
        lambda np, x: np.tensordot(x, x, 1),
        lambda np, x: divmod(x, 2)[1] + divmod(20, x[:1])[0],
    ],
)
def test_habits_of_numpys_programs(program: Callable[..., Any]) -> None:
    with np.errstate(all="ignore"):
        expected = np.asarray(program(np, V))
    found = program(XP, given(V))
    assert found.numpy().dtype == expected.dtype
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_out_is_what_comes_back_and_takes_no_other_kind() -> None:
    x, out = given(V), XP.zeros(7)
    assert XP.multiply(x, 2, out=out) is out
    np.testing.assert_array_equal(out.numpy(), V * 2)
    with pytest.raises(TypeError, match="the dtype of out"):
        XP.sqrt(x, out=XP.zeros(7, dtype=int))
    with pytest.raises(mw.UsageError, match=r"xp\.where"):
        XP.sqrt(x, where=x > 0)


def test_copies_are_their_own_and_a_shape_that_is_set_holds() -> None:
    x = given(V)
    other, deep = copy.copy(x), copy.deepcopy(x)
    x[0], other[1], deep[2] = 8, 9, 10
    np.testing.assert_array_equal(x.numpy(), [8, *V[1:]])
    np.testing.assert_array_equal(other.numpy(), [3, 9, *V[2:]])
    np.testing.assert_array_equal((deep + x).numpy()[2:4], [12, 14])
    z = given(np.arange(12.0))
    z.shape = (3, -1)
    np.testing.assert_array_equal(z.numpy(), np.arange(12.0).reshape(3, 4))
    with pytest.raises(ValueError, match="reshape"):
        z.shape = (5, 5)


def test_numpys_own_functions_write_and_refuse() -> None:
    x, there = given(V), np.zeros(7)
    there += x
    np.testing.assert_array_equal(there, V)
    assert np.add(x, 1, out=x) is x
    np.testing.assert_array_equal(x.numpy(), V + 1)
    with pytest.raises(TypeError, match="not supported"):
        np.unwrap(x)
    with pytest.raises(TypeError, match=r"np\.add\.at is not supported for arrays"):
        np.add.at(x, [0], 1)
    with pytest.raises(TypeError, match=r"out= has dtype int64, but"):
        np.sqrt(x, out=np.zeros(7, dtype=np.int64))


def test_types_shapes_and_placements_are_checked() -> None:
    with pytest.raises(AttributeError):
        given(V).dtype = XP.int32
    for shape in (3.0, None, "3", (2.5, 1)):
        with pytest.raises(TypeError, match="must be an integer or a tuple"):
            XP.zeros(shape)
    assert XP.zeros(XP.asarray(3)).shape == (3,)
    assert XP.zeros(np.array([2, 3])).shape == (2, 3)
    with pytest.raises(mw.UsageError, match=r"sharding must be like .*, not 'rows'"):
        XP.zeros(3, sharding="rows")
    with pytest.raises(ValueError, match=r"scale must be 0 or more, but it is -1"):
        XP.random.normal(0, -1, 3)


def test_numbers_are_written_and_rounded() -> None:
    x = given(V)
    assert f"{x[0]:.2f} {x.sum():g} {x[3].astype(int):3d}" == "3.00 21   7"
    assert round(x[0] / 7, 3) == 0.429
    assert f"{x}" == str(x)


def test_what_is_no_number_is_one_sentence() -> None:
    x = given(V)
    with pytest.raises(TypeError, match=r"cannot assign .* to an array"):
        x[0] = None
    with pytest.raises(TypeError, match="does not contain only numbers"):
        XP.asarray(["a"])
    with pytest.raises(ValueError, match="but contains -1"):
        XP.bincount(XP.asarray([-1, 2]))
    with pytest.raises(TypeError, match="exp2 is not defined for complex"):
        XP.exp2(x + 1j)
