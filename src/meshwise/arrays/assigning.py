"""Write `x[key] = value`, and move as few bytes as possible.

Only these elements move, which is the lower bound:

- the elements of the value that are on other devices than the elements that they replace
- a value that is repeated along the sharded dim, to each device that it is written to
- for index arrays, also what fetching.py describes
- the elements of a mask that are on other devices than the elements that they select
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.aliases import entangled, put, shown, writable, written
from meshwise.arrays.align import common_space
from meshwise.arrays.array import Array, cast, mapped
from meshwise.arrays.dtypes import BOOL, COMPLEXES, INTEGERS, limits
from meshwise.arrays.fetching import OPERATION, ask, common_shape, everywhere, hosted, last_of_each, others, store
from meshwise.arrays.indexing import as_indices, counted, mirrored, region, under_mask
from meshwise.arrays.keys import ADVANCED, Key, read_key
from meshwise.arrays.layout import arranged, spread, squeeze, turned
from meshwise.arrays.sharding import Shape, Sharding, sharding
from meshwise.arrays.views import SIGNED, as_bits, made, undivided

Number = bool | int | float | complex
Value = Number | Array | Tensor
"""A number, an array, or a tensor in host memory that is the same in every process."""


def set_item(x: Array, given: Any, value: Any, /) -> None:
    """Write `x[given] = value`."""
    key = read_key(given, x.shape)
    value = _value(x, value)
    alias = shown(x)
    if alias.flips and alias.source is not None and not key.arrays:
        x, key = alias.source, replace(key, cuts=tuple(mirrored(key.cuts, alias.flips, x.shape)))
    writable(x)
    if key.arrays:  # copy what shares memory with x, so that it does not change during the write
        key = replace(key, arrays=tuple((dim, _of_its_own(x, each)) for dim, each in key.arrays))
        value = value if isinstance(value, Number) else _of_its_own(x, value)
    _write(x, key, value)
    written(x)


def _of_its_own(x: Array, other: Array | Tensor) -> Array | Tensor:
    """Return a copy of `other` if it may share memory with `x`, since `other` is read while `x` is written."""
    return mapped(other, torch.clone) if isinstance(other, Array) and entangled(x, other) else other


def _write(x: Array, key: Key, value: Value) -> None:
    where = region(x, key.cuts)
    target = as_bits(made(where.views, where.placed, x, where.shape))
    value = _bits_of(value, x.dtype)
    if not key.arrays:
        if isinstance(value, Number):
            for view in target.parts:
                view.fill_(value)
        else:
            _copy(target, _turned(value, key, (), where.shape, where.flipped))
        return
    dims = [sum(isinstance(each, range) for each in key.cuts[:dim]) for dim, _ in key.arrays]
    arrays = [array for _, array in key.arrays]
    mask = arrays[0]
    if len(arrays) == 1 and isinstance(mask, Array) and mask.dtype is torch.bool:
        _set_masked(target, dims[0], mask, value, key, where.flipped)
    else:
        _put(target, *as_indices(dims, arrays), value, key, where.flipped)


def _value(x: Array, value: Any) -> Value:
    if isinstance(value, Array):
        common_space("assignment", [x, value])
    elif isinstance(value, Number | np.generic):
        return _number(x.dtype, value.item() if isinstance(value, np.generic) else value)
    else:
        values = value if isinstance(value, Tensor) else np.array(value)
        if isinstance(values, np.ndarray) and values.dtype.kind not in "biufc":
            raise TypeError(f"cannot assign {str(value)[:40]!r} to an array. Assign numbers or lists of numbers.")
        host: Tensor = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(values)
        if not host.ndim:
            return _number(x.dtype, host.item())
        value = host
    if value.dtype in COMPLEXES and x.dtype not in COMPLEXES:
        raise TypeError(
            f"assigning {value.dtype} to an array of {x.dtype} would lose the imaginary part. Assign xp.real(value)."
        )
    checked: Array | Tensor = value
    return checked


def _bits_of(value: Value, dtype: torch.dtype) -> Value:
    """Cast a value to uint16, uint32 or uint64, and return its bits in a signed type. For others, return `value`."""
    kind = SIGNED.get(dtype)
    if kind is None:
        return value
    if isinstance(value, Array):
        return as_bits(cast(value, dtype))
    if isinstance(value, Tensor):
        return value.to(dtype).view(kind)
    return torch.tensor(value, dtype=dtype).view(kind).item()


def _number(dtype: torch.dtype, value: Number) -> Number:
    if isinstance(value, complex) and dtype not in COMPLEXES:
        raise TypeError(f"assigning {value} to an array of {dtype} would lose the imaginary part. Assign {value.real}.")
    if dtype is BOOL:
        return bool(value)
    if dtype not in INTEGERS:
        return value
    least, most = limits(dtype)
    if not least <= value <= most:  # type: ignore[operator]
        raise OverflowError(f"{value} does not fit {dtype} ({least} to {most}). Cast the array first.")
    return int(value)  # type: ignore[arg-type]


def _turned(value: Array | Tensor, key: Key, common: Shape, shape: Shape, flips: Sequence[int]) -> Array | Tensor:
    """Permute and reshape `value`, which the user assigns by `x[key] = value`, so that it can be written to the
    selected elements."""
    depth = len(common)
    rest = iter(range(depth, depth + len(shape)))
    spots: list[int | None] = []
    for each in key.out:
        spots.extend(range(depth) if each == ADVANCED else [None if each is None else next(rest)])
    lengths = [*common, *shape]
    wanted = [1 if spot is None else lengths[spot] for spot in spots]
    given = tuple(value.shape)
    while value.ndim > len(spots) and value.shape[0] == 1:
        value = squeeze(value, axis=0) if isinstance(value, Array) else value[0]
    missing = len(spots) - value.ndim
    if missing < 0 or any(a not in (1, b) for a, b in zip(value.shape, wanted[missing:], strict=True)):
        raise ValueError(f"values of shape {given} do not broadcast to {tuple(wanted)}, the shape of the target.")
    new = tuple(at for at, spot in enumerate(spots) if spot is None and at >= missing)
    order: list[int | None] = [None] * len(lengths)
    for at, spot in enumerate(spots):
        if spot is not None and at >= missing:
            order[spot] = at - missing - sum(each < at for each in new)
    dims = [depth + dim for dim in flips]
    if isinstance(value, Array):
        value = squeeze(value, axis=[at - missing for at in new]) if new else value
        value = value if order == list(range(value.ndim)) else arranged(value, order)
        return turned(value, dims) if dims else value
    value = value.squeeze([at - missing for at in new]) if new else value
    value = value.permute([dim for dim in order if dim is not None])
    for at, dim in enumerate(order):
        value = value.unsqueeze(at) if dim is None else value
    return value.flip(dims) if dims else value


def _laid(x: Array, value: Array | Tensor, shape: Shape, placed: Sharding) -> tuple[Tensor, ...]:
    """Return the local parts of the value, broadcast to `shape` and laid out as `placed`."""
    if isinstance(value, Array):
        if x.dtype.itemsize < value.dtype.itemsize:  # cast first, so that fewer bytes move
            value = cast(value, x.dtype)
        return spread(value, shape, placed, OPERATION).parts
    return hosted(x.space, value.expand(shape), placed).parts


def _copy(target: Array, value: Array | Tensor) -> None:
    for view, part in zip(target.parts, _laid(target, value, target.shape, target.sharding), strict=True):
        put(view, part)


def _set_masked(target: Array, dim: int, mask: Array, value: Value, key: Key, flips: Sequence[int]) -> None:
    """Write the elements at which `mask` is true."""
    depth, placed = mask.ndim, target.sharding
    inside, shown, order = under_mask(target, dim, mask)
    turned = [part.permute(order) for part in target.parts]
    if isinstance(value, Number):
        for view, here in zip(turned, shown, strict=True):
            view.masked_fill_(here.view((*here.shape, *[1] * (view.ndim - depth))), value)
        return
    rest = tuple(target.shape[each] for each in order[depth:])
    sizes = counted(target, placed, [int(here.sum()) for here in shown])
    total = sum(sizes) if inside else max(sizes)
    less = tuple(each if each < dim else each - depth for each in flips)
    value = _turned(value, key, (total,), rest, less)
    if inside and value.shape[0] != 1 and math.prod(target.shape[dim : placed.dim]) != 1:
        _put(target, *as_indices([dim], [mask]), value, None, ())
        return
    repeated = value.shape[0] == 1 != total
    if not inside:
        there = placed if placed.dim is None else placed.along(order.index(placed.dim) - depth + 1)
    else:
        there = sharding(placed.places) if repeated else sharding(placed.places, 0, tuple(sizes))
    parts = _laid(target, value, (1 if repeated else total, *rest), there)
    for view, here, part in zip(turned, shown, parts, strict=True):
        view[here] = part.to(view.dtype)


def _put(
    target: Array,
    dims: tuple[int, ...],
    indices: Sequence[Array | Tensor],
    value: Value,
    key: Key | None,
    flips: Sequence[int],
) -> None:
    """Write a value to the entries of `target` at the given indices, as `target[indices] = value` does."""
    target = undivided(target)
    rest, tail = others(target, dims)
    less = tuple(rest.index(dim) for dim in flips)
    placed = target.sharding
    if placed.dim in dims:
        asked = ask(target, dims, indices, in_order=True)
        if isinstance(value, Number):
            store(target, target.parts, asked, value)
            return
        value = value if key is None else _turned(value, key, asked.shape, tail, less)
        there = asked.placed
        parts = tuple(part.to(target.dtype) for part in _laid(target, value, (*asked.shape, *tail), there))
        store(target, target.parts, asked, made(list(parts), there, target, (*asked.shape, *tail)))
        return
    each_place = everywhere(target, indices)
    common = common_shape(each_place)
    parts = ()
    if not isinstance(value, Number):
        value = value if key is None else _turned(value, key, common, tail, less)
        if placed.dim is not None:
            placed = placed.along(len(common) + rest.index(placed.dim))
        parts = _laid(target, value, (*common, *tail), placed)
    for number, view in enumerate(target.parts):
        where = tuple(each.parts[number].to(torch.int64).expand(common).reshape(-1) for each in each_place)
        turned = view.permute(*dims, *rest)
        if isinstance(value, Number):
            turned[where] = value  # type: ignore[assignment]  # torch accepts complex numbers; its stubs do not
            continue
        part = parts[number].to(view.dtype).reshape(len(where[0]), *turned.shape[len(dims) :])
        flat = torch.zeros_like(where[0])
        for entry, length in zip(where, turned.shape, strict=False):
            flat = flat * length + torch.where(entry < 0, entry + length, entry)
        size = math.prod(turned.shape[: len(dims)])
        # Entries out of range are clamped here, because turned[where] raises an IndexError for them.
        turned[where] = part[last_of_each(flat.clamp(0, max(size - 1, 0)), size)]
