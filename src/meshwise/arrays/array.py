"""Define the array: its parts are tensors on the namespace's devices.

Other files define what can be done with an array; `methods.py` gives the class its operators and methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwise.arrays.sharding import Shape, Sharding
from meshwise.arrays.space import Space


class Array:
    """An array on the devices of a namespace. Made by the namespace's functions, such as `xp.asarray` and `xp.zeros`.

    parts: the tensors on the devices of this process, in the order of `sharding.places`. If the array is spread over
        several ranks, other ranks hold the rest of it.
    alias: the strides of the array, and the memory that it shares with its views. None if the array is in row-major
        order and has no views. For an array without dims, None has another meaning: the array stands for a NumPy
        scalar, which never changes.
    """

    __slots__ = ("__weakref__", "_dtype", "_shape", "alias", "parts", "sharding", "space")

    def __init__(
        self, parts: tuple[Tensor, ...], sharding: Sharding, shape: Shape, dtype: torch.dtype, space: Space
    ) -> None:
        self.parts = parts
        self.sharding = sharding
        self._shape = shape
        self._dtype = dtype
        self.space = space
        self.alias: Alias | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The data type, a `torch.dtype` such as `xp.float64`. It never changes: `x.astype` makes another array."""
        return self._dtype

    @property
    def shape(self) -> Shape:
        """The length of each dim."""
        return self._shape

    @shape.setter
    def shape(self, wanted: Any) -> None:
        before = Array.__new__(Array)  # the original, of which `self` becomes a view
        before._become(self)
        found = before.reshape(wanted)
        if found.alias is None and before.alias is not None:
            raise AttributeError(
                f"x.shape = {wanted} would have to copy this array of shape {self.shape}. Write x = x.reshape(shape)."
            )
        self._become(found)

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        return self.size * self._dtype.itemsize

    def _become(self, other: Array) -> None:
        self.sharding, self._shape, self._dtype = other.sharding, other._shape, other._dtype
        self.space, self.alias = other.space, other.alias
        if other.alias is None or other.alias.source is None:
            self.parts = other.parts
        else:
            with suppress(AttributeError):
                del self.parts  # the next read of `parts` fetches them

    def __reduce__(self) -> Any:
        if self.alias is None:
            return Array, (self.parts, self.sharding, self._shape, self._dtype, self.space)
        # Clone the parts, because pickling a view writes the whole storage of the tensor.
        own = tuple(part.clone(memory_format=torch.contiguous_format) for part in self.parts)
        return (
            Array,
            (own, self.sharding, self._shape, self._dtype, self.space),
            (None, {"alias": Alias(ViewedMemory())}),
        )

    __hash__ = None  # type: ignore[assignment]

    if TYPE_CHECKING:  # defined in methods.py

        def __getattr__(self, name: str) -> Any: ...
        def __add__(self, other: Any) -> Array: ...
        def __sub__(self, other: Any) -> Array: ...
        def __mul__(self, other: Any) -> Array: ...
        def __truediv__(self, other: Any) -> Array: ...
        def __getitem__(self, key: Any) -> Array: ...
        def __setitem__(self, key: Any, value: Any) -> None: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...


@dataclass(slots=True, eq=False)
class ViewedMemory:
    """Memory that several arrays share because they are views of each other."""

    writes: int = 0


@dataclass(slots=True, eq=False)
class Alias:
    """How an array shares memory with other arrays, such as its views."""

    memory: ViewedMemory
    strides: tuple[int, ...] | None = None
    read_only: bool = False
    source: Array | None = None
    rule: Callable[[Array], Array] | None = None
    back: Callable[[Array], Array] | None = None
    flips: frozenset[int] = frozenset()
    moves: str = ""
    kept: tuple[Tensor, ...] = ()
    seen: int = 0


def like(x: Array, parts: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Array:
    """Return an array of these parts with the shape and sharding of `x`, and with its dtype unless `dtype` is given."""
    return Array(tuple(parts), x.sharding, x.shape, dtype or x.dtype, x.space)


def numbered(x: Array) -> Iterator[tuple[int, Tensor]]:
    """Yield (number in `x.sharding`, tensor) of each part in this process."""
    return zip((number for number, _ in x.space.local(x.sharding)), x.parts, strict=True)


def empty_parts(x: Array, shape: Shape, placed: Sharding) -> list[Tensor]:
    """Make uninitialized parts, with the dtype of `x`, for an array of another shape and sharding."""
    return [
        torch.empty(placed.part_shape(shape, part), dtype=x.dtype, device=x.space.devices[place])
        for part, place in x.space.local(placed)
    ]


def mapped(x: Array, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Array:
    """Apply a function that keeps the shape to each part of `x`. dtype: that of the result, if not the one of `x`."""
    return like(x, [function(part) for part in x.parts], dtype)


def cast(x: Array, dtype: torch.dtype) -> Array:
    """Return `x` in another data type. No data moves."""
    return x if x.dtype is dtype else mapped(x, lambda part: part.to(dtype), dtype)
