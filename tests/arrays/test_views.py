"""What NumPy has for a view is one here: a write to it shows in its array, and a write to the array in it.

Also for arrays/aliases.py, arrays/strides.py, arrays/complex_parts.py.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwise as mw
from meshwise.arrays.aliases import is_number, strides_of
from meshwise.arrays.gathering import GatherWarning
from tests.arrays.alias_programs import run
from tests.arrays.layouts import layouts, moved, same
from tests.pool import Pool

XP = mw.array_namespace("3xcpu")


def every_second(np: Any, a: Any) -> None:
    b = a[::2]
    b += 1


def row(np: Any, a: Any) -> None:
    row = a[1]
    row[:] = 0


def inner(np: Any, u: Any) -> None:
    inner = u[1:-1, 1:-1]
    inner[:] = 5


def rows(np: Any, s: Any) -> None:
    for r in s:
        r += 1


def column(np: Any, a: Any) -> None:
    column = a[:, -1]
    column *= a[:, 0]


def turned(np: Any, a: Any) -> None:
    t = a.T
    t[0] = 7
    t[1:] -= t[:-1]


def backwards(np: Any, a: Any) -> None:
    b = a[::-1, ::-2]
    b[0] = 9
    b += b[:, ::-1]


def flat(np: Any, a: Any) -> None:
    f = a.ravel()
    f[3:7] = -1
    f.sort()


def reshaped(np: Any, a: Any) -> None:
    pairs = a.reshape(-1, 2)
    pairs[:, 0], pairs[:, 1] = pairs[:, 1].copy(), pairs[:, 0].copy()


def halves(np: Any, a: Any) -> None:
    left, right = np.split(a, 2, axis=1)
    left[:] = right


def cut_of_a_cut(np: Any, a: Any) -> None:
    a[1:][::2][:, 1:][0, ::-1] = [1, 2, 3]


def written_before_it_is_read(np: Any, a: Any) -> None:
    views = [a[1:], a[::-1], a.T, a.ravel(), a.reshape(3, 8), a[:, None], np.flip(a), np.diagonal(a), np.rot90(a)]
    a *= 2
    a[2] = -3
    a += np.asarray([v.sum() for v in views]).sum()


def into_out(np: Any, a: Any) -> None:
    np.add(a[:, ::2], 1, out=a[:, 1::2])
    np.multiply(a[0], a[1], out=a[-1])


def overlapping(np: Any, a: Any) -> None:
    a[1:] = a[:-1]
    a[:, 1:] += a[:, :-1]
    a[...] = a[::-1]


def less_its_first(np: Any, a: Any) -> None:
    a -= a[0]
    a += a[:, 1:2]
    a[1:] *= a[-1:]


def of_complex(np: Any, a: Any) -> None:
    z = a + 1j
    z.real[1:] = 3
    z.imag = z.real - a
    a[...] = z.imag + z[::-1].real


def numbers_never_change(np: Any, a: Any) -> None:
    first, total = a[0, 0], a.sum()
    best, most = first, total
    first += 1
    total *= 2
    for one in a[1]:
        one += 100
    a[0, 1], a[0, 2] = best, most - total + first


def filled(np: Any, a: Any) -> None:
    a[2:].fill(4)
    a[0].sort()
    np.nan_to_num(a[1], copy=False)


IDIOMS: list[Callable[[Any, Any], None]] = [
    *(every_second, row, inner, rows, column, turned, backwards, flat, reshaped, halves, cut_of_a_cut, into_out),
    *(written_before_it_is_read, overlapping, less_its_first, of_complex, numbers_never_change, filled),
]


@pytest.mark.filterwarnings("ignore::meshwise.arrays.gathering.GatherWarning")
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_an_idiom_of_numpys_programs_changes_what_it_changes_there(idiom: Callable[[Any, Any], None]) -> None:
    before = np.random.default_rng(3).permutation(24).astype(float).reshape(6, 4)
    expected = before.copy()
    idiom(np, expected)
    assert not np.array_equal(expected, before)
    for layout in layouts(before.shape):
        a = XP.asarray(before, sharding=layout)
        idiom(XP, a)
        same(a, expected)


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_what_is_alive_shows_every_write_as_numpys_does(draw: Random, places: int) -> None:
    run(draw, places)


def idioms_of_ranks() -> None:
    xp = mw.array_namespace()
    for idiom, dim in itertools.product(IDIOMS, (0, 1)):
        expected = np.random.default_rng(3).permutation(24).astype(float).reshape(6, 4)
        a = xp.asarray(expected, sharding=xp.shard(dim))
        idiom(np, expected)
        with mw.guard("allow"):
            idiom(xp, a)
        np.testing.assert_array_equal(a.numpy(), expected, idiom.__name__)


def programs_of_ranks(first: int, count: int) -> None:
    for seed in range(first, first + count):
        run(Random(seed), mw.world_size(), over_ranks=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_alive_shows_every_write_over_ranks(pool: Callable[[int], Pool], ranks: int) -> None:
    pool(ranks).run(idioms_of_ranks)
    pool(ranks).run(programs_of_ranks, 1000 * ranks, 40)


def test_strict_devices_and_memory_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made: torch.Tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(True if made.dtype is torch.bool else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    with mw.virtual_devices(3):
        for seed in range(40):
            run(Random(seed), 3)


COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "ravel of steps": lambda np, a: a[::2, 0].ravel(),
    "ravel of a transposed": lambda np, a: a.T.ravel(),
    "reshape of columns": lambda np, a: a[:, :2].reshape(-1),
    "reshape of what was computed transposed": lambda np, a: (a.T + 1).reshape(-1),
    "ascontiguousarray": lambda np, a: np.ascontiguousarray(a.T),
    "a list of one": lambda np, a: a[[1]],
    "an index without dims": lambda np, a: np.take(a, np.asarray(0), axis=0),
    "True": lambda np, a: a[True],
    "astype": lambda np, a: a.astype(a.dtype),
    "concatenate": lambda np, a: np.concatenate([a]),
    "copy of a view": lambda np, a: a[::-1].copy(),
    "meshgrid": lambda np, a: np.meshgrid(a[0], a[1])[0],
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_numpys_is_one(name: str) -> None:
    before = np.arange(24.0).reshape(6, 4)
    for layout in layouts(before.shape):
        a, x = before.copy(), XP.asarray(before, sharding=layout)
        theirs, ours = COPIES[name](np, a), COPIES[name](XP, x)
        theirs = theirs if isinstance(theirs, np.ndarray) else np.asarray(theirs)
        theirs[...], ours[...] = 7, 7
        same(x, a)
        a *= 2
        x *= 2
        same(ours, theirs)


def test_what_is_read_while_it_is_written_is_read_before() -> None:
    for layout in layouts((6,)):
        a, x = np.array([1, 2, 3, 4, 5, 0]), XP.asarray([1, 2, 3, 4, 5, 0], sharding=layout)
        for each in (a, x):
            each[each] = each[::-1]
            each[each[:3]] += each[3:]
            each[each > 2] = each[: int((each > 2).sum())]
        same(x, a)
        m, y = a > 2, x > 2
        for each in (m, y):
            each[each[::-1]] = False
            each[1:][each[:-1]] = True
        same(y, m)


def test_a_view_of_a_copy_is_written_as_it_is_now() -> None:
    a, x = np.arange(24.0).reshape(4, 6), XP.asarray(np.arange(24.0).reshape(4, 6), sharding=XP.shard(1))
    with mw.guard("allow"):
        for each in (a, x):
            line = each.ravel()
            middle, back = line[5:15], line[::-1]
            each[1] = -1
            line[6] = 50
            middle[2] = 60
            each[0] = 3
            back[10:15] += middle[:5]
            middle += 1
            line.reshape(6, 4).T[0] = 8
    same(x, a)


GIVEN: dict[str, Any] = {
    "matrix": np.arange(12.0).reshape(3, 4),
    "square": np.arange(9.0).reshape(3, 3) + 20 * np.eye(3),
    "vector": np.arange(1.0, 6.0),
    "complex": np.arange(4.0).reshape(2, 2) * (1 + 2j),
    "whole": np.array([2, 0, 1]),
    "truth": np.array([[True, False, True]]),
    "cube": np.arange(24.0).reshape(2, 3, 4),
    "no dims": np.array(3.0),
}
REST: list[tuple[Any, ...]] = [(), (0,), (1,), (2,), (None,), ([0],), ((0, 1),), (1, 0), ((3, 4),), ("complex128",)]
NAMED: list[dict[str, Any]] = [{}, {"axis": 0}, {"axis": ()}, {"axis": 0, "keepdims": True}, {"copy": False}, {"n": 0}]
NOT_COMPARED = {"array", "asanyarray", "asarray", "empty", "empty_like", "fromfunction", "save", "load", "frompyfunc"}
"""Functions that make arrays of what lies in another library's memory, or of memory that nobody wrote."""
OTHER_ORDER = {"argwhere", "nonzero", "where", "delete", "dot", "inner", "gradient", "imag", "median", "pad", "polyval"}
OTHER_ORDER |= {"diagonal", "tile", "tril", "triu", "vecdot", "count_nonzero", "angle", "linalg", "fft"}
"""Functions, and all of `linalg` and `fft`, whose results may be in row-major order where NumPy's are not: to write to
`ravel` of one writes to it."""


def functions() -> Iterator[tuple[str, Any, Any]]:
    """(name, NumPy's, ours) of all functions that both have."""
    for title, theirs, ours in [("", np, XP), ("linalg.", np.linalg, XP.linalg), ("fft.", np.fft, XP.fft)]:
        for name, rule in sorted(vars(ours).items()):
            if callable(rule) and callable(getattr(theirs, name, None)) and name not in NOT_COMPARED:
                yield title + name, getattr(theirs, name), rule


def calls(a: Any, x: Any, function: Any, rule: Any) -> Iterator[tuple[Any, Any]]:
    """What both give for each call that both know."""
    ways = [((a, *rest), (x, *rest), {}) for rest in REST]
    ways += [((a,), (x,), named) for named in NAMED]
    ways += [((a, a), (x, x), {}), (([a],), ([x],), {}), (("ij->ji", a), ("ij->ji", x), {})]
    for theirs, ours, named in ways:
        try:
            yield function(*theirs, **named), rule(*ours, **named)
        except Exception:  # a call that one of the two refuses shows nothing
            continue


def listed(found: Any) -> list[Any]:
    return [one for each in found for one in listed(each)] if isinstance(found, tuple | list) else [found]


def shows(found: mw.Array, x: mw.Array) -> bool:
    """Whether a write to the one shows in the other."""
    if found.alias is not None and x.alias is not None and found.alias.memory is x.alias.memory:
        return True
    ours, theirs = ({p.untyped_storage().data_ptr() for p in each.parts if p.numel()} for each in (found, x))
    return bool(ours & theirs)


@pytest.mark.parametrize("turn", [False, True], ids=["in order", "transposed"])
def test_a_result_shows_what_it_is_of_exactly_where_numpys_does(turn: bool) -> None:
    seen: set[str] = set()
    for (name, function, rule), (kind, values) in itertools.product(functions(), GIVEN.items()):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            a, x = values.copy(), XP.asarray(values)
            a, x = (a.T, x.T) if turn else (a, x)
            for expected, found in calls(a, x, function, rule):
                pairs = list(zip(listed(expected), listed(found), strict=False))
                for one, other in pairs:
                    if not isinstance(other, mw.Array) or not isinstance(one, np.ndarray | np.generic) or not one.size:
                        continue
                    seen.add(name)
                    told = f"{name} of {kind} of shape {a.shape}, result {np.shape(one)}"
                    assert np.shares_memory(one, a) == shows(other, x), told
                    assert isinstance(one, np.generic) == is_number(other), told
                    if isinstance(one, np.ndarray) and one.size > 1 and not {name, name.split(".")[0]} & OTHER_ORDER:
                        assert one.flags.c_contiguous == (strides_of(other) is None), told
                    if isinstance(one, np.ndarray):
                        read_only = other.alias is not None and other.alias.read_only
                        assert one.flags.writeable != read_only, told
    assert len(seen) > 200


def test_a_view_is_as_cheap_as_what_it_shows() -> None:
    x = XP.asarray(np.arange(60.0).reshape(12, 5))

    def write() -> None:
        b = x[::2]
        b += 1
        x[1:][3] = 0
        for each in x:
            each -= 1
        x[::-1][2] = 4
        x.T[1:] *= 2

    assert moved(write) == 0


def test_a_write_that_goes_back_to_other_places_is_told_once_with_its_line() -> None:
    x = XP.ones((4, 6), sharding=XP.shard(1))
    f = x.ravel()
    with pytest.warns(GatherWarning, match=r"test_views\.py:\d+: reshape writes to a view .* 192 B") as told:
        for value in (5, 6):
            f[0] = value
    assert len(told) == 1
    same(x[0], np.array([6.0, 1, 1, 1, 1, 1]))
    with mw.guard("error"), pytest.raises(mw.UsageError, match=r"test_views\.py:\d+: .*mw\.guard\('error'\) forbids"):
        f += 1
    same(f[:2], np.array([6.0, 1]))
    same(x[0, :2], np.array([6.0, 1]))
    with mw.guard("allow"):
        f[1:] += 1
    x[0] *= 2
    same(f, np.array([12.0, *[4] * 5, *[2] * 18]))


def test_what_nobody_else_has_is_written_where_it_lies() -> None:
    with mw.guard("error"):
        x = XP.arange(20.0).reshape(10, 2)
        x[3] = 7
        x += 1
        y = XP.arange(20.0).reshape(2, 10)[::-1]
        y[0] = 3
    same(x, np.array([[8.0, 8] if at == 3 else [2 * at + 1, 2 * at + 2] for at in range(10)]))
    assert x.alias is not None
    assert x.alias.source is None


def test_what_is_repeated_and_a_diagonal_are_not_written() -> None:
    x = XP.asarray(np.arange(9.0).reshape(3, 3))
    for view in (XP.broadcast_to(x[0], (4, 3)), XP.linalg.diagonal(x), XP.broadcast_arrays(x, x[:1])[1], x.imag):
        for write in (lambda v: v.__setitem__(..., 1), lambda v: v.__iadd__(1), lambda v: v[1:].fill(1)):
            with pytest.raises(ValueError, match="assignment destination is read-only"):
                write(view)
    x[0] = 5
    spread = XP.broadcast_to(x[0], (4, 3))
    x[0, 1] = 6
    same(spread, np.broadcast_to([5.0, 6, 5], (4, 3)))
    copy = spread.copy()
    copy += 1
    one, _ = XP.meshgrid(x[0], x[1])
    one[0] = 1
    same(one, np.array([[1.0, 1, 1], [5, 6, 5], [5, 6, 5]]))
    same(x[0], np.array([5.0, 6, 5]))


def test_a_view_keeps_what_it_shows_and_is_not_kept_by_it() -> None:
    x = XP.arange(12.0).reshape(3, 4)
    views = [x[1:], x[::-1], x.T, x.ravel()]
    gone = [weakref.ref(view) for view in views]
    expected = [view.numpy() for view in views]
    del views
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    last = x[::-1]
    base = weakref.ref(x)
    del x
    gc.collect()
    same(last, expected[1])  # from here it has what it shows for its own
    gc.collect()
    assert base() is None
    last[0] = 1
    same(last[0], np.ones(4))


def test_a_view_that_is_pickled_is_an_array_of_its_own() -> None:
    x = XP.arange(1200.0).reshape(400, 3)
    for view, expected in [(x[:2], [[0.0, 1, 2], [3, 4, 5]]), (x[1::-1], [[3.0, 4, 5], [0, 1, 2]]), (x[0, 2], 2.0)]:
        stored = pickle.dumps(view)
        found = pickle.loads(stored)
        same(found, np.array(expected))
        found += 1
        assert len(stored) < 2000
    same(x[:2], np.arange(6.0).reshape(2, 3))


def test_of_another_librarys_memory_an_array_is_a_copy_on_one_device_as_on_several() -> None:
    for devices in ("1xcpu", "3xcpu"):
        xp = mw.array_namespace(devices)
        values, tensor = np.zeros(6), torch.zeros(6)
        x, y = xp.asarray(values), xp.asarray(tensor)
        x += 1
        y[:2] = 1
        assert not values.any()
        assert not tensor.any()
        values[:] = 5
        same(x, np.ones(6))
        read = np.asarray(x)
        if devices == "1xcpu":
            read[0] = 3
            assert float(x[0]) == 3
        else:
            with pytest.raises(ValueError, match="read-only"):
                read[0] = 3
        own = np.array(x)
        own[1] = 9
        assert float(x[1]) == 1
    shared = mw.array_namespace("1xcpu").asarray(values, copy=False)
    shared[1:] += values[:-1]
    assert values.tolist() == [5.0, *[10] * 5]


def test_another_shape_in_place_shows_the_same_memory() -> None:
    for layout in layouts((4, 6)):
        x = XP.zeros((4, 6), sharding=layout)
        first = x[0]
        with mw.guard("allow"):
            x.shape = (3, 8)
            x[0, :2] = 1
            first[2] = 2
        same(x[0], np.array([1.0, 1, 2, 0, 0, 0, 0, 0]))
        turned = x.T
        with pytest.raises(AttributeError, match=r"Write x = x.reshape\(shape\)"):
            turned.shape = (24,)


def test_what_is_explained_is_not_written() -> None:
    x = XP.ones((4, 6), sharding=XP.shard(1))
    back = x[::-1]

    def write() -> None:
        x[1:] = back[:-1]
        back[0] = 0

    assert mw.explain(write).bytes == 0
    same(x, np.ones((4, 6)))
    back[0] = 5
    same(x[3], np.full(6, 5.0))


def test_an_array_with_views_does_not_move_to_one_device() -> None:
    x = XP.arange(5)
    row = x[1:]
    with mw.guard("allow"), pytest.raises(BufferError, match="with views needs a copy"):
        np.from_dlpack(x, copy=False)
    del row
    with mw.guard("allow"):
        np.from_dlpack(x, copy=False)
