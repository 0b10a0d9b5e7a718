"""NumPy's functions beside the standard's give what NumPy gives, however the arrays lie, in uneven and empty parts too.

Also for arrays/arguments.py, arrays/grids.py, arrays/nan_functions.py, arrays/numpy_numbers.py,
arrays/numpy_products.py, arrays/rules.py, arrays/ufuncs.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from tests.arrays.drawn import Draw
from tests.arrays.layouts import moved
from tests.pool import Pool

XP = mw.array_namespace("3xcpu")
Case = Callable[..., Any]


def _whole(draw: np.random.Generator, *shape: int) -> Any:
    return draw.integers(-9, 10, shape)


def _with_nan(draw: np.random.Generator, *shape: int) -> Any:
    values = draw.normal(size=shape)
    values[draw.random(shape) < 0.4] = np.nan
    return values


def digits(np: Any, x: Any, bins: Any) -> Any:
    return np.digitize(x, bins), np.digitize(x, bins, right=True)


def fitted(found: Any) -> Any:
    x, apart, rank, values = found
    return x, apart, int(rank), values


def sets(np: Any, x: Any, y: Any) -> Any:
    return np.union1d(x, y), np.intersect1d(x, y), np.setdiff1d(x, y), np.setxor1d(x, y)


A, B, C, V, W = (5, 4), (4, 3), (3, 5, 4), (7,), (4,)
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Case]] = {
    "norm": ((A,), lambda np, x: np.linalg.norm(x)),
    "norm of rows": ((A,), lambda np, x: np.linalg.norm(x, axis=1, keepdims=True)),
    "norm 1 of a matrix": ((A,), lambda np, x: np.linalg.norm(x, 1)),
    "norm of two dims": ((C,), lambda np, x: np.linalg.norm(x, axis=(0, 2), keepdims=True)),
    "norms of nothing": (((0, 3),), lambda np, x: np.stack([np.linalg.norm(x, p) for p in (1, 2, np.inf, "nuc")])),
    "norm inf": ((V,), lambda np, x: np.linalg.norm(x, np.inf)),
    "einsum": ((A, B), lambda np, x, y: np.einsum("ik,kj->ij", x, y)),
    "einsum implicit": ((A, B), lambda np, x, y: np.einsum("ik,kj", x, y)),
    "einsum of three": ((A, B, (3,)), lambda np, x, y, z: np.einsum("ik,kj,j->i", x, y, z)),
    "einsum trace": (((4, 4),), lambda np, x: np.einsum("ii", x)),
    "einsum diagonal": (((4, 4), W), lambda np, x, y: np.einsum("ii,j->ij", x, y)),
    "einsum turned": ((C,), lambda np, x: np.einsum("abc->ca", x)),
    "einsum of all": ((A, A), lambda np, x, y: np.einsum("ij,ij->", x, y)),
    "einsum ...": ((C, (4, 2)), lambda np, x, y: np.einsum("...k,kj->...j", x, y)),
    "einsum ... beside Z": ((C, (4, 2)), lambda np, x, z: np.einsum("...Z,Zz->z...", x, z)),
    "einsum of a number": ((V,), lambda np, x: np.einsum(",i->i", 2.0, x) + np.einsum("i,i->i", np.ones(1), x)),
    "einsum broadcast": ((C, (5, 4)), lambda np, x, y: np.einsum("...ab,...ab->...a", x, y[None])),
    "inner": ((A, C), lambda np, x, y: np.inner(x, y)),
    "vdot": ((A, A), lambda np, x, y: np.vdot(x, y)),
    "kron": ((A, W), lambda np, x, y: np.kron(x, y)),
    "kron of matrices": ((A, B), lambda np, x, y: np.kron(x, y)),
    "cross": (((5, 3), (3,)), lambda np, x, y: np.cross(x, y)),
    "lstsq": (((9, 3), (9, 2)), lambda np, x, y: fitted(np.linalg.lstsq(x, y, rcond=None))),
    "lstsq of one column": (((9, 3), (9,)), lambda np, x, y: fitted(np.linalg.lstsq(x, y, rcond=None))),
    "polyfit": ((V, V), lambda np, x, y: np.polyval(np.polyfit(x, y, 2), x)),
    "fft2": ((C,), lambda np, x: np.fft.ifft2(np.fft.fft2(x) * 2) + np.fft.irfft2(np.fft.rfft2(x), (5, 4))),
    "digitize": ((A,), lambda np, x: np.digitize(x, [-1.0, 0.0, 0.5, 0.5, 1.0])),
    "digitize down": ((A,), lambda np, x: digits(np, np.round(x), np.array([1.0, 0.0, -1.0]))),
    "interp": ((A,), lambda np, x: np.interp(x, [-1.0, 0.0, 0.25, 1.0], [3.0, 1.0, 2.0, 7.0], left=-5)),
    "interp of one point": ((V,), lambda np, x: np.interp(x, [0.5], [2.0], right=9.0)),
    "convolve": ((V, (3,)), lambda np, x, y: np.convolve(x, y)),
    "convolve same": ((V, W), lambda np, x, y: np.convolve(x, y, "same")),
    "convolve valid": (((3,), V), lambda np, x, y: np.convolve(x, y, "valid")),
    "correlate": (((3,), V), lambda np, x, y: np.correlate(x, y, "full")),
    "correlate same": ((V, W), lambda np, x, y: np.correlate(x, y, "same") + np.correlate(y, 1j * x, "same")),
    "vander": ((V,), lambda np, x: np.vander(x, 3) + np.vander(x, 3, increasing=True)),
    "cond": (((4, 4),), lambda np, x: np.stack([np.linalg.cond(x, p) for p in (None, -2, 1)])),
    "triangles": (((4, 4),), lambda np, x: x[np.tril_indices(4, 1)] - x[np.triu_indices(4, -1)] + np.tri(3, 13)[1]),
    "sets": ((V, V), lambda np, x, y: sets(np, np.round(x), np.round(y))),
    "split": ((C,), lambda np, x: (np.vsplit(x, 3)[1], np.hsplit(x, [2])[1], np.dsplit(x, 2)[0])),
    "dstack": ((A, A), lambda np, x, y: np.dstack([x, y])),
    "extract": ((A,), lambda np, x: np.extract(x > 0, x)),
    "gradient": ((A,), lambda np, x: np.stack(np.gradient(x, 2.0))),
    "gradient by coordinates": ((A,), lambda np, x: np.gradient(x, np.array([0.0, 1, 3, 4, 9]), axis=0)),
    "trapezoid": ((A,), lambda np, x: np.trapezoid(x, dx=0.5) + np.trapezoid(x, x, axis=1)),
    "cov": ((A, A), lambda np, x, y: np.cov(x, y, bias=True)),
    "cov of a vector": ((V,), lambda np, x: np.cov(x)),
    "cov of columns": ((A,), lambda np, x: np.cov(x, rowvar=False)),
    "corrcoef": ((A,), lambda np, x: np.corrcoef(x)),
    "select": ((A,), lambda np, x: np.select([x > 1, x > 0], [x, -x], 7.0)),
    "ix_": ((A,), lambda np, x: x[np.ix_([3, 0, 3], np.array([False, True, True, False]))]),
    "r_": ((V,), lambda np, x: np.r_[0:3, 7.5, x, 0:1:4j]),
    "c_": ((V, V), lambda np, x, y: np.c_[x, y, x]),
    "indices": ((), lambda np: np.indices((3, 4)) + np.indices((3, 4), sparse=True)[1]),
    "fromfunction": ((), lambda np: np.fromfunction(lambda i, j: i * 2 - j, (5, 3), dtype=int)),
    "insert": ((A,), lambda np, x: np.insert(x, 2, 7.0, axis=1)),
    "insert rows": ((A,), lambda np, x: np.insert(x, [0, 3, 3], x[:1] * 2, axis=0)),
    "insert flat": ((A,), lambda np, x: np.insert(x, slice(1, 9, 3), [1.0, 2.0, 3.0])),
    "insert one row": ((A, W), lambda np, x, y: np.insert(x, -1, y, axis=0)),
    "delete": ((A,), lambda np, x: np.delete(x, [0, -1, 2], axis=0)),
    "delete flat": ((A,), lambda np, x: np.delete(x, slice(None, None, 2))),
    "angle": ((A, A), lambda np, x, y: np.angle(x + 1j * y, deg=True)),
    "cbrt": ((A,), lambda np, x: np.cbrt(x)),
    "fmod": ((A, W), lambda np, x, y: np.fmod(x, y)),
    "ptp by degrees": ((A,), lambda np, x: np.radians(np.degrees(x)) + np.divmod(x, 0.7)[1]),
}


def agree(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            agree(one, other)
        return
    values, expected = np.asarray(found), np.asarray(expected)
    assert values.shape == expected.shape
    assert values.dtype == expected.dtype
    np.testing.assert_allclose(values, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_a_name_of_numpy_gives_what_numpy_gives(name: str) -> None:
    shapes, case = CASES[name]
    for seed in range(6):
        draw = Draw((name, seed), 1 + seed % 3)
        values = [draw.numbers.normal(size=shape) for shape in shapes]
        agree(case(draw.xp, *map(draw.placed, values)), case(np, *values))


def differing(places: int) -> list[str]:
    """The names that on this rank do not give what NumPy gives, or gather."""
    found = []
    for name, (shapes, case) in CASES.items():
        for seed in range(2):
            draw = Draw((name, seed), places)
            values = [draw.numbers.normal(size=shape) for shape in shapes]
            try:
                with mw.guard("error"):
                    result = case(draw.xp, *map(draw.placed, values))
                agree(result, case(np, *values))
            except Exception as error:  # each is told
                found.append(f"{name}: {type(error).__name__}: {error}"[:300])
    return found


def test_nothing_is_gathered_unasked() -> None:
    assert differing(3) == []


def test_what_the_docs_say_moves() -> None:
    x, table = XP.arange(900.0), XP.asarray(np.arange(4.0), device="cpu:0")
    assert moved(lambda: XP.delete(x, [3, 700])) == 0
    assert (
        moved(lambda: XP.interp(x, table, table), "interp") == moved(lambda: XP.interp(x, table, table)) == 2 * 2 * 32
    )
    assert moved(lambda: XP.convolve(x, table, "same"), "convolve") == 2 * 32
    assert moved(lambda: XP.convolve(x, table, "same"), "halo") == 2 * 3 * 8  # three entries at each border
    assert moved(lambda: XP.trapezoid(x)) == 2 * 8 + 2 * 8  # one entry at each border, and sums


def test_strict_virtual_devices_are_not_mixed() -> None:
    with mw.virtual_devices(3):
        assert differing(3) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_names_of_numpy_over_ranks(pool: Callable[[int], Pool], ranks: int) -> None:
    assert pool(ranks).run(differing, ranks) == [[]] * ranks


NAMES = ["nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd"]


@pytest.mark.parametrize("name", [*NAMES, "nancumsum", "nancumprod"])
def test_functions_that_leave_nan_out(name: str) -> None:
    for seed in range(12):
        draw = Draw((name, seed))
        values = _with_nan(draw.numbers, 5, 3)
        values[:, 1] = np.nan
        axis = [None, 0, 1][seed % 3]
        how = {} if "cum" in name or seed % 2 else {"keepdims": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            expected = getattr(np, name)(values, axis=axis, **how)
            agree(getattr(draw.xp, name)(draw.placed(values), axis=axis, **how), expected)
            whole = _whole(draw.numbers, 4, 3)
            agree(getattr(draw.xp, name)(draw.placed(whole), axis=axis), getattr(np, name)(whole, axis=axis))


@pytest.mark.parametrize("name", ["gcd", "lcm", "fmod"])
def test_functions_of_whole_numbers(name: str) -> None:
    for seed, dtype in enumerate([np.int64, np.int32, np.int8, np.uint8, np.uint32]):
        draw = Draw((name, seed))
        one, other = (np.abs(_whole(draw.numbers, *shape)).astype(dtype) for shape in ((4, 3), (3,)))
        with np.errstate(divide="ignore"):
            agree(getattr(draw.xp, name)(draw.placed(one), draw.placed(other)), getattr(np, name)(one, other))
    agree(XP.einsum("ij,jk->ik", XP.arange(6).reshape(2, 3), XP.arange(6).reshape(3, 2)), [[10, 13], [28, 40]])
    agree(XP.convolve([1, 2, 3], [0, 1]), np.convolve([1, 2, 3], [0, 1]))


def test_methods_of_one_array() -> None:
    for seed in range(6):
        draw = Draw(("methods", seed))
        values = draw.numbers.normal(size=(4, 5))
        x = draw.placed(values)
        assert x.item(7) == values.item(7)
        assert x.item(2, -1) == x.item((2, -1)) == values.item(2, -1)
        values.sort()
        x.sort()
        agree(x, values)
        x.sort(axis=0)
        agree(x, np.sort(values, axis=0))
    with pytest.raises(IndexError, match="of an array of 20 elements"):
        x.item(20)


def test_choices_and_shuffles() -> None:
    for places in (1, 3):
        rng = mw.array_namespace(f"{places}xcpu").random.default_rng(5)
        drawn = [rng.choice(10, 6), rng.choice(10, 10, replace=False), rng.choice(3, (500, 2), p=[0.2, 0.0, 0.8])]
        x = mw.array_namespace(f"{places}xcpu").arange(20.0).reshape(10, 2)
        drawn += [rng.choice(x, 4), rng.permutation(x)]
        rng.shuffle(x)
        drawn.append(x)
        if places == 1:
            first = [np.asarray(each) for each in drawn]
    for each, before in zip(drawn, first, strict=True):
        agree(each, before)  # the same on any number of devices
    assert sorted(first[1].tolist()) == list(range(10))
    assert set(first[2].ravel().tolist()) == {0, 2}
    assert 0.7 < (first[2] == 2).mean() < 0.9
    assert all(np.array_equal(np.sort(each, axis=0), np.arange(20.0).reshape(10, 2)) for each in first[4:])


X = XP.arange(12).reshape(3, 4)


@pytest.mark.parametrize(
    "asked, told",
    [
        (lambda: X.sum(where=X > 2), r"x\.sum\(where=\.\.\.\): there is no argument 'where'. Pass xp.where"),
        (lambda: XP.sum(X, where=X > 2), r"sum\(where="),
        (lambda: np.sum(X, where=True), r"np\.sum\(where="),
        (lambda: X.reshape(4, 3, order="F"), r"x\.reshape\(order=.*row-major order"),
        (lambda: XP.zeros(3, order="F"), r"zeros\(order="),
        (lambda: X.max(initial=0), "'initial'. Combine the number with the result"),
        (lambda: XP.sum(X, 1, None, True, 5), r"the arguments \(x, axis, dtype, \*, keepdims\)"),
        (lambda: XP.sum(X, axis="a"), "sum over axis 'a': axis must be an integer"),
        (lambda: XP.flip(X, axis="a"), "flip: axis must be an integer, but it is 'a'"),
        (lambda: XP.add.at(X, 0, 1), r"add\.at is not supported .* Write x\[i\] = f"),
        (lambda: XP.maximum.accumulate(X), r"maximum\.accumulate is not supported"),
        (lambda: XP.interp(X, [0, 1], [0, 1], period=1), "interp.period=.*Write xp.interp"),
        (lambda: XP.random.choice(5, 3, replace=False, p=[0.2] * 5), "Leave out replace=False, or p"),
        (lambda: XP.random.choice(2, 3, p=[0.5, 0.6]), "of at least 0 that add up to 1"),
        (lambda: XP.r_["c", X], "r_ does not take strings"),
        (lambda: XP.einsum("ij,jk", X, X), "'j' has the unequal lengths 4 and 3"),
        (lambda: XP.einsum("ii", X[:, :1]), "dims with the same label in 'ii'"),
        (lambda: XP.gradient(X, edge_order=2), "Leave edge_order out"),
        (lambda: XP.nanmedian, r"no 'nanmedian'.*xp\.median\(x\[~xp\.isnan\(x\)\]\)"),
        (lambda: XP.unwrap, r"no 'unwrap', which NumPy has.*np\.unwrap\(x\.numpy\(\)"),
        (lambda: XP.linalg.tensorinv, r"no 'tensorinv', which NumPy has.*np\.linalg\.tensorinv\(x\.numpy"),
        (lambda: XP.random.poisson(3.0), r"no 'poisson'.*np\.random\.default_rng"),
        (lambda: X.flat, r"an array has no 'flat', but a NumPy array does. Write x.numpy\(\).flat"),
        (lambda: X.__cuda_array_interface__, "the array must be on one GPU"),
        (lambda: XP.insert(X, 17, 0, axis=1), "insert along axis 1: index 17 is out of bounds for the axis"),
        (lambda: XP.delete(X, 17, axis=0), "delete along axis 0: index 17 is out of bounds"),
        (lambda: X.item("a"), r"item\(a\) of an array of 12 elements"),
        (lambda: XP.sqqrt, "Did you mean 'sqrt'"),
    ],
)
def test_what_is_not_there_is_one_sentence(asked: Callable[[], Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, IndexError, mw.UsageError), match=told):
        asked()


def test_arguments_of_numpys_that_are_there() -> None:
    agree(XP.eye(3, 4, 1), np.eye(3, 4, 1))
    agree(XP.array([1, 2], ndmin=3), np.array([1, 2], ndmin=3))
    agree(XP.fft.fft(XP.arange(6.0), 4), np.fft.fft(np.arange(6.0), 4))
    assert X.tobytes() == np.arange(12).tobytes()
    agree(XP.arange(5.0).searchsorted([2.5, 9.0]), np.arange(5.0).searchsorted([2.5, 9.0]))
    agree(np.linalg.norm(X, axis=1), np.linalg.norm(np.arange(12).reshape(3, 4), axis=1))  # type: ignore[arg-type]
    assert np.zeros_like(X).sharding == X.sharding  # type: ignore[arg-type, attr-defined]
    agree(XP.add.accumulate(X), np.add.accumulate(np.arange(12).reshape(3, 4)))
