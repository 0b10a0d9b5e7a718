"""Look values up in a table: searchsorted and isin.

Either the table or the values may be split.

Of two ways, the one that moves fewer bytes is taken. Either each device with values gets the rest of the table. Or each
device with a part of the table gets the rest of the values, and the answers of the parts are added, which moves
(devices - 1) x (bytes of the answers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import as_array_without_dims
from meshwise.arrays.array import Array, cast, like, mapped
from meshwise.arrays.dtypes import comparable, result_type
from meshwise.arrays.elementwise import NoArrayGiven, is_python_number
from meshwise.arrays.moves import combined, elements_moved, reshard, stacked
from meshwise.arrays.products import added
from meshwise.arrays.reductions import together
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import sharding

Look = Callable[[Tensor, Tensor], Tensor]  # (values, part of the table) -> answers for this part, as int64


def searchsorted(x1: Array, x2: Any, /, *, side: str = "left", sorter: Array | None = None) -> Array:
    """Return the indices at which to insert the elements of `x2` into the sorted vector `x1`."""
    if type(x1) is not Array or x1.ndim != 1:
        raise NoArrayGiven("searchsorted: x1 must be a sorted vector. Write xp.sort(xp.reshape(x1, (-1,))).")
    if side not in ("left", "right"):
        raise ValueError(f"searchsorted: side must be 'left' or 'right', but it is {side!r}.")
    if sorter is not None:
        x1 = x1[sorter]
    values, dtype = _operand(x2, x1)
    if dtype.is_complex:
        raise TypeError("searchsorted needs an order, but complex numbers have none. Search xp.real(x) or abs(x).")
    return _looked_up(values, x1, partial(_search, dtype=dtype, side=side), "searchsorted", torch.int64)


def isin(x1: Any, x2: Any, /, *, assume_unique: bool = False, invert: bool = False) -> Array:
    """Return, for each element of `x1`, whether it occurs in `x2`."""
    if type(x2) is not Array:
        x1, x2 = (x1, _operand(x2, x1)[0]) if type(x1) is Array else (x1, x2)
    values, dtype = _operand(x1, x2)
    found = _looked_up(values, x2, partial(_is_in, dtype=dtype), "isin", torch.bool)
    return as_array_without_dims(mapped(found, torch.logical_not) if invert else found)


def _operand(value: Any, other: Any) -> tuple[Array, torch.dtype]:
    """Return `value` as an array on the devices of `other`, and the dtype to which both promote."""
    if type(other) is not Array or not (type(value) is Array or is_python_number(value)):
        raise NoArrayGiven(f"cannot compare {type(value).__name__} and {type(other).__name__}. Use xp.asarray(value).")
    dtype = result_type(value, other)
    if type(value) is Array:
        return value, dtype
    lies = sharding(other.sharding.places)
    parts = (
        torch.tensor(value, dtype=dtype, device=other.space.devices[place]) for _, place in other.space.local(lies)
    )
    return Array(tuple(parts), lies, (), dtype, other.space), dtype


def _looked_up(values: Array, table: Array, look: Look, name: str, dtype: torch.dtype) -> Array:
    held, shape = table.sharding, values.shape
    whole, there = sharding(values.sharding.places), sharding(held.places)
    table_moved = elements_moved(table.shape, held, whole) * table.dtype.itemsize
    values_moved = elements_moved(shape, values.sharding, there) * values.dtype.itemsize
    values_moved += (len(held.places) - 1) * prod(shape) * torch.int64.itemsize
    if held.dim is None or table_moved <= values_moved:
        flat = reshard(table, whole, name).parts
        return like(values, [look(a, b.reshape(-1)).to(dtype) for a, b in zip(values.parts, flat, strict=True)], dtype)
    every = reshard(values, there, name).parts
    found = [look(a, b.reshape(-1)) for a, b in zip(every, table.parts, strict=True)]
    partials, add = stacked(table, held.places, found, shape, torch.int64), partial(added, dtype=torch.int64)
    return cast(combined(partials, add, together(table, shape), torch.int64, name), dtype)


def _search(values: Tensor, table: Tensor, dtype: torch.dtype, side: str) -> Tensor:
    v, t = comparable(values, dtype).contiguous(), comparable(table, dtype).contiguous()
    if not dtype.is_floating_point:
        return torch.searchsorted(t, v, side=side)
    numbers = (~t.isnan()).sum()
    found = torch.searchsorted(t.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), v, side=side)
    of_nan = numbers if side == "left" else torch.full_like(numbers, len(t))
    return torch.where(v.isnan(), of_nan, torch.minimum(found, numbers))


def _is_in(values: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    v, t = comparable(values, dtype), comparable(table, dtype)
    if not dtype.is_complex:
        return torch.isin(v, t).to(torch.int64)
    found = torch.zeros(v.shape, dtype=torch.bool, device=v.device)
    for few in t.split(64):  # torch.isin does not support complex numbers
        found |= (v[..., None] == few).any(-1)
    return found.to(torch.int64)


FUNCTIONS = by_name(searchsorted, isin)
