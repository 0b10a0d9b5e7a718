"""An array whose parts are tensors on the places of a namespace. What can be done with one is written in the files of
its rules; `methods.py` gives the class its operators and methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwise.arrays.sharding import Shape, Sharding
from meshwise.arrays.space import Space


class Array:
    """An array on the devices of a namespace. Made by its functions, such as `xp.asarray` and `xp.zeros`.

    parts: the tensors of the places that are here, in the order of `sharding.places`. In one process these are all.
    """

    __slots__ = ("__weakref__", "_dtype", "_shape", "parts", "sharding", "space")

    def __init__(
        self, parts: tuple[Tensor, ...], sharding: Sharding, shape: Shape, dtype: torch.dtype, space: Space
    ) -> None:
        self.parts = parts
        self.sharding = sharding
        self._shape = shape
        self._dtype = dtype
        self.space = space

    @property
    def dtype(self) -> torch.dtype:
        """The data type: torch's, as `xp.float64`. It stays: `x.astype` makes another array."""
        return self._dtype

    @property
    def shape(self) -> Shape:
        """The lengths of the dims."""
        return self._shape

    @shape.setter
    def shape(self, wanted: Any) -> None:
        found = self.reshape(wanted)
        self.parts, self.sharding, self._shape = found.parts, found.sharding, found.shape

    __hash__ = None  # type: ignore[assignment]

    if TYPE_CHECKING:  # given by methods.py

        def __getattr__(self, name: str) -> Any: ...
        def __add__(self, other: Any) -> Array: ...
        def __sub__(self, other: Any) -> Array: ...
        def __mul__(self, other: Any) -> Array: ...
        def __truediv__(self, other: Any) -> Array: ...
        def __getitem__(self, key: Any) -> Array: ...
        def __setitem__(self, key: Any, value: Any) -> None: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...


def like(x: Array, parts: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Array:
    """An array of these parts that lies and is shaped as `x`."""
    return Array(tuple(parts), x.sharding, x.shape, dtype or x.dtype, x.space)
