"""Dims in another order, added, taken away or repeated without memory: nothing moves, each place turns its own part."""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.arrays.align import lies_for
from meshwise.arrays.array import Array
from meshwise.arrays.moves import reshard
from meshwise.arrays.sharding import Shape, Sharding, sharding
from meshwise.arrays.views import axis_of, made, taken


def arranged(x: Array, order: Sequence[int | None]) -> Array:
    """The dims of `x` in this order; None: a new dim of length 1. Lower bound, and moved: 0 bytes."""
    dims = [dim for dim in order if dim is not None]
    parts = []
    for part in x.parts:
        view = part.permute(dims)
        for at, dim in enumerate(order):
            if dim is None:
                view = view.unsqueeze(at)
        parts.append(taken(view))
    placed = x.sharding if x.sharding.dim is None else x.sharding.along(list(order).index(x.sharding.dim))
    return made(parts, placed, x, [1 if dim is None else x.shape[dim] for dim in order])


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """The dims in another order. Moves nothing: it is divided along the same dim, wherever that goes."""
    order = [axis_of(axis, len(x.shape), "permute_dims") for axis in axes]
    if sorted(order) != list(range(len(x.shape))):
        raise ValueError(f"permute_dims(axes={tuple(axes)}) of {len(x.shape)} dims: name each of them once.")
    return arranged(x, order)


def matrix_transpose(x: Array, /) -> Array:
    """The last two dims swapped."""
    ndim = len(x.shape)
    if ndim < 2:
        raise ValueError(f"matrix_transpose of shape {x.shape}: it needs two dims or more.")
    return arranged(x, [*range(ndim - 2), ndim - 1, ndim - 2])


def moveaxis(x: Array, source: int | Sequence[int], destination: int | Sequence[int], /) -> Array:
    """Dims taken from `source` and put at `destination`; the others keep their order."""
    ndim = len(x.shape)
    here = [axis_of(axis, ndim, "moveaxis") for axis in ([source] if isinstance(source, int) else source)]
    there = [
        axis_of(axis, ndim, "moveaxis") for axis in ([destination] if isinstance(destination, int) else destination)
    ]
    if len(here) != len(there) or len(set(here)) != len(here) or len(set(there)) != len(there):
        raise ValueError(f"moveaxis({source}, {destination}): name as many dims twice, each once.")
    order = [dim for dim in range(ndim) if dim not in here]
    for to, dim in sorted(zip(there, here, strict=True)):
        order.insert(to, dim)
    return arranged(x, order)


def expand_dims(x: Array, /, axis: int | Sequence[int] = 0) -> Array:
    """New dims of length 1 at these positions of the result."""
    given = [axis] if isinstance(axis, int) else list(axis)
    ndim = len(x.shape) + len(given)
    new = [axis_of(each, ndim, "expand_dims") for each in given]
    if len(set(new)) < len(new):
        raise ValueError(f"expand_dims(axis={axis}): one position is named twice.")
    old = iter(range(len(x.shape)))
    return arranged(x, [None if at in new else next(old) for at in range(ndim)])


def squeeze(x: Array, /, axis: int | Sequence[int] | None = None) -> Array:
    """Without these dims of length 1; None: without all of them. What was divided along one lies on one place."""
    shape = x.shape
    if axis is None:
        gone = [dim for dim, length in enumerate(shape) if length == 1]
    else:
        gone = [axis_of(each, len(shape), "squeeze") for each in ([axis] if isinstance(axis, int) else axis)]
    if len(set(gone)) < len(gone) or any(shape[dim] != 1 for dim in gone):
        raise ValueError(f"squeeze(axis={axis}) of shape {shape}: name dims of length 1, each once.")
    parts, placed = list(x.parts), x.sharding
    if placed.dim in gone:
        holder = placed.sizes.index(1)
        parts = [part for part, (number, _) in zip(parts, x.space.local(placed), strict=True) if number == holder]
        placed = sharding((placed.places[holder],))
    elif placed.dim is not None:
        placed = placed.along(placed.dim - sum(dim < placed.dim for dim in gone))
    keep = [dim for dim in range(len(shape)) if dim not in gone]
    return made([taken(part.squeeze(tuple(gone))) for part in parts], placed, x, [shape[dim] for dim in keep])


def broadcast_to(x: Array, /, shape: Shape | Sequence[int]) -> Array:
    """`x` repeated along new dims and those of length 1, without memory for it. Moves nothing: what lies on one place
    stays there."""
    wanted = tuple(int(length) for length in shape)
    more = len(wanted) - len(x.shape)
    own = (1,) * more + x.shape
    if more < 0 or any(a not in (1, b) for a, b in zip(own, wanted, strict=True)):
        raise ValueError(f"broadcast_to({wanted}) of shape {x.shape}: lengths must be equal, or 1 in the array.")
    if x.sharding.dim is not None and x.shape[x.sharding.dim] == 1 != wanted[x.sharding.dim + more]:
        x = reshard(x, sharding((x.sharding.places[x.sharding.sizes.index(1)],)))  # it lies there: nothing moves
    placed = x.sharding if x.sharding.dim is None else x.sharding.along(x.sharding.dim + more)
    parts = [
        part.expand(placed.part_shape(wanted, number))
        for part, (number, _) in zip(x.parts, x.space.local(placed), strict=True)
    ]
    return made(parts, placed, x, wanted)


def spread(x: Array, shape: Shape, placed: Sharding, operation: str) -> Array:
    """`x` broadcast to `shape` and laid out as `placed`: where it is repeated, what is repeated goes to each place.

    Lower bound, and moved: what a place's part of `x` has that is not there; all of `x` where the divided dim repeats.
    """
    there = reshard(x, lies_for(shape, x.shape, placed), operation)
    parts = [
        part.expand(placed.part_shape(shape, number))
        for part, (number, _) in zip(there.parts, x.space.local(placed), strict=True)
    ]
    return made(parts, placed, x, shape)
