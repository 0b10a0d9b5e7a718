"""Permute, add, remove, reverse or broadcast dims.

Each device rearranges its own part. Only `spread` moves data.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.arrays.aliases import strides_of, viewed
from meshwise.arrays.align import lies_for
from meshwise.arrays.array import Array, numbered
from meshwise.arrays.moves import reshard
from meshwise.arrays.sharding import Shape, Sharding, sharding
from meshwise.arrays.strides import Strides, named, of, of_cut, of_order
from meshwise.arrays.views import as_before, as_bits, axis_of, made


def arranged(x: Array, order: Sequence[int | None]) -> Array:
    """Return a view with the dims of `x` in this order. None in `order` adds a dim of length 1."""
    if x.alias is not None and x.alias.flips and x.alias.source is not None:
        flips = [at for at, dim in enumerate(order) if dim in x.alias.flips]
        return flipped(arranged(x.alias.source, order), flips)
    dims, held = [dim for dim in order if dim is not None], x.sharding
    placed = held if held.dim is None else held.along(list(order).index(held.dim))
    shape = [1 if dim is None else x.shape[dim] for dim in order]

    def rule(x: Array) -> Array:
        parts = []
        for part in x.parts:
            view = part.permute(dims)
            for at, dim in enumerate(order):
                view = view.unsqueeze(at) if dim is None else view
            parts.append(view)
        return made(parts, placed, x, shape)

    return viewed(x, rule, of_order(x.shape, strides_of(x), tuple(order)))


def flipped(x: Array, dims: Sequence[int]) -> Array:
    """Return a view of `x` in which the entries along the given dims are reversed."""
    if x.alias is not None and x.alias.flips and x.alias.source is not None:
        dims, x = sorted(x.alias.flips.symmetric_difference(dims)), x.alias.source
    dims = [dim for dim in dims if x.shape[dim] > 1]
    if not dims:
        return arranged(x, range(x.ndim))

    def rule(x: Array) -> Array:
        return turned(x, dims)

    cuts = tuple(range(n)[:: -1 if dim in dims else 1] for dim, n in enumerate(x.shape))
    found = viewed(x, rule, of_cut(x.shape, strides_of(x), cuts), back=rule)
    if found.alias is not None:
        found.alias.flips = frozenset(dims)
    return found


def turned(x: Array, dims: Sequence[int]) -> Array:
    """Return a copy with the entries along the given dims reversed. `flipped` returns a view instead."""
    bits, placed = as_bits(x), x.sharding
    parts = [part.flip(tuple(dims)) for part in bits.parts]
    if placed.dim in dims:
        parts.reverse()
        placed = sharding(placed.places[::-1], placed.dim, placed.sizes[::-1])
    return as_before(made(parts, placed, bits, x.shape), x.dtype)


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """Permute the dims. No data moves: the divided dim gets a new position."""
    order = [axis_of(axis, x.ndim, "permute_dims") for axis in axes]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute_dims: axes must name each of {x.ndim} dims once, but is {tuple(axes)}.")
    return arranged(x, order)


def matrix_transpose(x: Array, /) -> Array:
    """Swap the last two dims."""
    ndim = x.ndim
    if ndim < 2:
        raise ValueError(f"matrix_transpose needs two dims or more, but this array has shape {x.shape}.")
    return arranged(x, [*range(ndim - 2), ndim - 1, ndim - 2])


def moveaxis(x: Array, source: int | Sequence[int], destination: int | Sequence[int], /) -> Array:
    """Move the dims `source` to the positions `destination`. The other dims keep their order."""
    ndim = x.ndim
    here = [axis_of(axis, ndim, "moveaxis") for axis in ([source] if isinstance(source, int) else source)]
    there = [
        axis_of(axis, ndim, "moveaxis") for axis in ([destination] if isinstance(destination, int) else destination)
    ]
    if len(here) != len(there) or len(set(here)) != len(here) or len(set(there)) != len(there):
        raise ValueError(f"moveaxis({source}, {destination}): pass as many destinations as sources, and no dim twice.")
    order = [dim for dim in range(ndim) if dim not in here]
    for to, dim in sorted(zip(there, here, strict=True)):
        order.insert(to, dim)
    return arranged(x, order)


def expand_dims(x: Array, /, axis: int | Sequence[int] = 0) -> Array:
    """Add dims of length 1 at the given positions of the result."""
    given = [axis] if isinstance(axis, int) else list(axis)
    ndim = x.ndim + len(given)
    new = [axis_of(each, ndim, "expand_dims") for each in given]
    if len(set(new)) < len(new):
        raise ValueError(f"expand_dims(axis={axis}) names a position twice. Name each position once.")
    old = iter(range(x.ndim))
    return arranged(x, [None if at in new else next(old) for at in range(ndim)])


def squeeze(x: Array, /, axis: int | Sequence[int] | None = None) -> Array:
    """Remove the given dims, which must have length 1."""
    shape = x.shape
    if axis is None:
        gone = [dim for dim, length in enumerate(shape) if length == 1]
    else:
        gone = [axis_of(each, len(shape), "squeeze") for each in ([axis] if isinstance(axis, int) else axis)]
    if len(set(gone)) < len(gone) or any(shape[dim] != 1 for dim in gone):
        raise ValueError(f"squeeze(axis={axis}) of shape {shape}: axis may name only dims of length 1, each once.")
    keep = [dim for dim in range(len(shape)) if dim not in gone]

    def rule(x: Array) -> Array:
        parts, placed = list(x.parts), x.sharding
        if placed.dim in gone:
            holder = placed.sizes.index(1)
            parts = [part for number, part in numbered(x) if number == holder]
            placed = sharding((placed.places[holder],))
        elif placed.dim is not None:
            placed = placed.along(placed.dim - sum(dim < placed.dim for dim in gone))
        return made([part.squeeze(tuple(gone)) for part in parts], placed, x, [shape[dim] for dim in keep])

    return viewed(x, rule, of_order(shape, strides_of(x), tuple(keep)))


def broadcast_to(x: Array, /, shape: Shape | Sequence[int]) -> Array:
    """Broadcast `x` to a shape, as a read-only view in which repeated entries take no memory."""
    wanted = tuple(int(length) for length in shape)
    more = len(wanted) - x.ndim
    own = (1,) * more + x.shape
    if more < 0 or any(a not in (1, b) for a, b in zip(own, wanted, strict=True)):
        raise ValueError(f"shape {x.shape} does not broadcast to {wanted}: lengths must be equal, or 1 in the array.")

    def rule(x: Array) -> Array:
        placed = x.sharding
        if placed.dim is not None and x.shape[placed.dim] == 1 != wanted[placed.dim + more]:
            # One device already holds the single entry, so nothing moves.
            x = reshard(x, sharding((placed.places[placed.sizes.index(1)],)))
        return _repeated(x, wanted, x.sharding.shifted(more))

    return viewed(x, rule, of_repeated(x, wanted), read_only=True)


def of_repeated(x: Array, shape: Shape) -> Strides:
    """Return the strides, in elements, that `x` has after it is broadcast to this shape."""
    own = zip(x.shape, of(x.shape, strides_of(x)), strict=True)
    more = len(shape) - x.ndim
    strides = [0] * more + [
        stride if length == wanted else 0 for (length, stride), wanted in zip(own, shape[more:], strict=True)
    ]
    return named(shape, tuple(strides))


def _repeated(x: Array, shape: Shape, placed: Sharding) -> Array:
    parts = [
        part.expand(placed.part_shape(shape, number))
        for part, (number, _) in zip(x.parts, x.space.local(placed), strict=True)
    ]
    return made(parts, placed, x, shape)


def spread(x: Array, shape: Shape, placed: Sharding, operation: str) -> Array:
    """Broadcast `x` to `shape`, and lay it out as `placed`."""
    return _repeated(reshard(x, lies_for(shape, x.shape, placed), operation), shape, placed)
