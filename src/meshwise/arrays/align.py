"""Align the operands of an elementwise operation on the same devices.

A plan says which operands move, and to which devices, so that each device has all that it needs.

The result gets the layout of one of the operands: the layout for which the fewest bytes of the other operands have to
move. If several layouts are equally cheap, a layout that divides the work among devices is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.moves import elements_moved, reshard
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError

Held = tuple[Shape, Sharding, int]
"""An operand as (its shape, its sharding, bytes per element)."""


def broadcast_shape(name: str, shapes: Sequence[Shape]) -> Shape:
    """Return the shape that arrays of these shapes have after broadcasting."""
    if len(set(shapes)) < 2:
        return shapes[0] if shapes else ()
    dims = max(map(len, shapes))
    found = []
    for at in range(-dims, 0):
        lengths = {shape[at] for shape in shapes if len(shape) >= -at} - {1}
        if len(lengths) > 1:
            given = " and ".join(map(str, shapes))
            raise ValueError(f"{name}: shapes {given} do not broadcast. In each dim, lengths must be equal or 1.")
        found.append(lengths.pop() if lengths else 1)
    return tuple(found)


def common_space(name: str, arrays: Sequence[Array]) -> Space:
    """Return the `Space` (the devices) that all of the arrays share."""
    space = arrays[0].space
    for other in arrays[1:]:
        if other.space is not space and other.space != space:
            raise UsageError(
                f"{name}: the arrays belong to two array namespaces, one on {', '.join(space.names)}, the other "
                f"on {', '.join(other.space.names)}. Convert one of the arrays: xp.asarray(x.numpy())."
            )
    return space


def aligned(
    name: str, arrays: Sequence[Array], onto: Sharding | None = None
) -> tuple[Shape, Sharding, list[tuple[Tensor, ...]]]:
    """Lay out operands on the same devices.
    Return the result's shape and sharding, and the parts of each operand."""
    common_space(name, arrays)
    shape, placed, wanted = _planned(name, tuple([(x.shape, x.sharding, x.dtype.itemsize) for x in arrays]), onto)
    return shape, placed, [reshard(x, each, name).parts for x, each in zip(arrays, wanted, strict=True)]


@functools.lru_cache(maxsize=4096)
def _planned(name: str, held: tuple[Held, ...], onto: Sharding | None) -> tuple[Shape, Sharding, tuple[Sharding, ...]]:
    shape = broadcast_shape(name, [own for own, _, _ in held])
    return shape, *plan(shape, held, onto)


def plan(shape: Shape, held: tuple[Held, ...], onto: Sharding | None = None) -> tuple[Sharding, tuple[Sharding, ...]]:
    """Choose the sharding of a result, and of each of its operands, so that the fewest bytes move.

    shape: the shape of the result.
    onto: the sharding that the result must have. None leaves the choice to this function.
    """
    found = [onto] if onto is not None else [each for each in (_grown(shape, *one) for one in held) if each]
    candidates = found or [evenly(shape[0], held[0][1].places) if shape else held[0][1]]

    def cost(placed: Sharding) -> tuple[int, bool, int]:
        moved = sum(size * elements_moved(own, lies, lies_for(shape, own, placed)) for own, lies, size in held)
        return moved, placed.dim is None, len(placed.places) if placed.dim is None else -len(placed.places)

    best = min(candidates, key=cost)
    return best, tuple(lies_for(shape, own, best) for own, _, _ in held)


def _grown(shape: Shape, own: Shape, lies: Sharding, size: int) -> Sharding | None:
    """Return the sharding that the result can have without a move of this operand, or None if there is none."""
    if lies.dim is None:
        return sharding(lies.places)
    dim = lies.dim + len(shape) - len(own)
    return lies.along(dim) if own[lies.dim] == shape[dim] else None


def lies_for(shape: Shape, own: Shape, placed: Sharding) -> Sharding:
    """Return the sharding that an operand needs so that the result can have the sharding `placed`."""
    if placed.dim is not None:
        dim = placed.dim - (len(shape) - len(own))
        if dim >= 0 and own[dim] == shape[placed.dim]:
            return placed.along(dim)
    return sharding(placed.places)
