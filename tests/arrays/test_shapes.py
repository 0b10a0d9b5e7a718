"""Shapes changed, arrays joined, shifted and chosen from, as NumPy does it, however they lie; and the bytes it takes.

Also for arrays/layout.py, arrays/runs.py, arrays/numpy_shapes.py, arrays/joining.py, arrays/reshaping.py and
arrays/choosing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw
from meshwise.arrays.sharding import sharding
from tests.arrays.drawn import Draw, same
from tests.pool import Pool

XP = mw.array_namespace("3xcpu")


def concat(draw: Draw) -> None:
    lengths = list(draw.shape())
    axis = draw.rng.randrange(-len(lengths), len(lengths))
    values = []
    for _ in range(draw.rng.randint(1, 4)):
        lengths[axis] = draw.rng.choice([0, 1, 2, 4])
        values.append(draw.values(lengths, dtype=draw.rng.choice([np.int64, np.float32])))
    same(draw.xp.concat([draw.placed(each) for each in values], axis=axis), np.concatenate(values, axis=axis))
    same(draw.xp.concat([draw.placed(each) for each in values], axis=None), np.concatenate(values, axis=None))


def stack(draw: Draw) -> None:
    shape = draw.shape(0, 3)
    axis = draw.rng.randrange(-len(shape) - 1, len(shape) + 1)
    values = [draw.values(shape) for _ in range(draw.rng.randint(1, 4))]
    found = draw.xp.stack([draw.placed(each) for each in values], axis=axis)
    same(found, np.stack(values, axis=axis))
    for one, expected in zip(draw.xp.unstack(found, axis=axis), values, strict=True):
        same(one, expected)


def roll(draw: Draw) -> None:
    values = draw.values(draw.shape())
    x, rng = draw.placed(values), draw.rng
    axes = tuple(rng.sample(range(values.ndim), rng.randint(1, values.ndim)))
    shifts = tuple(rng.randint(-9, 9) for _ in axes)
    found = draw.xp.roll(x, shifts, axis=axes)
    same(found, np.roll(values, shifts, axes))
    assert found.sharding == x.sharding
    same(draw.xp.roll(x, shifts[0]), np.roll(values, shifts[0]))


def flip(draw: Draw) -> None:
    values = draw.values(draw.shape())
    axis = draw.rng.choice([None, draw.rng.randrange(-values.ndim, values.ndim)])
    same(draw.xp.flip(draw.placed(values), axis=axis), np.flip(values, axis))


def tile(draw: Draw) -> None:
    values = draw.values(draw.shape())
    times = tuple(draw.rng.randint(0, 3) for _ in range(draw.rng.randint(1, 4)))
    same(draw.xp.tile(draw.placed(values), times), np.tile(values, times))


def repeat(draw: Draw) -> None:
    values = draw.values(draw.shape())
    axis = draw.rng.choice([None, draw.rng.randrange(-values.ndim, values.ndim)])
    times = draw.numbers.integers(0, 3, values.size if axis is None else values.shape[axis])
    same(draw.xp.repeat(draw.placed(values), draw.placed(times), axis=axis), np.repeat(values, times, axis))
    same(draw.xp.repeat(draw.placed(values), 2, axis=axis), np.repeat(values, 2, axis))


def diff(draw: Draw) -> None:
    values, n = draw.values(draw.shape()), draw.rng.randint(0, 3)
    axis = draw.rng.randrange(-values.ndim, values.ndim)
    more = draw.values([1 if dim == axis % values.ndim else n for dim, n in enumerate(values.shape)])
    x = draw.placed(values)
    same(draw.xp.diff(x, axis=axis, n=n), np.diff(values, axis=axis, n=n))
    found = draw.xp.diff(x, axis=axis, n=n, prepend=draw.placed(more))
    same(found, np.diff(values, axis=axis, n=n, prepend=more))


def pad(draw: Draw) -> None:
    values, rng = draw.values(draw.shape()), draw.rng
    for mode in ("constant", "edge", "wrap", "reflect", "symmetric"):
        most = [{"constant": 3, "edge": 3 * (n > 0), "reflect": max(n - 1, 0)}.get(mode, n) for n in values.shape]
        widths = [(rng.randint(0, n), rng.randint(0, n)) for n in most]
        same(draw.xp.pad(draw.placed(values), widths, mode), np.pad(values, widths, mode))


def halo(draw: Draw) -> None:
    values, rng = draw.values(draw.shape()), draw.rng
    x = draw.placed(values)
    before, after, wrap, dim = rng.randint(0, 4), rng.randint(0, 4), rng.random() < 0.5, x.sharding.dim
    found = draw.xp.halo(x, before, after, wrap=wrap)
    for (number, _), part in zip(x.space.local(x.sharding), found, strict=True):
        if dim is None:
            assert np.array_equal(part, values)
            continue
        begin, size, length = x.sharding.offsets[number], x.sharding.sizes[number], values.shape[dim]
        wanted = range(begin - before, begin + size + after) if size else range(0)
        entries = [k % length for k in wanted] if wrap else [k for k in wanted if 0 <= k < length]
        assert np.array_equal(part, np.take(values, entries, dim))


def reshape(draw: Draw) -> None:
    rng = draw.rng
    shape = rng.choice(
        [(24,), (4, 6), (2, 3, 4), (12, 1, 2), (2, 2, 2, 3), (5, 24), (3, 8, 5), (1, 24), (24, 10), (0,)]
    )
    values = draw.values(shape, 99, np.int32)
    left, new = values.size, []
    for _ in range(rng.randint(0, 3) if left else 2):
        new.append(rng.choice([n for n in range(1, left + 1) if left % n == 0]) if left else 3)
        left //= new[-1]
    new.append(left)
    if rng.random() < 0.3:
        new.insert(rng.randint(0, len(new)), 1)
    if values.size and rng.random() < 0.3:
        new[rng.randrange(len(new))] = -1
    same(draw.xp.reshape(draw.placed(values), tuple(new)), values.reshape(new))


def dims(draw: Draw) -> None:
    values, rng = draw.values(draw.shape()), draw.rng
    x, order = draw.placed(values), rng.sample(range(values.ndim), values.ndim)
    same(draw.xp.permute_dims(x, order), values.transpose(order))
    chosen = rng.randint(1, values.ndim)
    same(draw.xp.moveaxis(x, order[:chosen], order[-chosen:]), np.moveaxis(values, order[:chosen], order[-chosen:]))
    same(draw.xp.expand_dims(x, axis=(0, -1)), np.expand_dims(values, (0, -1)))
    same(x.T, values.T)
    ones = tuple(dim for dim, length in enumerate(values.shape) if length == 1)
    same(draw.xp.squeeze(x, axis=ones), values.squeeze(ones))
    wide = (2, *(3 if length == 1 else length for length in values.shape))
    same(draw.xp.broadcast_to(x, wide), np.broadcast_to(values, wide))


def broadcast_arrays(draw: Draw) -> None:
    values = draw.values(draw.shape())
    less = [1 if draw.rng.random() < 0.4 else n for n in values.shape]
    other = draw.values(less[draw.rng.randint(0, len(less)) :])
    found = draw.xp.broadcast_arrays(draw.placed(values), draw.placed(other))
    for one, expected in zip(found, np.broadcast_arrays(values, other), strict=True):
        same(one, expected)
    assert found[0].sharding == found[1].sharding


def triangles(draw: Draw) -> None:
    values, k = draw.values(draw.shape(2)), draw.rng.randint(-4, 4)
    same(draw.xp.tril(draw.placed(values), k=k), np.tril(values, k))
    same(draw.xp.triu(draw.placed(values), k=k), np.triu(values, k))


def meshgrid(draw: Draw) -> None:
    lines = [draw.values(draw.rng.choice([0, 1, 4, 5])) for _ in range(draw.rng.randint(1, 3))]
    for indexing in ("xy", "ij"):
        found = draw.xp.meshgrid(*map(draw.placed, lines), indexing=indexing)
        for one, expected in zip(found, np.meshgrid(*lines, indexing=indexing), strict=True):
            same(one, expected)


def where(draw: Draw) -> None:
    shape = draw.shape()

    def part(dtype: Any) -> Any:
        less = [1 if draw.rng.random() < 0.3 else n for n in shape]
        return draw.values(less[draw.rng.randint(0, len(shape)) :], 2, dtype)

    condition, one, other = part(bool), part(np.float32), part(np.int64)
    shown, x, y = map(draw.placed, (condition, one, other))
    same(draw.xp.where(shown, x, y), np.where(condition, one, other))
    same(draw.xp.where(shown, 2, y), np.where(condition, 2, other))


def take(draw: Draw) -> None:
    values = draw.values([max(n, 1) for n in draw.shape()])
    axis, x = draw.rng.randrange(-values.ndim, values.ndim), draw.placed(values)
    length = values.shape[axis]
    index = draw.numbers.integers(-length, length, draw.rng.choice([(3,), (2, 2), (0,)]))
    same(draw.xp.take(x, draw.placed(index), axis=axis), np.take(values, index, axis=axis))
    lengths = [1 if draw.rng.random() < 0.2 else n for n in values.shape]
    lengths[axis] = draw.rng.choice([0, 1, 3])
    along = draw.numbers.integers(-length, length, lengths)
    same(draw.xp.take_along_axis(x, draw.placed(along), axis=axis), np.take_along_axis(values, along, axis))


def nonzero(draw: Draw) -> None:
    values = draw.values(draw.shape(), 2)
    for one, expected in zip(draw.xp.nonzero(draw.placed(values)), values.nonzero(), strict=True):
        same(one, expected)


CASES: list[Callable[[Draw], None]] = [
    *(concat, stack, roll, flip, tile, repeat, diff, pad, halo, reshape, dims, broadcast_arrays, triangles, meshgrid),
    *(where, take, nonzero),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_numpy(case: Callable[[Draw], None]) -> None:
    for seed in range(25):
        case(Draw((case.__name__, seed)))


def on_ranks(seeds: range) -> None:
    for seed in seeds:
        for case in CASES:
            case(Draw((case.__name__, seed), mw.world_size()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_ranks_as_numpy(pool: Callable[[int], Pool], ranks: int) -> None:
    pool(ranks).run(on_ranks, range(100, 104))


def moved(run: Callable[[], Any]) -> int:
    with mw.comm_log() as log:
        run()
    return sum(row.bytes for row in log)


def grid(rows: int, columns: int, layout: Any = None) -> Any:
    return XP.asarray(np.arange(float(rows * columns)).reshape(rows, columns), sharding=layout)


@pytest.mark.parametrize("layout", [XP.shard(0), XP.shard(1), XP.shard(0, sizes=[0, 5, 1])])
def test_what_needs_no_bytes(layout: Any) -> None:
    x = grid(6, 4, layout)
    other = 1 - x.sharding.dim

    def free() -> None:
        XP.permute_dims(x, (1, 0))
        XP.flip(x)
        XP.roll(x, 1, axis=other)
        XP.concat([x, x], axis=other)
        XP.stack([x, x], axis=other)
        XP.unstack(x, axis=0)
        XP.tile(x, (2, 1) if other == 0 else (1, 2))
        XP.repeat(x, 3, axis=x.sharding.dim)
        XP.expand_dims(x, axis=1)
        XP.broadcast_to(x, (5, 6, 4))
        XP.tril(x)
        XP.triu(x, k=1)
        XP.where(x > 3, x, 0)
        XP.take(x, [1, 0], axis=other)
        XP.diff(x, axis=other)
        XP.pad(x, 2)
        x.reshape(6, 2, 2) if other else x.reshape(2, 3, 4)

    assert moved(free) == 0


def test_roll_moves_what_passes_the_end_of_a_part() -> None:
    x = grid(9, 4)
    assert moved(lambda: XP.roll(x, 1, axis=0)) == 3 * 4 * 8
    assert moved(lambda: XP.roll(x, -2, axis=0)) == 3 * 2 * 4 * 8
    assert moved(lambda: XP.roll(x, 9, axis=0)) == 0


def test_concat_moves_what_then_lies_elsewhere() -> None:
    x = grid(6, 4)
    # Rows 0 1|2 3|4 5 twice become 0 1 2 3|4 5 0 1|2 3 4 5: two of each place but the outer ones are there.
    found = XP.concat([x, x])
    assert found.sharding.sizes == (4, 4, 4)
    assert moved(lambda: XP.concat([x, x])) == 8 * 4 * 8
    one, other = grid(2, 4, XP.single(0)), grid(3, 4, XP.single(2))
    assert moved(lambda: XP.concat([one, other])) == 0
    assert moved(lambda: XP.stack([x[0], x[5]])) == 0
    columns = grid(6, 4, XP.shard(1))
    assert moved(lambda: XP.concat([x, columns], axis=1)) == (24 - (4 + 2 + 2)) * 8


def test_reshape_moves_what_lies_between_the_old_borders_and_the_new() -> None:
    x = XP.arange(24.0)  # 8|8|8
    assert moved(lambda: x.reshape(3, 8)) == 0
    assert moved(lambda: x.reshape(6, 4)) == 0
    assert moved(lambda: x.reshape(4, 6)) == (2 + 2) * 8  # rows 1|2|1: borders at 6 and 18
    y = grid(4, 6, XP.shard(1))
    assert moved(lambda: y.reshape(4, 3, 2)) == 0
    assert moved(lambda: y.reshape(24)) == (24 - 12) * 8  # of its third each place has half


def test_halo_moves_the_neighbours_rows() -> None:
    x = grid(9, 4)
    assert moved(lambda: XP.halo(x, 1, 1)) == 4 * 4 * 8
    assert moved(lambda: XP.halo(x, 1, 1, wrap=True)) == 6 * 4 * 8
    uneven = grid(9, 4, XP.shard(0, sizes=[8, 1, 0]))
    assert moved(lambda: XP.halo(uneven, 2, 2)) == (1 + 2) * 4 * 8  # an empty part needs none
    for layout in (XP.shard(0), XP.single(), XP.shard(0, sizes=[0, 9, 0])):
        x = grid(9, 4, layout)
        for part in XP.halo(x, 1, 0):
            part += 100  # is not the array's
        same(x, np.arange(36.0).reshape(9, 4))


def test_what_is_repeated_goes_to_each_place() -> None:
    x, y = XP.arange(6.0), XP.arange(4.0, device="cpu:0")
    assert moved(lambda: XP.meshgrid(x, y, indexing="ij")) == 2 * 4 * 8
    assert moved(lambda: XP.diff(x)) == 2 * 8


def test_reshape_makes_memory_of_its_own_or_refuses_to() -> None:
    x = grid(4, 6)
    assert x.reshape(24, copy=False).parts[0].data_ptr() == x.parts[0].data_ptr()
    assert x.reshape(24, copy=True).parts[0].data_ptr() != x.parts[0].data_ptr()
    with pytest.raises(ValueError, match="elements move to other devices"):
        grid(4, 6, XP.shard(1)).reshape(24, copy=False)
    with pytest.raises(ValueError, match="not in order"):
        XP.reshape(grid(4, 6, XP.single()).T, (24,), copy=False)


def test_arrays_of_others_are_taken() -> None:
    a = np.arange(6.0).reshape(2, 3)
    same(XP.permute_dims(a, (1, 0)), a.T)
    same(XP.concat([a, torch.ones(1, 3, dtype=torch.float64)]), np.concatenate([a, np.ones((1, 3))]))
    same(XP.where(a > 2, a, 0), np.where(a > 2, a, 0))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: XP.reshape(grid(2, 3), (4,)), ValueError, "the product of the new lengths must be 6"),
    (lambda: XP.reshape(grid(2, 3), (-1, -1)), ValueError, "the product of the new lengths must be 6"),
    (lambda: XP.permute_dims(grid(2, 3), (0, 0)), ValueError, "must name each of 2 dims once"),
    (lambda: XP.matrix_transpose(XP.arange(3)), ValueError, "two dims"),
    (lambda: XP.squeeze(grid(2, 3), axis=0), ValueError, "dims of length 1"),
    (lambda: XP.expand_dims(XP.arange(3), axis=3), IndexError, "2 dims"),
    (lambda: XP.broadcast_to(XP.arange(3), (2, 2)), ValueError, "lengths must be equal"),
    (lambda: XP.concat([]), ValueError, "at least one"),
    (lambda: XP.concat(grid(2, 3)), TypeError, "a list of arrays"),
    (lambda: XP.concat([grid(2, 3), grid(2, 4)]), ValueError, "must be equal in other dims"),
    (lambda: XP.stack([grid(2, 3), grid(2, 4)]), ValueError, "all shapes must be equal"),
    (lambda: XP.roll(grid(2, 3), (1, 2), axis=0), ValueError, "shift and axis must have equally many entries"),
    (lambda: XP.tile(grid(2, 3), (-1,)), ValueError, "repetitions must be 0 or more"),
    (lambda: XP.repeat(grid(2, 3), XP.arange(4), axis=0), ValueError, r"or have shape \(2,\)"),
    (lambda: XP.take(grid(2, 3), [0]), ValueError, "needs axis="),
    (lambda: XP.take(grid(2, 3), [5], axis=0), IndexError, "out of bounds"),
    (lambda: XP.pad(XP.arange(3), 3, "reflect"), ValueError, "takes widths up to 2"),
    (lambda: XP.halo(XP.arange(3), -1, 0), ValueError, "0 or more"),
    (lambda: XP.halo(grid(6, 3), 1, 1, dim=1), ValueError, "reshard"),
    (lambda: XP.nonzero(XP.asarray(1)), ValueError, "this array has none"),
    (lambda: XP.meshgrid(XP.arange(3), indexing="yx"), ValueError, "'xy' or 'ij'"),
    (
        lambda: XP.concat([grid(2, 3), mw.array_namespace("2xcpu").ones((2, 3))]),
        mw.UsageError,
        "arrays belong to two array namespaces",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be(number: int) -> None:
    run, error, what = REFUSED[number]
    with pytest.raises(error, match=what):
        run()


def test_places_in_another_order() -> None:
    x = grid(5, 2, sharding((2, 0, 1), 0, (1, 4, 0)))
    same(x[::-1] + x, (np.arange(10.0).reshape(5, 2)[::-1] + np.arange(10.0).reshape(5, 2)))
    assert XP.flip(XP.flip(x)).sharding == x.sharding


def test_the_spellings_of_numpy() -> None:
    a = np.arange(12.0).reshape(3, 4)
    x = XP.asarray(a)
    same(XP.roll(x, 1, 0), np.roll(a, 1, 0))
    same(XP.flip(x, 1), np.flip(a, 1))
    same(XP.stack([x, x], 1), np.stack([a, a], 1))
    same(XP.expand_dims(x, 0), np.expand_dims(a, 0))
    same(XP.diff(x, 2, 0), np.diff(a, 2, 0))
    same(XP.take(x, [2, 0], 0), np.take(a, [2, 0], 0))
    same(x.repeat(2, axis=0), a.repeat(2, axis=0))
    same(x.transpose(1, 0), a.transpose(1, 0))
    same(x.reshape((2, -1)), a.reshape((2, -1)))
    same(x.swapaxes(0, 1), a.swapaxes(0, 1))
    same(x.ravel(), a.ravel())
    same(x.flatten(), a.flatten())
    assert [float(row.sum()) for row in x] == [row.sum() for row in a]
    assert 5.0 in x
    assert 50.0 not in x
    with pytest.raises(TypeError, match="an array without dims cannot be iterated over"):
        iter(XP.asarray(1.0))


def test_numpys_other_functions_of_shapes() -> None:
    a = np.arange(24.0).reshape(6, 4) % 7
    x, vector = XP.asarray(a, sharding=XP.shard(0, sizes=[0, 5, 1])), np.arange(5)
    for sections in (4, [2, 2, 5], [1, -1]):
        for one, expected in zip(XP.array_split(x, sections), np.array_split(a, sections), strict=True):
            same(one, expected)
    for one, expected in zip(XP.split(x, 2, axis=1), np.split(a, 2, axis=1), strict=True):
        same(one, expected)
    for name in ("atleast_1d", "atleast_2d", "atleast_3d"):
        for values in (np.array(3.0), vector, a, a[None]):
            same(getattr(XP, name)(XP.asarray(values)), getattr(np, name)(values))
    for k in range(-2, 5):
        same(XP.rot90(x, k), np.rot90(a, k))
    same(XP.fliplr(x), np.fliplr(a))
    same(XP.flipud(x), np.flipud(a))
    same(XP.append(x, x[:1], axis=0), np.append(a, a[:1], axis=0))
    same(XP.argwhere(x), np.argwhere(a))
    same(XP.flatnonzero(x), np.flatnonzero(a))
    same(XP.where(x)[1], np.where(a)[1])
    same(XP.rollaxis(x, 1), np.rollaxis(a, 1))
    same(XP.diff(XP.asarray(vector.astype(np.uint16)[::-1].copy())), np.diff(vector.astype(np.uint16)[::-1]))
    with pytest.raises(ValueError, match="Use array_split"):
        XP.split(x, 4)
