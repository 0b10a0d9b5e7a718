"""`x[key]` and `x[key] = value` as NumPy has them, however the array, its masks, index arrays and values lie.

Also for arrays/keys.py, arrays/fetching.py, arrays/assigning.py, arrays/views.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from tests.arrays.drawn import Draw, same
from tests.pool import Pool

XP = mw.array_namespace("3xcpu")
Keys = tuple[tuple[Any, ...], tuple[Any, ...]]


def drawn_key(draw: Draw, shape: tuple[int, ...]) -> Keys:
    """A key of every kind, as NumPy gets it and with arrays of ours in it."""
    rng, given, ours = draw.rng, [], []
    dim = 0
    while dim < len(shape):
        length, kind = (
            shape[dim],
            rng.choice(["new", "slice", "slice", "slice", "int", "all", "mask", "array", "array"]),
        )
        if kind == "new":
            given.append(None)
            ours.append(None)
            continue
        key: Any = slice(None)
        own: Any = None
        if kind == "slice":
            bounds = [rng.choice([None, rng.randint(-length - 1, length + 1)]) for _ in range(2)]
            key = slice(*bounds, rng.choice([None, 1, 2, -1, -2, 3]))
        elif kind == "int" and length:
            key = rng.randint(-length, length - 1)
        elif kind == "mask":
            depth = rng.choice([1, 2]) if dim + 1 < len(shape) else 1
            key = draw.numbers.random(shape[dim : dim + depth]) < 0.5
            dim += depth - 1
        elif kind == "array" and length:
            key = draw.numbers.integers(-length, length, rng.choice([(3,), (1,), (2, 3), (0,), (3,)]))
            own = key.tolist() if rng.random() < 0.2 else None
        given.append(key)
        if isinstance(key, np.ndarray) and own is None:
            own = key if rng.random() < 0.3 else draw.placed(key)
        ours.append(key if own is None else own)
        dim += 1
    if rng.random() < 0.2:
        at = rng.randint(0, len(given))
        given.insert(at, ...)
        ours.insert(at, ...)
    return tuple(given), tuple(ours)


def drawn_value(draw: Draw, shape: tuple[int, ...]) -> Any:
    """A number, or values of a shape that broadcasts to this one."""
    if draw.rng.random() < 0.25:
        return 7.0
    lengths = [1 if draw.rng.random() < 0.2 else length for length in shape]
    return draw.values(lengths[draw.rng.randint(0, len(lengths)) if draw.rng.random() < 0.3 else 0 :], 100)


def read_and_write(draw: Draw) -> None:
    values = draw.values(draw.shape(0), 100, draw.rng.choice([np.int64, np.float64, np.float32]))
    x = draw.placed(values)
    given, ours = drawn_key(draw, values.shape)
    try:
        expected = np.asarray(values[given])
    except IndexError:  # index arrays that do not broadcast
        with pytest.raises(IndexError):
            x[ours]
        return
    kept = x[...]
    found = x[ours]
    same(found, expected)
    value = drawn_value(draw, expected.shape)
    values[given] = value
    x[ours] = draw.placed(value) if isinstance(value, np.ndarray) and draw.rng.random() < 0.7 else value
    same(x, values)
    same(found, expected)  # what was read before changes where NumPy's is a view
    same(kept, values)


@pytest.mark.parametrize("seed", range(12))
def test_reading_and_writing_by_drawn_keys(seed: int) -> None:
    for case in range(40):
        read_and_write(Draw((seed, case)))


def on_ranks(seeds: range) -> None:
    for seed in seeds:
        read_and_write(Draw((seed, "ranks"), mw.world_size()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_reading_and_writing_over_ranks(pool: Callable[[int], Pool], ranks: int) -> None:
    pool(ranks).run(on_ranks, range(60))


def test_an_ellipsis_parts_index_arrays_though_it_stands_for_no_dim() -> None:
    a = np.arange(24.0).reshape(4, 3, 2)
    same(XP.asarray(a)[:, 1, ..., [0, 1, 1]], a[:, 1, ..., [0, 1, 1]])
    same(XP.asarray(a)[:, 1, [0, 1, 1]], a[:, 1, [0, 1, 1]])


def test_one_entry_is_the_same_in_either_direction() -> None:
    a = np.arange(10.0).reshape(1, 10)
    x = XP.asarray(a)
    same(x[0::-1, ::-1], a[0::-1, ::-1])
    x[[0], ::-1] = XP.arange(10.0)
    same(x, np.arange(10.0)[None, ::-1])


def moved(run: Any) -> int:
    with mw.comm_log() as log:
        run()
    return sum(row.bytes for row in log)


def test_slices_move_nothing() -> None:
    x = XP.asarray(np.arange(60.0).reshape(12, 5))
    keys = [np.s_[1:], np.s_[::-1], np.s_[2:9:3, ::-2], np.s_[5], np.s_[..., None, 2], np.s_[-1:0:-4], np.s_[3:3]]
    for layout in (XP.shard(0), XP.shard(1), XP.shard(0, sizes=[0, 11, 1])):
        y = x.reshard(layout)
        assert moved(lambda y=y: [y[key] for key in keys]) == 0


def test_a_stencil_moves_a_row_at_each_border() -> None:
    u = XP.asarray(np.arange(90.0).reshape(9, 10))

    def step() -> None:
        u[1:-1] = u[:-2] + u[2:]

    # The sum: two rows at each of two borders, since its operands are shifted by two; the result: one row at each.
    assert moved(step) == (2 * 2 + 2 * 1) * 10 * 8
    before = np.arange(90.0).reshape(9, 10)
    expected = before.copy()
    expected[1:-1] = before[:-2] + before[2:]
    same(u, expected)


def test_a_value_moves_to_where_it_is_written_only() -> None:
    x, v = XP.zeros((9, 4)), XP.ones((3, 4), device="cpu:0")
    assert moved(lambda: x.__setitem__(slice(2, 5), v)) == 2 * 4 * 8  # one row of three lies on cpu:0 already
    assert moved(lambda: x.__setitem__(slice(None), XP.ones(4, device="cpu:1"))) == 2 * 4 * 8  # a row to two others
    assert moved(lambda: x.__setitem__(slice(0, 3), XP.ones(4, device="cpu:0"))) == 2 * 4 * 8
    assert moved(lambda: x.__setitem__((slice(None), 2), 5.0)) == 0
    assert moved(lambda: x.__setitem__(slice(None), np.ones((9, 4)))) == 0  # every process has it already


def test_masks_that_lie_as_the_array_move_nothing() -> None:
    x = XP.asarray(np.arange(60.0).reshape(12, 5) - 30)

    def masked() -> None:
        x[x < 0] = 0
        x[x[:, 0] > 5] *= 2
        x[x > 3]

    assert moved(masked) == 0


def test_index_arrays_move_requests_and_entries() -> None:
    x = XP.asarray(np.arange(24.0).reshape(12, 2))
    assert moved(lambda: x[[0, 3, 4, 11]]) == 0  # in ascending order they stay where they are
    assert moved(lambda: x[[11, 5, 0]]) == 2 * 2 * 8  # one for each place; two of them lie elsewhere
    index = XP.asarray([11, 5, 0])
    assert moved(lambda: x[index]) == 2 * (8 + 2 * 8)
    same(x[index], np.arange(24.0).reshape(12, 2)[[11, 5, 0]])


def test_of_an_entry_that_is_written_twice_the_last_value_stays() -> None:
    for layout in (XP.shard(0), XP.single(1)):
        x = XP.zeros(7, sharding=layout)
        x[[1, 6, 1, 1, 6]] = XP.asarray([1.0, 2, 3, 4, 5])
        same(x, np.array([0, 4.0, 0, 0, 0, 0, 5]))
        columns = XP.asarray([[0, 1, 5], [5, 6, 6]], sharding=XP.shard(1))
        x[columns] = XP.asarray([[1.0, 2, 3], [4, 5, 6]])
        same(x, np.array([1, 2.0, 0, 0, 0, 4, 6]))


def test_programs_write_through_slices_of_the_array_itself() -> None:
    a = np.arange(40.0).reshape(8, 5)
    x = XP.asarray(a)
    x[1:, :] = x[:-1, :]
    a[1:, :] = a[:-1, :].copy()
    same(x, a)
    x[:, 1:-1] += x[:, :-2] - x[:, 2:]
    a[:, 1:-1] += a[:, :-2] - a[:, 2:]
    same(x, a)
    x[::-1] = x
    same(x, a[::-1])
    x[2:5, 3] *= 2
    a = x.numpy()
    x[4] += x[3] - x[5]
    a[4] += a[3] - a[5]
    same(x, a)


@pytest.mark.parametrize(
    "key, what",
    [
        (12, "index 12 is out of bounds for axis 0 with size 12"),
        ((0, 0, 0), "too many indices"),
        (([0, 12],), "out of bounds"),
        ((..., 0, ...), "one ellipsis"),
        (1.5, "cannot index by"),
        ("a", "cannot index by"),
        (np.ones((3, 5), bool), "mask of shape"),
    ],
)
def test_keys_that_cannot_be(key: Any, what: str) -> None:
    x = XP.zeros((12, 5))
    with pytest.raises(IndexError, match=what):
        x[key]
    with pytest.raises(IndexError, match=what):
        x[key] = 1
    for layout in (XP.shard(1), XP.single(0)):
        with pytest.raises(IndexError, match=what):
            x.reshard(layout)[key] = XP.ones(5)


def test_values_that_cannot_be() -> None:
    x = XP.zeros((4, 3))
    with pytest.raises(ValueError, match=r"shape \(2,\) do not broadcast to \(4, 3\), the shape"):
        x[...] = [1, 2]
    with pytest.raises(TypeError, match="would lose the imaginary part"):
        x[0] = 1j
    with pytest.raises(TypeError, match=r"would lose the imaginary part"):
        x[0] = XP.asarray([1j, 2, 3])
    with pytest.raises(OverflowError, match=r"300 does not fit torch\.uint8 \(0 to 255\)"):
        XP.zeros(3, dtype="uint8")[0] = 300
    with pytest.raises(mw.UsageError, match="arrays belong to two array namespaces"):
        x[0] = mw.array_namespace("2xcpu").zeros(3)


def test_under_strict_virtual_devices() -> None:
    with mw.virtual_devices(3):
        xp = mw.array_namespace("3xcpu")
        a = np.arange(30.0).reshape(6, 5)
        x = xp.asarray(a)
        same(x[xp.asarray([5, 0, 2]), 1:], a[[5, 0, 2], 1:])
        same(x[x > 7], a[a > 7])
        x[1:] = x[:-1]
        x[xp.asarray([0, 5])] = xp.ones(5)
        x[x == 1] = 8
        b = a.copy()
        b[1:] = a[:-1]
        b[[0, 5]] = 1
        b[b == 1] = 8
        same(x, b)
        same(xp.reshape(xp.roll(x, 2, axis=0), (5, 6)), np.roll(b, 2, axis=0).reshape(5, 6))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_that_torch_moves_few_of(dtype: Any) -> None:
    a = np.arange(12, dtype=dtype).reshape(3, 4) + np.iinfo(dtype).max - dtype(20)
    x, above = XP.asarray(a), XP.asarray(a > a[1, 1])
    for found, expected in [
        (x[::-1, [0, 2]], a[::-1, [0, 2]]),
        (x[XP.asarray([2, 0])], a[[2, 0]]),
        (x[above], a[a > a[1, 1]]),
        (XP.flip(x), np.flip(a)),
        (XP.roll(x, 1, 0), np.roll(a, 1, 0)),
        (XP.tril(x), np.tril(a)),
        (XP.take_along_axis(x, XP.asarray([[2, 0, 1, 1]]), axis=0), np.take_along_axis(a, np.array([[2, 0, 1, 1]]), 0)),
        (XP.concat([x, x]), np.concatenate([a, a])),
        (XP.repeat(x, XP.asarray([1, 0, 2]), axis=0), np.repeat(a, [1, 0, 2], axis=0)),
        (XP.where(above, x, XP.zeros_like(x)), np.where(a > a[1, 1], a, dtype(0))),
    ]:
        same(found, np.asarray(expected))
    assert [len(each) for each in XP.nonzero(x)] == [12, 12]
    for key, value in [((0, 1), 7), (slice(1, 3), a[:2]), ([0, 2], a[1]), (a > a[2, 2], np.iinfo(dtype).max)]:
        x[XP.asarray(key) if isinstance(key, np.ndarray) else key] = value
        a[key] = value
        same(x, a)
    x[1] = XP.asarray([1, 2, 3, 4])
    assert x[1].numpy().tolist() == [1, 2, 3, 4]


def test_masks_without_elements_and_without_dims() -> None:
    x = XP.zeros((0, 1))
    same(x[XP.zeros((0, 0), dtype=bool)], np.zeros((0, 1))[np.zeros((0, 0), bool)])
    flag = XP.asarray(False)
    flag[flag] = True
    flag[XP.asarray(True)] = XP.asarray(True)
    same(flag, np.array(True))
    y = XP.arange(3)
    y[XP.asarray(True)] = 5
    same(y[XP.asarray(False)], np.arange(3)[False])
    same(y, np.full(3, 5))


OWN: dict[str, Callable[[Any], Any]] = {
    "concat": lambda x: XP.concat([x]),
    "roll": lambda x: XP.roll(x, 0, axis=0),
    "tile": lambda x: XP.tile(x, (1, 1)),
    "pad": lambda x: XP.pad(x, 0),
    "conj": XP.conj,
    "positive": lambda x: +x,
    "astype": lambda x: x.astype(x.dtype),
    "take": lambda x: XP.take(x, [0, 1], axis=0),
    "sum over no axis": lambda x: x.sum(axis=()),
    "map_shards": lambda x: mw.map_shards(lambda part: part, x),
}


@pytest.mark.parametrize("name", OWN)
def test_a_result_is_an_array_of_its_own(name: str) -> None:
    before = np.arange(6.0).reshape(2, 3)
    for write in ("in place", "by key", "to its origin"):
        x = XP.asarray(before)
        y = OWN[name](x)
        if write == "in place":
            y += 1
        elif write == "by key":
            y[0] = 9
        else:
            kept = y.numpy()
            x += 100
            x[0] = 7
            same(y, kept)
            continue
        same(x, before)
