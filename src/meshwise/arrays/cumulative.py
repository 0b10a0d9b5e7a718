"""Compute cumulative sums and products.

Along the sharded dim, each part starts from the total of the parts before it. Each part but the last sends its total,
which has one entry along that dim, to the next part. This is the lower bound, since every later part depends on the
total. The sums of a part are computed alone, and the total is added afterwards. The products of a part start from the
total, since the product of one part may overflow where the product of all parts does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.aliases import in_order_of
from meshwise.arrays.array import Array
from meshwise.arrays.dtypes import BOOL, UNSIGNED
from meshwise.arrays.moves import Move, exchange
from meshwise.arrays.reductions import as_array, sum_dtype
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import resized, sharding
from meshwise.arrays.views import axis_of

Carried = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""Scans a part of an array. Takes the total of earlier parts, or None. Returns (scan, total after the part)."""


def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Return the cumulative sums of the entries along `axis`."""
    return _cumulative(x, axis, dtype, include_initial, "cumulative_sum")


def cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Return the cumulative products of the entries along `axis`."""
    return _cumulative(x, axis, dtype, include_initial, "cumulative_prod")


def _cumulative(x: Array, axis: int | None, dtype: Any, include_initial: bool, name: str) -> Array:
    x = as_array(name, x)
    if axis is None:
        if x.ndim != 1:
            raise ValueError(f"{name} of an array of shape {x.shape} needs an axis, for example axis=0.")
        axis = 0
    axis = axis_of(axis, x.ndim, name)
    kind = sum_dtype(x.dtype, dtype)
    inner = torch.int64 if kind in UNSIGNED or kind is BOOL else kind  # int64 gives the same bits as an unsigned dtype
    held, first = x.sharding, 1 if name == "cumulative_prod" else 0
    scan = _products if first else _sums
    parts = [part.to(inner) for part in x.parts]
    if held.dim == axis:
        parts = _chained(x, parts, axis, (scan, inner), name)
    else:
        parts = [scan(part, axis, None)[0] for part in parts]
    shape = x.shape
    if include_initial:
        shape = resized(shape, axis, shape[axis] + 1)
        if held.dim == axis:
            held = sharding(held.places, axis, (held.sizes[0] + 1, *held.sizes[1:]))
        for at, (part, _) in enumerate(x.space.local(held)):
            if part == 0 or held.dim != axis:
                begin = torch.full_like(parts[at].narrow(axis, 0, 0), first)
                ones = list(parts[at].shape)
                ones[axis] = 1
                parts[at] = torch.cat([begin.new_full(ones, first), parts[at]], axis)
    return in_order_of(Array(tuple(part.to(kind) for part in parts), held, shape, kind, x.space), [x])


def _chained(x: Array, parts: list[Tensor], axis: int, how: tuple[Any, torch.dtype], name: str) -> list[Tensor]:
    """Scan the parts one after another, each from the total of the parts before it."""
    (scan, dtype), held, space = how, x.sharding, x.space
    here = {part: at for at, (part, _) in enumerate(space.local(held))}
    before: int | None = None
    carry: Tensor | None = None
    for k, place in enumerate(held.places):
        if not held.sizes[k]:
            continue
        if before is not None:
            piece = Move(held.places[before], place, place, resized(x.shape, axis, 1), dtype, carry)
            carry = exchange(space, [piece], name).get(place)
        if k in here:
            parts[here[k]], carry = scan(parts[here[k]], axis, carry)
        before = k
    return parts


def _sums(part: Tensor, axis: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    sums = torch.cumsum(part, axis)
    if carry is not None:
        sums += carry
    return sums, sums.narrow(axis, sums.shape[axis] - 1, 1) if sums.shape[axis] else sums


def _products(part: Tensor, axis: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    if carry is not None:
        part = part.clone()
        part.narrow(axis, 0, 1).mul_(carry)
    made = torch.cumprod(part, axis)
    return made, made.narrow(axis, made.shape[axis] - 1, 1) if made.shape[axis] else made


FUNCTIONS = by_name(cumulative_sum, cumulative_prod)
