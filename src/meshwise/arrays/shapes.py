"""List functions and methods that change shapes or choose entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from meshwise.arrays import choosing, indexing, joining, layout, numpy_shapes, reshaping
from meshwise.arrays.array import Array
from meshwise.arrays.assigning import set_item
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.indexing import get_item
from meshwise.arrays.rules import Table, by_name
from meshwise.arrays.views import axis_of


def _of_arrays(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to raise NoArrayGiven if its first argument is not an `Array`."""

    @functools.wraps(rule)
    def call(x: Any, /, *given: Any, **named: Any) -> Any:
        if not isinstance(x, Array):
            raise NoArrayGiven(f"{rule.__name__} needs an array, not {type(x).__name__}. Write xp.asarray(value).")
        return rule(x, *given, **named)

    return call


FUNCTIONS: Table = (
    {
        rule.__name__: _of_arrays(rule)
        for rule in (
            *(layout.permute_dims, layout.matrix_transpose, layout.moveaxis, layout.expand_dims, layout.squeeze),
            *(layout.broadcast_to, reshaping.reshape, indexing.nonzero, joining.unstack, joining.flip, joining.roll),
            *(joining.tile, joining.repeat, joining.diff, joining.pad, joining.halo, choosing.take),
            *(choosing.take_along_axis, choosing.tril, choosing.triu),
        )
    }
    | {name: _of_arrays(rule) for name, rule in numpy_shapes.FUNCTIONS.items()}
    | by_name(joining.concat, joining.stack, choosing.where, choosing.broadcast_arrays, choosing.meshgrid)
)


def reshaped(x: Array, /, *shape: Any, copy: bool | None = None) -> Array:
    """Implement the method `x.reshape(2, 3)` or `x.reshape((2, 3))`, as `xp.reshape`."""
    return reshaping.reshape(x, shape[0] if len(shape) == 1 else shape, copy)


def transposed(x: Array, /, *axes: Any) -> Array:
    """Permute the dims into the order `axes`, by default reversed, as NumPy's method does."""
    if len(axes) == 1 and not isinstance(axes[0], int):
        axes = tuple(axes[0] or ())
    return layout.permute_dims(x, axes or tuple(reversed(range(x.ndim))))


def swapped(x: Array, axis1: int, axis2: int, /) -> Array:
    """Swap two dims."""
    order = list(range(x.ndim))
    one, other = (axis_of(axis, len(order), "swapaxes") for axis in (axis1, axis2))
    order[one], order[other] = other, one
    return layout.arranged(x, order)


def flattened(x: Array, /) -> Array:
    """Return a copy of the elements, in row-major order, as a vector."""
    return reshaping.reshape(x, (-1,), copy=True)


def iterated(x: Array, /) -> Iterator[Array]:
    """Implement `for row in x`: yield the entries of the first dim, which stay on their devices."""
    if not x.shape:
        raise TypeError("an array without dims cannot be iterated over: write x[...] or float(x).")
    return iter(joining.unstack(x))


def contains(x: Array, value: Any, /) -> bool:
    """Implement `value in x`: return whether any element equals `value`. Waits for the answer."""
    return bool((x == value).any())


METHODS: Table = {
    "__getitem__": get_item,
    "__setitem__": set_item,
    "__iter__": iterated,
    "__contains__": contains,
    "reshape": reshaped,
    "transpose": transposed,
    "flatten": flattened,
    "ravel": reshaping.flat,
    "squeeze": layout.squeeze,
    "repeat": joining.repeat,
    "take": choosing.take,
    "nonzero": indexing.nonzero,
    "swapaxes": swapped,
}
PROPERTIES: Table = {"T": transposed, "mT": layout.matrix_transpose}
