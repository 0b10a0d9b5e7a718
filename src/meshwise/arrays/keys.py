"""Read an index key such as `x[1:, None, mask]`, like NumPy.

A slice or an integer indexes one dim. Index arrays and masks are advanced indices: the dims of their common broadcast
shape replace the dims that they index. The new dims are at the position of the first advanced index if all advanced
indices are adjacent in the key, otherwise in front.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.sharding import Shape

Cut = int | range
"""What is selected along one dim: an int for one entry, or a range for the entries to keep."""


@dataclass(frozen=True)
class Key:
    """A parsed index key, such as `[1:, None, mask]`."""

    cuts: tuple[Cut, ...]
    arrays: tuple[tuple[int, Array | Tensor], ...]
    out: tuple[int | None, ...]


ADVANCED = -1


def read_key(given: Any, shape: Shape) -> Key:
    """Parse an index key for an array of this shape. Raises IndexError for an invalid key."""
    if not isinstance(given, tuple):
        given = (given,)
    try:
        return _read_basic(tuple([_BASIC[type(each)](each) for each in given]), shape)
    except (KeyError, TypeError):  # the key has arrays or other index objects
        return _read([_item(each) for each in given], shape)


_BASIC: dict[type, Callable[[Any], Any]] = {
    int: lambda each: each,
    slice: lambda each: (each.start, each.stop, each.step),
    type(None): lambda each: each,
    type(...): lambda each: each,
}
"""For each type of key item except arrays: a function that makes such an item hashable, for a cache."""


@functools.lru_cache(maxsize=4096)
def _read_basic(given: tuple[Any, ...], shape: Shape) -> Key:
    return _read([slice(*each) if isinstance(each, tuple) else each for each in given], shape)


def _read(items: list[Any], shape: Shape) -> Key:
    items = _with_all_dims(items, len(shape))
    advanced = any(_is_array(item) for item in items)
    cuts: list[Cut] = []
    arrays: list[tuple[int, Array | Tensor]] = []
    out: list[int | None] = []
    places: list[int] = []
    for at, item in enumerate(items):
        dim = len(cuts)
        if item is Ellipsis:
            continue
        if item is None:
            out.append(None)
        elif isinstance(item, slice):
            cuts.append(range(*item.indices(shape[dim])))
            out.append(dim)
        elif isinstance(item, int):
            cuts.append(_entry(item, shape[dim], dim))
            places.extend([at] if advanced else [])
        else:
            covered = _covered(item, shape, dim)
            # A mask with a dim of length 0 selects nothing, whatever the lengths of its other dims.
            if item.dtype is torch.bool and tuple(item.shape) != tuple(covered):
                item = torch.zeros(tuple(item.shape), dtype=torch.bool)
            arrays.append((dim, item))
            cuts.extend(range(length) for length in covered)
            places.append(at)
    if advanced:
        together = places[-1] - places[0] == len(places) - 1
        before = sum(item is None or isinstance(item, slice) for item in items[: places[0]]) if together else 0
        out.insert(before, ADVANCED)
    return Key(tuple(cuts), tuple(arrays), tuple(out))


def _item(given: Any) -> Any:
    """Convert one item of a key to None, Ellipsis, a slice, an int, or an index array or mask."""
    if given is None or given is Ellipsis or isinstance(given, slice):
        return given
    if type(given) is int:
        return given
    if isinstance(given, Array):
        if given.dtype is torch.bool or (given.shape and not given.dtype.is_floating_point):
            return given
        return operator.index(given)
    if isinstance(given, bool | np.bool_):
        return torch.tensor(bool(given))
    if not isinstance(given, list | tuple | np.ndarray | Tensor):
        try:
            return operator.index(given)
        except TypeError:
            pass
    return on_host(given)


def on_host(given: Any) -> Any:
    """Convert indices or booleans to a tensor on the host, and a single index to an int."""
    values = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if values.size == 0 and not isinstance(given, np.ndarray | Tensor):
        values = values.astype(np.int64)
    if values.dtype.kind not in "bui":
        raise IndexError(f"cannot index by {str(given)[:60]}. Use ints, slices, '...', None, arrays of ints or bools.")
    if values.ndim == 0 and values.dtype.kind != "b":
        return int(values)
    return torch.from_numpy(np.ascontiguousarray(values if values.dtype.kind == "b" else values.astype(np.int64)))


def _is_array(item: Any) -> bool:
    return isinstance(item, Array | Tensor)


def _with_all_dims(items: list[Any], ndim: int) -> list[Any]:
    """Add a slice for each dim that the key does not name."""
    used = sum(_dims_of(item) for item in items)
    at = [k for k, item in enumerate(items) if item is Ellipsis]
    if len(at) > 1:
        raise IndexError("an index may contain only one ellipsis ('...'), but this index has several.")
    if used > ndim:
        raise IndexError(f"too many indices: the array has {ndim} dims, but the index is for {used}.")
    where = at[0] if at else len(items)
    return [*items[: where + len(at)], *[slice(None)] * (ndim - used), *items[where + len(at) :]]


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_array(item) and item.dtype is torch.bool else 1


def _entry(index: int, length: int, dim: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of bounds for axis {dim} with size {length}")
    return index % length


def _covered(item: Array | Tensor, shape: Shape, dim: int) -> Sequence[int]:
    if item.dtype is not torch.bool:
        return shape[dim : dim + 1]
    covered = shape[dim : dim + item.ndim]
    if any(own not in (0, length) for own, length in zip(item.shape, covered, strict=True)):
        raise IndexError(
            f"a mask of shape {tuple(item.shape)} cannot index dims of shape {tuple(covered)}: both must be equal."
        )
    return covered
