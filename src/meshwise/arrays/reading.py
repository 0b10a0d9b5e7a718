"""Read an array on the host: tensor, NumPy array, number, text.

Functions that return values wait for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array, numbered
from meshwise.arrays.moves import EXPLAINED, replicate, to_single
from meshwise.arrays.sharding import resized, sharding
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import HOST
from meshwise.transfer.copy import CopyOptions, move
from meshwise.transfer.devices import empty_like

HOST_DEVICE = torch.device("cpu")


def to_host(x: Array, operation: str = "read") -> Tensor:
    """Return all of `x` as a new tensor in host memory."""
    if EXPLAINED:
        raise UsageError(f"explain does not compute values, but {operation} reads them. Leave out what reads values.")
    if x.space.over_ranks:
        return replicate(x, operation=operation).parts[0].to(HOST_DEVICE, copy=True)
    whole = empty_like(torch.empty(x.shape, dtype=x.dtype, device="meta"), HOST_DEVICE)
    parts = x.space.local(x.sharding)[:1] if x.sharding.dim is None else x.space.local(x.sharding)
    for (part, place), tensor in zip(parts, x.parts, strict=False):
        into = whole[x.sharding.interval(x.shape, part)] if x.shape else whole
        move(into, tensor, operation, CopyOptions(ends=(x.space.names[place], HOST)))
    return whole


def numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return all of `x` as a new NumPy array. Waits for the values."""
    try:
        return to_host(x, "numpy").numpy()
    except TypeError as error:
        raise TypeError(f"NumPy has no dtype {x.dtype}. Write x.astype(xp.float32) first.") from error


def tensor(x: Array, device: Any = None) -> Tensor:
    """Return all of `x` as one torch tensor, on a device of the namespace or by default on the host."""
    if device is None:
        return to_host(x, "torch")
    place = x.space.place(device)
    found = to_single(x, place, "torch")
    if not found.parts:
        raise RuntimeError(f"x.torch({device!r}): this device belongs to another rank. Write x.torch().")
    return found.parts[0].clone() if x.sharding.dim is None and place in x.sharding.places else found.parts[0]


def number(x: Array) -> Any:
    """Return the only element of `x` as a Python number."""
    if x.shape and any(length != 1 for length in x.shape):
        raise TypeError(
            f"an array of shape {x.shape} cannot become one Python number. Take one element, or reduce it: x.sum()."
        )
    if x.space.over_ranks:
        return to_host(x, "number").item()
    holder = next(part for part in x.parts if part.numel()) if x.shape else x.parts[0]
    return holder.item()


def as_float(x: Array) -> float:
    """Implement `float(x)`. Raises TypeError for a complex number."""
    value = number(x)
    if isinstance(value, complex):
        raise TypeError("float() does not take complex numbers: write xp.real(x) or abs(x).")
    return float(value)


def as_int(x: Array) -> int:
    """Implement `int(x)`. Raises TypeError for a complex number."""
    value = number(x)
    if isinstance(value, complex):
        raise TypeError("int() does not take complex numbers: write xp.real(x) or abs(x).")
    return int(value)


def as_index(x: Array) -> int:
    """Implement `operator.index(x)`, as in `range(x)`. Raises TypeError unless `x` is an integer."""
    value = number(x)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"an index must be an integer, but this array has dtype {x.dtype}. Write int(x).")
    return value


def as_complex(x: Array) -> complex:
    """Implement `complex(x)`."""
    return complex(number(x))


def as_bool(x: Array) -> bool:
    """Implement `bool(x)`. Raises ValueError if `x` does not have exactly one element."""
    if x.shape and any(length != 1 for length in x.shape):
        raise ValueError(f"the truth value of an array of shape {x.shape} is ambiguous. Write x.any() or x.all().")
    return bool(number(x))


EDGE = 3
"""How many elements are shown at each end of a dim of a large array."""
MOST_SHOWN = 1000


def text(x: Array) -> str:
    """Implement `repr(x)`: the values, the dtype and the devices."""
    many = x.shape and int(np.prod(x.shape)) > MOST_SHOWN
    values = _values(x) if not many else _ends(x)
    kind = str(x.dtype).removeprefix("torch.")
    shape = f", shape={x.shape}" if many else ""
    return f"Array({values}, dtype={kind}{shape}, {where(x)})"


def where(x: Array) -> str:
    """Describe where the array lies, for example `dim 0 over cpu:0 (3), cpu:1 (2)`."""
    names = [x.space.names[place] for place in x.sharding.places]
    if x.sharding.dim is None:
        return f"on {names[0]}" if len(names) == 1 else f"on each of {', '.join(names)}"
    parts = ", ".join(f"{name} ({size})" for name, size in zip(names, x.sharding.sizes, strict=True))
    return f"dim {x.sharding.dim} over {parts}"


def _values(x: Array) -> str:
    values = to_host(x, "print")
    shown = values.float().numpy() if x.dtype is torch.bfloat16 else values.numpy()
    return np.array2string(shown, separator=", ", prefix="Array(")


def _ends(x: Array) -> str:
    """Format the elements at the ends of each dim. No other elements are read."""
    shown = x
    gaps = []
    for dim, length in enumerate(x.shape):
        if length > 2 * EDGE:
            gaps.append(dim)
            shown = _ends_of(shown, dim)
    return _with_gaps(to_host(shown, "print"), tuple(gaps))


def _ends_of(x: Array, dim: int) -> Array:
    """Return the first and last `EDGE` elements along a dim. They stay on their devices."""
    length, placed = x.shape[dim], x.sharding
    wanted = [*range(EDGE), *range(length - EDGE, length)]
    shape = resized(x.shape, dim, 2 * EDGE)
    spans = placed.spans(dim, length)
    kept = [[at - begin for at in wanted if begin <= at < begin + size] for begin, size in spans]
    parts = tuple(tensor[(slice(None),) * dim + (kept[part],)] for part, tensor in numbered(x))
    if placed.dim == dim:
        placed = sharding(placed.places, dim, tuple(map(len, kept)))
    return Array(parts, placed, shape, x.dtype, x.space)


def _with_gaps(values: Tensor, gaps: tuple[int, ...], dim: int = 0) -> str:
    if values.dim() == 0:
        return f"{values.item():.8g}" if values.is_floating_point() else str(values.item())
    inner = [_with_gaps(row, gaps, dim + 1) for row in values]
    if dim in gaps:
        inner.insert(EDGE, "...")
    between = ",\n" + " " * (7 + dim) if values.dim() > 1 else ", "
    return f"[{between.join(inner)}]"
