"""Create arrays; each device makes only its own part.

No device ever holds all of a divided array.

The first parameter of these functions, the `Space` with the devices, is filled in by the namespace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays import dtypes, rules
from meshwise.arrays.aliases import FOREIGN, as_array_without_dims, copied, in_order_of, is_number
from meshwise.arrays.array import Alias, Array, ViewedMemory, cast
from meshwise.arrays.dtypes import as_dtype
from meshwise.arrays.moves import reshard
from meshwise.arrays.sharding import Layout, Shape, Sharding
from meshwise.arrays.space import Space
from meshwise.arrays.strides import named
from meshwise.spec.errors import UsageError
from meshwise.transfer.copy import CopyOptions, move
from meshwise.transfer.interop import from_array, is_array

Placement = Layout | Sharding | None
Make = Callable[[Shape, tuple[slice, ...], torch.device], Tensor]
"""Makes a part of an array from three arguments: its shape, its slices in the whole array, and its device."""


def asarray(
    space: Space,
    obj: Any,
    /,
    dtype: Any = None,
    *,
    device: Any = None,
    sharding: Placement = None,
    copy: bool | None = None,
) -> Array:
    """Make an array from numbers, nested lists, or an array of this or another library."""
    wanted = None if dtype is None else as_dtype(dtype)
    if isinstance(obj, Array) and (obj.space is space or obj.space == space):
        return _again(obj, wanted, device, sharding, copy)
    tensor = _as_tensor(space, obj, wanted)
    wanted = wanted or tensor.dtype
    shape = tuple(tensor.shape)
    placed = space.placed(shape, device, sharding)
    parts, shares = [], False
    for part, place in space.local(placed):
        piece = tensor[placed.interval(shape, part)]
        if piece.shape == tensor.shape and copy is not True and space.devices[place] == piece.device and placed.single:
            piece, shares = piece.to(wanted), True
        elif copy is False:
            raise ValueError(
                "asarray(copy=False) cannot move values to other devices. Leave copy out, or pass the values' device."
            )
        else:
            own = torch.empty(piece.shape, dtype=wanted, device=space.devices[place])
            piece = move(own, piece, "asarray", CopyOptions(ends=("host", space.names[place])))
        parts.append(piece)
    found = Array(tuple(parts), placed, shape, wanted, space)
    if shares and not isinstance(obj, list | tuple | int | float | complex):
        found.alias = Alias(FOREIGN)
    return found


def of_user(
    space: Space,
    obj: Any,
    /,
    dtype: Any = None,
    *,
    device: Any = None,
    sharding: Placement = None,
    copy: bool | None = None,
) -> Array:
    """Make an array from numbers, nested lists, or an array of this or another library."""
    foreign = isinstance(obj, Tensor) or (is_array(obj) and not isinstance(obj, Array))
    own = True if foreign and copy is None else copy  # copy by default, so that one device behaves like several
    found = asarray(space, obj, dtype, device=device, sharding=sharding, copy=own)
    if isinstance(obj, np.ndarray | Tensor):
        strides = obj.stride() if isinstance(obj, Tensor) else tuple(each // obj.itemsize for each in obj.strides)
        found.alias = Alias(FOREIGN if copy is False else ViewedMemory(), named(found.shape, tuple(strides)))
    return as_array_without_dims(copied(found) if found is obj and is_number(obj) else found)


def _again(x: Array, dtype: torch.dtype | None, device: Any, wanted: Placement, copy: bool | None) -> Array:
    """Apply `xp.asarray` to `x`, an array of the same namespace `xp`."""
    stays = wanted is None and device in (None, x.space.device_name(x.sharding))
    placed = x.sharding if stays else x.space.placed(x.shape, device, wanted)
    if copy is False and (dtype not in (None, x.dtype) or placed != x.sharding):
        raise ValueError("asarray(copy=False): a new dtype, device or sharding needs a copy. Leave copy out.")
    if dtype is not None and dtype is not x.dtype:
        found = cast(reshard(x, placed, "asarray"), dtype)
    elif placed == x.sharding and copy is not True:
        return x
    else:
        found = reshard(x, placed, "asarray", own=True)
    return in_order_of(found if is_number(x) else as_array_without_dims(found), [x])


def _as_tensor(space: Space, obj: Any, wanted: torch.dtype | None = None) -> Tensor:
    """Convert values to a tensor."""
    if isinstance(obj, Array):
        raise UsageError(
            f"this array belongs to an array namespace on {', '.join(obj.space.names)}. Write xp.asarray(x.numpy())."
        )
    if isinstance(obj, np.generic):
        obj = np.asarray(obj)
    if isinstance(obj, Tensor) or is_array(obj):
        tensor = from_array(obj)
        dtypes.refuse_gradients("asarray", tensor.requires_grad)
        return tensor.resolve_conj().resolve_neg()
    read = _read(obj)
    values = np.asarray(read)
    if wanted is torch.uint64 and values.dtype.kind == "f":  # NumPy reads [1, 2**63 + 1] as rounded floats
        whole = np.asarray(read, dtype=object)
        values = whole.astype(np.uint64) if all(type(each) is int for each in whole.flat) else values
    if values.dtype.kind not in "biufc":
        raise TypeError(f"asarray: this {type(obj).__name__} does not contain only numbers. Pass numbers or lists.")
    values = values.view(values.dtype.name)  # NumPy has two dtypes named int64, and torch supports only one
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    if not _has_numpy(obj):
        if tensor.is_floating_point():
            tensor = tensor.to(space.default_float)
        elif tensor.is_complex():
            tensor = tensor.to(dtypes.complex_of(space.default_float))
    return tensor


def _read(obj: Any) -> Any:
    """Replace the arrays in nested lists with their values."""
    if isinstance(obj, list | tuple):
        return [_read(each) for each in obj]
    return obj.numpy() if isinstance(obj, Array | Tensor) else obj


def _has_numpy(obj: Any) -> bool:
    if isinstance(obj, list | tuple):
        return any(map(_has_numpy, obj))
    return isinstance(obj, np.ndarray | np.generic | Array | Tensor)


def made(space: Space, shape: Any, dtype: torch.dtype, placement: tuple[Any, Placement], make: Make) -> Array:
    """Make an array by calling `make` for each local part."""
    whole = as_shape(shape)
    placed = space.placed(whole, *placement)
    parts = tuple(
        make(placed.part_shape(whole, part), placed.interval(whole, part), space.devices[place])
        for part, place in space.local(placed)
    )
    return as_array_without_dims(Array(parts, placed, whole, dtype, space))


def _lengths(shape: Any) -> Any:
    """Return a shape as a sequence. A single length becomes a tuple of one length."""
    return shape if hasattr(shape, "__iter__") and getattr(shape, "shape", True) else (shape,)


def as_shape(shape: Any) -> Shape:
    """Convert a length or a sequence of lengths to a shape. Raises ValueError for a negative length."""
    try:
        lengths = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else _lengths(shape)))
    except TypeError as error:
        raise TypeError(f"shape must be an integer or a tuple of integers, but it is {shape!r}.") from error
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape {lengths} contains a negative length. Give lengths of 0 or more.")
    return lengths


def empty(space: Space, shape: Any, dtype: Any = None, *, device: Any = None, sharding: Placement = None) -> Array:
    """Make an array with uninitialized values."""
    kind = space.default_float if dtype is None else as_dtype(dtype)
    return made(space, shape, kind, (device, sharding), lambda own, _, at: torch.empty(own, dtype=kind, device=at))


def full(
    space: Space, shape: Any, fill_value: Any, dtype: Any = None, *, device: Any = None, sharding: Placement = None
) -> Array:
    """Make an array filled with one value: a number, or an array without dims."""
    if isinstance(fill_value, Array):
        dtype, fill_value = dtype or fill_value.dtype, fill_value.numpy()[()]
    if dtype is None:
        dtype = _as_tensor(space, fill_value).dtype
    kind = as_dtype(dtype)
    value = fill_value.item() if isinstance(fill_value, np.generic | np.ndarray) else fill_value

    def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
        return torch.full(own, value, dtype=kind, device=at)

    return made(space, shape, kind, (device, sharding), part)


def zeros(space: Space, shape: Any, dtype: Any = None, *, device: Any = None, sharding: Placement = None) -> Array:
    """Make an array of zeros."""
    return full(space, shape, 0, dtype or space.default_float, device=device, sharding=sharding)


def ones(space: Space, shape: Any, dtype: Any = None, *, device: Any = None, sharding: Placement = None) -> Array:
    """Make an array of ones."""
    return full(space, shape, 1, dtype or space.default_float, device=device, sharding=sharding)


def arange(
    space: Space,
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    sharding: Placement = None,
) -> Array:
    """Make the numbers from `start` up to, but not including, `stop`, in steps of `step`."""
    start, stop = (0, start) if stop is None else (start, stop)
    start, stop, step = (value.item() if hasattr(value, "item") else value for value in (start, stop, step))
    if step == 0:
        raise ValueError("arange: step must not be 0, because the range would never end.")
    whole = all(isinstance(value, int) for value in (start, stop, step))
    kind = as_dtype(dtype) if dtype is not None else torch.int64 if whole else space.default_float
    length = max(0, -((start - stop) // step) if whole else math.ceil((stop - start) / step))

    def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
        count = torch.arange(where[0].start, where[0].stop, dtype=torch.int64, device=at)
        values: Tensor = count * step + start if whole else count.to(torch.float64) * step + start
        return values.to(kind)

    return made(space, (length,), kind, (device, sharding), part)


def linspace(
    space: Space,
    start: Any,
    stop: Any,
    /,
    num: int = 50,
    *,
    dtype: Any = None,
    device: Any = None,
    sharding: Placement = None,
    endpoint: bool = True,
) -> Array:
    """Make `num` evenly spaced numbers from `start` to `stop`. `stop` is included only if `endpoint` is True."""
    start, stop = (value.item() if hasattr(value, "item") else value for value in (start, stop))
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    default = dtypes.complex_of(space.default_float) if is_complex else space.default_float
    kind = default if dtype is None else as_dtype(dtype)
    exact = torch.complex128 if is_complex else torch.float64
    gaps = max(num - 1 if endpoint else num, 1)

    def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
        count = torch.arange(where[0].start, where[0].stop, dtype=exact, device=at)
        values: Tensor = count * ((stop - start) / gaps) + start
        if endpoint and num > 1 and where[0].start < num == where[0].stop:
            values[-1] = stop
        return values.floor().to(kind) if kind in dtypes.WHOLE else values.to(kind)

    return made(space, (num,), kind, (device, sharding), part)


def eye(
    space: Space,
    n_rows: int,
    n_cols: int | None = None,
    k: int = 0,
    dtype: Any = None,
    *,
    device: Any = None,
    sharding: Placement = None,
) -> Array:
    """Make a matrix with ones on diagonal number `k` and zeros elsewhere."""
    kind = space.default_float if dtype is None else as_dtype(dtype)
    n_cols = n_rows if n_cols is None else n_cols
    k = max(-n_rows, min(k, n_cols))  # larger offsets also give zeros, but may not fit into 64 bits

    def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
        rows, columns = (torch.arange(each.start, each.stop, device=at) for each in where)
        ones: Tensor = rows[:, None] + k == columns
        return ones.to(kind)

    return made(space, (n_rows, n_cols), kind, (device, sharding), part)


def full_like(
    space: Space, x: Any, /, fill_value: Any, dtype: Any = None, *, device: Any = None, sharding: Placement = None
) -> Array:
    """Make an array of the shape of `x`, filled with one value. By default, its dtype and sharding are those of `x`."""
    x = x if isinstance(x, Array) else asarray(space, x)
    kept = x.sharding if device is None and sharding is None else sharding
    return in_order_of(full(x.space, x.shape, fill_value, dtype or x.dtype, device=device, sharding=kept), [x])


def _like(make: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function such as `zeros_like` from a function such as `zeros`."""

    def made_like(
        space: Space, x: Any, /, dtype: Any = None, *, device: Any = None, sharding: Placement = None
    ) -> Array:
        x = x if isinstance(x, Array) else asarray(space, x)
        kept = x.sharding if device is None and sharding is None else sharding
        return in_order_of(make(x.space, x.shape, dtype or x.dtype, device=device, sharding=kept), [x])

    doc = f"Call `{make.__name__}` with the shape, dtype and placement of `x`."
    return rules.named(made_like, f"{make.__name__}_like", doc)


CREATION: rules.Table = {"asarray": of_user} | rules.by_name(arange, linspace, eye, full, full_like)
"""The functions that create arrays, by name. The first parameter of each function is the `Space`."""
for _make in (empty, zeros, ones):
    CREATION |= {_make.__name__: _make, f"{_make.__name__}_like": _like(_make)}
