"""Reshard arrays whose axis must not be split.

Another dim is split instead, or else one device gets the whole array.

This moves as many bytes as a transpose, which is the minimum: (1 - 1/p) of an array that p devices hold evenly.
"""

from __future__ import annotations

from collections.abc import Collection

from meshwise.arrays.array import Array
from meshwise.arrays.moves import reshard
from meshwise.arrays.sharding import Shape, Sharding, evenly, sharding


def free_dim(shape: Shape, taken: Collection[int]) -> int | None:
    """Return the longest dim that is not in `taken`, or None if no other dim has more than one entry."""
    others = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] > 1]
    return max(others, key=lambda dim: shape[dim], default=None)


def freed(x: Array, axes: Collection[int], operation: str) -> Array:
    """Return `x` laid out so that none of `axes` is split."""
    held = x.sharding
    if held.dim is None or held.dim not in axes:
        return x
    return reshard(x, freely(held, x.shape, axes), operation)


def freely(held: Sharding, shape: Shape, axes: Collection[int]) -> Sharding:
    """Return a sharding in which none of `axes` is split."""
    dim = free_dim(shape, axes)
    if dim is None:
        return sharding((fullest(held),))
    return evenly(shape[dim], held.places, dim)


def fullest(held: Sharding) -> int:
    """Return the number of the device with the largest part.
    Gathering there moves the fewest bytes."""
    return held.places[held.sizes.index(max(held.sizes))] if held.sizes else held.places[0]
