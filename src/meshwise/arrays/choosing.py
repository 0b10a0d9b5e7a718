"""Choose entries of arrays, and broadcast arrays to a common shape."""

from __future__ import annotations

from typing import Any

import torch

from meshwise.arrays.aliases import as_array_without_dims, copied, in_order_of, viewed
from meshwise.arrays.align import aligned, broadcast_shape, common_space, lies_for
from meshwise.arrays.array import Array, numbered
from meshwise.arrays.dtypes import of_scalar, promoted
from meshwise.arrays.elementwise import NoArrayGiven, is_python_number
from meshwise.arrays.fetching import ask, fetch
from meshwise.arrays.indexing import nonzero, pick
from meshwise.arrays.keys import on_host
from meshwise.arrays.layout import arranged, broadcast_to, of_repeated, spread
from meshwise.arrays.sharding import resized, sharding
from meshwise.arrays.views import SIGNED, axis_of, by_bits, made


def where(condition: Any, x1: Any = None, x2: Any = None, /) -> Any:
    """Return the elements of `x1` where the condition is true, and the elements of `x2` elsewhere.

    As many bytes move between devices as for `x1 + x2`. If neither `x1` nor `x2` is given, `nonzero(condition)` is
    returned.

    x1, x2: arrays that broadcast with the condition, or numbers.
    """
    if x1 is None and x2 is None and isinstance(condition, Array):
        return nonzero(condition)
    if not isinstance(condition, Array) or any(not isinstance(x, Array) and not is_python_number(x) for x in (x1, x2)):
        raise NoArrayGiven("where: condition must be an array, x1 and x2 arrays or numbers. Use xp.asarray(value).")
    arrays = [x for x in (x1, x2) if isinstance(x, Array)]
    dtype = arrays[0].dtype if arrays else torch.bool
    for x in arrays[1:]:
        dtype = promoted(dtype, x.dtype)
    for x in (x1, x2):
        if not isinstance(x, Array):
            dtype = of_scalar(x, dtype, condition.space.default_float)
    shape, placed, (shown, *given) = aligned("where", [condition, *arrays])
    own = iter(given)
    both = [next(own) if isinstance(x, Array) else [torch.tensor(x, dtype=dtype)] * len(shown) for x in (x1, x2)]
    bits = SIGNED.get(dtype, dtype)  # torch.where does not support uint16 in torch 2.11
    firsts, seconds = ([x.to(dtype).view(bits) for x in parts] for parts in both)
    parts = [torch.where(c != 0, a, b).view(dtype) for c, a, b in zip(shown, firsts, seconds, strict=True)]
    found = as_array_without_dims(Array(tuple(parts), placed, shape, dtype, condition.space))
    return in_order_of(found, [condition, *arrays])


@by_bits
def take(x: Array, indices: Any, /, axis: int | None = None) -> Array:
    """Take the entries at these indices along `axis`."""
    if axis is None:
        if x.ndim != 1:
            raise ValueError(f"take: an array of {x.ndim} dims needs axis=. Write axis=0, or flatten the array.")
        axis = 0
    dim = axis_of(axis, x.ndim, "take")
    index = indices if isinstance(indices, Array) else torch.as_tensor(on_host(indices))
    if index.dtype.is_floating_point or index.dtype is torch.bool:
        raise IndexError(f"take needs integer indices, not indices of dtype {index.dtype}.")
    found = pick(x, (dim,), [index])
    depth = index.ndim
    order = [*range(depth, depth + dim), *range(depth), *range(depth + dim, found.ndim)]
    return found if order == sorted(order) else copied(arranged(found, order))


@by_bits
def take_along_axis(x: Array, indices: Array, /, axis: int = -1) -> Array:
    """For each row along `axis`, take the entries at the indices of that row, as NumPy's `take_along_axis` does."""
    if not isinstance(indices, Array):
        raise NoArrayGiven("take_along_axis: indices must be an array. Write xp.asarray(indices).")
    dim, ndim = axis_of(axis, x.ndim, "take_along_axis"), x.ndim
    if indices.ndim != ndim:
        raise ValueError(f"take_along_axis: indices need {ndim} dims like the array, but have {indices.ndim}.")
    one = [resized(each.shape, dim, 1) for each in (x, indices)]
    around = broadcast_shape("take_along_axis", one)
    shape = resized(around, dim, indices.shape[dim])
    rows = resized(around, dim, x.shape[dim])
    if x.sharding.dim == dim:
        x = broadcast_to(x, rows)
        grids = [torch.arange(n).reshape([-1 if k == each else 1 for k in range(ndim)]) for each, n in enumerate(shape)]
        return fetch(x, ask(x, tuple(range(ndim)), [indices if k == dim else grids[k] for k in range(ndim)]))
    placed = x.sharding
    if placed.dim is not None and x.shape[placed.dim] != shape[placed.dim]:
        placed = sharding(placed.places)
    theirs = spread(indices, shape, placed, "take_along_axis")
    own = spread(x, rows, placed, "take_along_axis")
    parts = [torch.take_along_dim(a, b.to(torch.int64), dim) for a, b in zip(own.parts, theirs.parts, strict=True)]
    return made(parts, placed, x, shape)


@by_bits
def tril(x: Array, /, k: int = 0) -> Array:
    """Return the lower triangles: elements above diagonal number `k` are set to zero.
    Moves no data."""
    return _triangle("tril", x, k)


@by_bits
def triu(x: Array, /, k: int = 0) -> Array:
    """Return the upper triangles: elements below diagonal number `k` are set to zero.
    Moves no data."""
    return _triangle("triu", x, k)


def _triangle(name: str, x: Array, k: int) -> Array:
    ndim = x.ndim
    if ndim < 2:
        raise ValueError(f"{name} needs an array of two dims or more, but this array has shape {x.shape}.")
    parts = []
    for number, part in numbered(x):
        begin = 0 if x.sharding.dim is None else x.sharding.offsets[number]
        shift = begin if x.sharding.dim == ndim - 2 else -begin if x.sharding.dim == ndim - 1 else 0
        parts.append(getattr(torch, name)(part, diagonal=k + shift))
    return made(parts, x.sharding, x, x.shape)


def broadcast_arrays(*arrays: Array) -> tuple[Array, ...]:
    """Broadcast arrays to a common shape and layout, and return read-only views."""
    given = list(arrays)
    if len({(x.shape, x.sharding) for x in given}) < 2:
        return tuple(given)
    shape, placed, _ = aligned("broadcast_arrays", given)

    def rule(x: Array) -> Array:
        return spread(x, shape, placed, "broadcast_arrays")

    def view(x: Array) -> Array:
        moves = "" if x.sharding == lies_for(shape, x.shape, placed) else "broadcast_arrays"
        return viewed(x, rule, of_repeated(x, shape), back=rule if moves else None, moves=moves, read_only=True)

    return tuple(map(view, given))


def meshgrid(*arrays: Array, indexing: str = "xy") -> tuple[Array, ...]:
    """Return the coordinates of each point of a grid, as one array for each given vector."""
    given = list(arrays)
    if indexing not in ("xy", "ij"):
        raise ValueError(f"meshgrid: indexing must be 'xy' or 'ij', but it is {indexing!r}.")
    if any(x.ndim > 1 for x in given):
        raise ValueError(f"meshgrid takes vectors, but the shapes are {', '.join(str(x.shape) for x in given)}.")
    if not given:
        return ()
    common_space("meshgrid", given)
    order = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        order[:2] = [1, 0]
    lines = [x if x.shape else arranged(x, [None]) for x in given]
    shape = tuple(lines[k].shape[0] for k in order)
    placed = lines[order[0]].sharding
    for at, k in enumerate(order):
        if lines[k].sharding.dim is not None:
            placed = lines[k].sharding.along(at)
            break
    grids = []
    for k, line in enumerate(lines):
        dims: list[int | None] = [None] * len(given)
        dims[order.index(k)] = 0
        grids.append(spread(arranged(copied(line), dims), shape, placed, "meshgrid"))
    return tuple(grids)
