"""Reshape arrays, moving only what crosses a new border.

Dims of the old and the new shape form groups of equal size. A group without the divided dim is reshaped where it lies.
The group that contains the divided dim is divided again along its first dim that has an entry for each device, in the
old proportions, rounded to whole entries.

The bytes moved are the lower bound in two cases. If the divided dim is the first dim of its group, before and after,
only what lies between an old border and the new one is moved. If it is the first dim either before or after, each
device is sent what it lacks of its new part. If it is the first dim neither before nor after, the group is flattened
first, and bytes move twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from meshwise.arrays.aliases import is_number, shown, strides_of, viewed
from meshwise.arrays.array import Array, empty_parts, like, numbered
from meshwise.arrays.creation import as_shape
from meshwise.arrays.moves import EXPLAINED, Move, exchange, reshard
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding
from meshwise.arrays.strides import of_reshape
from meshwise.arrays.views import made, size_of


def reshape(x: Array, /, shape: Shape | int, copy: bool | None = None) -> Array:
    """Reshape in row-major order."""
    wanted = _lengths(x.shape, shape)
    x = on_its_place(x)
    if not is_number(x):
        shown(x)
    shows, strides = of_reshape(x.shape, strides_of(x), wanted) if size_of(wanted) else (True, None)
    found, local = _reshaped(x, wanted)
    shared = list(map(_is_of, found.parts, x.parts)) if local else []
    if copy is False and not (local and all(shared)):
        why = "its elements are not in order" if local else "elements move to other devices"
        raise ValueError(f"reshape({shape}, copy=False) of {x.shape} needs a copy, because {why}. Leave copy out.")
    if copy or not shows:
        own = zip(found.parts, shared, strict=True) if local else ()
        return like(found, [part.clone() if of_x else part for part, of_x in own]) if any(shared) else found

    def rule(x: Array) -> Array:
        return _reshaped(x, wanted)[0]

    shape, held = x.shape, x.sharding

    def back(found: Array) -> Array:
        if not local:
            return _reshaped(on_its_place(found), shape)[0]
        here = zip(found.parts, found.space.local(held), strict=True)
        return made([part.reshape(held.part_shape(shape, k)) for part, (k, _) in here], held, found, shape)

    moves = "" if local else "reshape"
    return viewed(x, rule, strides, back=None if local and all(shared) else back, moves=moves, found=found)


def on_its_place(x: Array) -> Array:
    """If `x` is divided along a dim of length 1, return a view that lies undivided on one device, otherwise `x`."""
    held = x.sharding
    if held.dim is None or x.shape[held.dim] != 1:
        return x
    there = sharding((held.places[held.sizes.index(1)],))
    return viewed(x, lambda x: reshard(x, there), strides_of(x))


def _is_of(part: Tensor, whole: Tensor) -> bool:
    return bool(EXPLAINED) or part.data_ptr() == whole.data_ptr()


def _reshaped(x: Array, wanted: Shape) -> tuple[Array, bool]:
    """Return the reshaped array, and whether each device keeps its elements."""
    placed = x.sharding
    if not size_of(wanted):
        placed = evenly(wanted[0], placed.places)
        return made(empty_parts(x, wanted, placed), placed, x, wanted), True
    if placed.dim is not None:
        old, new = _seen(x.shape, wanted, placed)
        if old.outer > 1 or new.outer > 1 or old.begins != new.begins:
            return _moved(x, wanted, old, new), False
        placed = new.placed
    here = zip(x.parts, x.space.local(placed), strict=True)
    return made([part.reshape(placed.part_shape(wanted, k)) for part, (k, _) in here], placed, x, wanted), True


def flat(x: Array) -> Array:
    """Flatten in row-major order. The result is a view if `x` is in this order, otherwise a copy."""
    return reshape(x, (-1,), True if strides_of(x) is not None else None)


def along_dim(x: Array, dim: int, ndim: int) -> Array:
    """Reshape a vector to `ndim` dims, with its entries along `dim`."""
    return reshape(x, tuple(-1 if each == dim else 1 for each in range(ndim)))


def _lengths(shape: Shape, given: Shape | int) -> Shape:
    lengths = tuple(int(n) for n in given) if hasattr(given, "__iter__") else (int(given),)
    if lengths.count(-1) == 1:
        others = -math.prod(lengths)
        if others and size_of(shape) % others == 0:
            lengths = tuple(size_of(shape) // others if n == -1 else n for n in lengths)
    if -1 in lengths or math.prod(lengths) != size_of(shape):
        raise ValueError(f"reshape of {shape} to {lengths}: the product of the new lengths must be {size_of(shape)}.")
    return as_shape(lengths)


@dataclass(frozen=True)
class Rows:
    """How an array is divided over devices: its shape is (before, outer, length, after), and `length` is split."""

    before: int
    outer: int
    length: int
    after: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    placed: Sharding

    def seen(self, part: Tensor, k: int) -> Tensor:
        """Reshape part number k to (before, outer, columns of this part, after)."""
        return part.reshape(self.before, self.outer, self.ends[k] - self.begins[k], self.after)


def _rows(shape: Shape, group: tuple[int, int], placed: Sharding) -> Rows:
    """Describe a divided array as `Rows`."""
    assert placed.dim is not None
    first, last = group
    inner = math.prod(shape[placed.dim + 1 : last])
    begins = tuple(begin * inner for begin in placed.offsets)
    ends = tuple((begin + size) * inner for begin, size in zip(placed.offsets, placed.sizes, strict=True))
    before, outer, after = (math.prod(shape[a:b]) for a, b in ((0, first), (first, placed.dim), (last, len(shape))))
    return Rows(before, outer, shape[placed.dim] * inner, after, begins, ends, placed)


def _seen(old: Shape, new: Shape, placed: Sharding) -> tuple[Rows, Rows]:
    """Describe as `Rows` how the array is divided in its old shape and in its new shape."""
    assert placed.dim is not None
    group, (first, last) = _groups(old, new, placed.dim)
    places, whole = len(placed.places), old[placed.dim]
    enough = [dim for dim in range(first, last) if new[dim] >= places]
    dim = enough[0] if enough else max(range(first, last), key=lambda each: new[each])
    borders = [(begin * new[dim] * 2 + whole) // (2 * whole) for begin in (*placed.offsets, whole)]
    sizes = tuple(end - begin for begin, end in itertools.pairwise(borders))
    return _rows(old, group, placed), _rows(new, (first, last), sharding(placed.places, dim, sizes))


def _groups(old: Shape, new: Shape, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the group of dims that contains the dim `dim` of the old shape, and the matching group of the new
    shape."""
    i = j = 0
    while True:
        begin = i, j
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        if i > dim:
            return (begin[0], i), (begin[1], j)


def _moved(x: Array, wanted: Shape, old: Rows, new: Rows) -> Array:
    """Reshape `x`, which is divided as `old` says, to the shape `wanted`, divided as `new` says."""
    if old.outer > 1 and new.outer > 1:
        shape = (old.before, old.outer * old.length, old.after)
        between = _rows(shape, (1, 2), evenly(shape[1], old.placed.places, 1))
        return _moved(_moved(x, shape, old, between), wanted, between, new)
    held = {k: old.seen(part, k) for k, part in numbered(x)}
    found = made(empty_parts(x, wanted, new.placed), new.placed, x, wanted)
    made_of = {k: new.seen(part, k) for k, part in numbered(found)}
    line, rows = (old, new) if old.outer == 1 else (new, old)
    pieces = []
    for (i, source), (j, target) in itertools.product(enumerate(old.placed.places), enumerate(new.placed.places)):
        k, n = (i, j) if line is old else (j, i)
        for box in _boxes(line.begins[k], line.ends[k], rows, n):
            views = []
            for tensors, number, each in ((held, i, old), (made_of, j, new)):
                see = _of_line if each is line else _of_rows
                views.append(see(tensors[number], box, each, number, rows.length) if number in tensors else None)
            shape4 = (old.before, box.count, box.high - box.low, old.after)
            pieces.append(Move(source, target, (i, j, box.row), shape4, x.dtype, views[0], views[1]))
    exchange(x.space, pieces, "reshape")
    return found


@dataclass(frozen=True)
class Box:
    """A block of `count` rows from row `row` on, with the entries `low` to `high` of each row."""

    row: int
    count: int
    low: int
    high: int


def _boxes(begin: int, end: int, rows: Rows, n: int) -> Iterator[Box]:
    """Yield the blocks that two parts have in common: one part before a reshape, and one after it."""
    length, low, high = rows.length, rows.begins[n], rows.ends[n]
    if begin >= end:
        return
    first, last = begin // length, (end - 1) // length
    found = []
    if first == last:
        found.append(Box(first, 1, max(low, begin - first * length), min(high, end - first * length)))
    else:
        found.append(Box(first, 1, max(low, begin - first * length), high))
        found.append(Box(first + 1, last - first - 1, low, high))
        found.append(Box(last, 1, low, min(high, end - last * length)))
    yield from (box for box in found if box.count and box.low < box.high)


def _of_line(tensor: Tensor, box: Box, line: Rows, k: int, length: int) -> Tensor:
    """Return a torch view of the block `box` in part k of the array `line`."""
    at = box.row * length - line.begins[k]
    if box.count == 1:
        return tensor[:, :, at + box.low : at + box.high]
    whole = tensor[:, 0, at : at + box.count * length]
    rows = whole.view(whole.shape[0], box.count, length, whole.shape[2])
    return rows[:, :, box.low : box.high]


def _of_rows(tensor: Tensor, box: Box, rows: Rows, n: int, length: int) -> Tensor:
    """Return a torch view of the block `box` in part n of the array `rows`."""
    return tensor[:, box.row : box.row + box.count, box.low - rows.begins[n] : box.high - rows.begins[n]]
