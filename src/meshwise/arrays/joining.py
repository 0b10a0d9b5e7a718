"""Concatenate, stack, split, repeat, roll and pad arrays.

`runs.py` says what each function moves. Along a dim that is not divided, no data moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meshwise.arrays.aliases import as_array_without_dims, copied
from meshwise.arrays.align import common_space
from meshwise.arrays.array import Array, cast
from meshwise.arrays.creation import asarray
from meshwise.arrays.dtypes import result_type
from meshwise.arrays.elementwise import FUNCTIONS as ELEMENTWISE
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.indexing import counted, cut_along
from meshwise.arrays.layout import expand_dims, flipped, spread
from meshwise.arrays.reshaping import flat, reshape
from meshwise.arrays.runs import Run, intervals, joined, whole
from meshwise.arrays.sharding import resized, sharding
from meshwise.arrays.views import as_before, as_bits, axis_of, by_bits, made


def concat(arrays: Sequence[Array], /, axis: int | None = 0) -> Array:
    """Join arrays along an existing dim."""
    given = _of_one_type("concat", arrays)
    if axis is None:
        given, axis = [flat(x) for x in given], 0
    ndim = len(given[0].shape)
    dim = axis_of(axis, ndim, "concat")
    shapes = {x.shape[:dim] + x.shape[dim + 1 :] for x in given}
    if len(shapes) > 1 or any(x.ndim != ndim for x in given):
        raise ValueError(
            f"concat(axis={axis}): shapes must be equal in other dims, not {', '.join(str(x.shape) for x in given)}."
        )
    return joined([whole(x, dim) for x in given], dim, "concat")


def stack(arrays: Sequence[Array], /, axis: int = 0) -> Array:
    """Join arrays along a new dim. If their shardings are equal, no data moves."""
    given = _of_one_type("stack", arrays)
    if len({x.shape for x in given}) > 1:
        raise ValueError(f"stack: all shapes must be equal, but they are {', '.join(str(x.shape) for x in given)}.")
    dim = axis_of(axis, len(given[0].shape) + 1, "stack")
    return joined([whole(expand_dims(x, axis=dim), dim) for x in given], dim, "stack")


def unstack(x: Array, /, axis: int = 0) -> tuple[Array, ...]:
    """Split an array into the entries of one dim."""
    dim = axis_of(axis, x.ndim, "unstack")
    entries = tuple(cut_along(x, dim, at) for at in range(x.shape[dim]))
    return entries if x.ndim > 1 else tuple(map(copied, entries))


def flip(x: Array, /, axis: int | Sequence[int] | None = None) -> Array:
    """Reverse the entries along the given dims, by default along all dims."""
    given = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    if not x.shape:
        return copied(x)
    return flipped(x, sorted({axis_of(each, x.ndim, "flip") for each in given}))


@by_bits
def roll(x: Array, /, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Array:
    """Shift the entries by `shift` along a dim."""
    if axis is None:
        if not isinstance(shift, int):
            raise ValueError(f"roll(shift={shift}) needs one axis for each shift. Pass axis=, or only one shift.")
        return reshape(roll(flat(x), shift, axis=0), x.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(shifts) != len(axes):
        raise ValueError(f"roll: shift and axis must have equally many entries, but are {shift} and {axis}.")
    placed = x.sharding
    if not axes:
        return copied(x)
    for each, by in zip(axes, shifts, strict=True):
        dim = axis_of(each, x.ndim, "roll")
        length = x.shape[dim]
        begin = -by % length if length else 0
        x = joined([Run(x, begin, length - begin), Run(x, 0, begin)], dim, "roll", placed)
    return x


@by_bits
def tile(x: Array, repetitions: Sequence[int] | int, /) -> Array:
    """Repeat the whole array along each dim, as often as `repetitions` says for that dim."""
    times = [repetitions] if isinstance(repetitions, int) else list(repetitions)
    times = [1] * (x.ndim - len(times)) + times
    if min(times, default=0) < 0:
        raise ValueError(f"tile: numbers of repetitions must be 0 or more, but are {tuple(times)}.")
    if len(times) > x.ndim:
        x = expand_dims(x, axis=list(range(len(times) - x.ndim)))
    result = x
    for dim, count in enumerate(times):
        if count != 1:
            result = joined([whole(result, dim)] * count or [Run(result, 0, 0)], dim, "tile")
    return copied(x) if result is x else result


@by_bits
def repeat(x: Array, repeats: Any, /, axis: int | None = None) -> Array:
    """Repeat each entry along `axis`."""
    x = flat(x) if axis is None else x
    repeats = asarray(x.space, repeats) if isinstance(repeats, list | tuple) else repeats
    dim = axis_of(axis or 0, x.ndim, "repeat")
    placed, length = x.sharding, x.shape[dim]
    if isinstance(repeats, Array) and repeats.shape not in ((), (1,)):
        if repeats.shape != (length,):
            raise ValueError(f"repeat: repeats must be one number, or have shape ({length},), not {repeats.shape}.")
        own = placed.along(0) if placed.dim == dim else sharding(placed.places)
        times = [part.to(torch.int64) for part in spread(repeats, (length,), own, "repeat").parts]
        sizes = counted(x, placed, [int(each.sum()) for each in times])
    else:
        count = int(repeats)
        if count < 0:
            raise ValueError(f"repeat: repeats must be 0 or more, but it is {count}.")
        times = [count] * len(x.parts)  # type: ignore[list-item]
        sizes = [count * size for size in placed.sizes] if placed.dim == dim else [count * length]
    parts = [torch.repeat_interleave(part, each, dim=dim) for part, each in zip(x.parts, times, strict=True)]
    if placed.dim == dim:
        placed = sharding(placed.places, dim, tuple(sizes))
    total = sum(sizes) if placed.dim == dim else max(sizes)
    return made(parts, placed, x, resized(x.shape, dim, total))


def diff(
    x: Array, /, n: int = 1, axis: int = -1, *, prepend: Array | None = None, append: Array | None = None
) -> Array:
    """Return the differences of neighboring entries along a dim, taken `n` times."""
    dim = axis_of(axis, x.ndim, "diff")
    if n < 0:
        raise ValueError(f"diff: n must be 0 or more, but it is {n}.")
    if not n:
        return x
    if prepend is not None or append is not None:
        x = concat([each for each in (prepend, x, append) if each is not None], axis=dim)
    dtype, x = x.dtype, as_bits(x)
    for _ in range(n):
        length = x.shape[dim]
        after = cut_along(x, dim, range(min(1, length), length))
        before = cut_along(x, dim, range(max(0, length - 1)))
        x = ELEMENTWISE["not_equal" if x.dtype is torch.bool else "subtract"](after, before)
    return as_before(x, dtype)


def halo(
    x: Array, before: int, after: int, /, *, dim: int | None = None, wrap: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the local parts, each extended by entries of the neighboring parts on both sides."""
    dim = x.sharding.dim if dim is None else axis_of(dim, x.ndim, "halo")
    if min(before, after) < 0:
        raise ValueError(f"halo: before and after must be 0 or more, but are {before} and {after}.")
    lies, length = x.sharding, 0 if dim is None else x.shape[dim]
    if dim is None or not length:
        return tuple(part.clone() for part in x.parts)
    runs, at = [whole(x, dim)], 0
    if wrap:
        ahead, behind = _ring(x, length, before), -(-after // length)
        runs, at = [*ahead, whole(x, dim), *[whole(x, dim)] * behind], before
    wanted = []
    for place, (begin, size) in zip(lies.places, lies.spans(dim, length), strict=True):
        low = begin + at - before if wrap else max(0, begin - before)
        high = begin + size + at + after if wrap else min(length, begin + size + after)
        wanted.append((place, low, high) if size else (place, begin + at, begin + at))
    if lies.dim not in (None, dim):
        raise ValueError(f"halo(dim={dim}): the array is split along dim {lies.dim}. Call x.reshard(xp.shard({dim})).")
    return tuple(intervals(runs, dim, wanted, "halo"))


def _ring(x: Array, length: int, before: int) -> list[Run]:
    """Return runs of the `before` entries that precede `x` if its entries along the dim form a ring."""
    rounds, rest = divmod(before, length)
    return [Run(x, length - rest, rest), *[Run(x, 0, length)] * rounds]


def pad(x: Array, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Array:
    """Add entries before and after `x` along each dim, as NumPy's `pad`."""
    if mode not in ("constant", "edge", "wrap", "reflect", "symmetric"):
        raise ValueError(f"pad: mode must be constant, edge, wrap, reflect or symmetric, but is {mode!r}.")
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    values = np.broadcast_to(np.asarray(constant_values), (x.ndim, 2)).tolist()
    given = x
    for dim, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            raise ValueError(f"pad: widths must be 0 or more, but pad_width is {pad_width}.")
        if before or after:
            ends = [_constant(x, dim, *each) for each in zip((before, after), values[dim], (False, True), strict=True)]
            if mode != "constant":
                ends = _ends(x, dim, before, after, mode)
            x = joined([ends[0], whole(x, dim), ends[1]], dim, "pad")
    return as_array_without_dims(copied(x)) if x is given else x


def _constant(x: Array, dim: int, width: int, value: Any, at_end: bool) -> Run:
    placed = x.sharding
    shape = resized(x.shape, dim, width)
    if placed.dim == dim:
        full = [k for k, size in enumerate(placed.sizes) if size] or [0]
        placed = sharding((placed.places[full[-1 if at_end else 0]],))
    parts = [
        torch.full(placed.part_shape(shape, k), value, dtype=x.dtype, device=x.space.devices[place])
        for k, place in x.space.local(placed)
    ]
    return Run(made(parts, placed, x, shape), 0, width)


def _ends(x: Array, dim: int, before: int, after: int, mode: str) -> list[Run]:
    length = x.shape[dim]
    most = {"edge": math.inf if length else 0, "reflect": length - 1}.get(mode, length)
    if max(before, after) > most:
        raise ValueError(f"pad(mode={mode!r}) of {length} entries takes widths up to {most}, not {before} and {after}.")
    if mode == "edge":
        return [Run(x, 0, before, 0), Run(x, length - 1, after, 0)]
    if mode == "wrap":
        return [Run(x, length - before, before), Run(x, 0, after)]
    inner = mode == "reflect"
    return [Run(x, before - 1 + inner, before, -1), Run(x, length - 1 - inner, after, -1)]


def _of_one_type(name: str, arrays: Sequence[Array]) -> list[Array]:
    """Cast all arrays to the dtype that they promote to. Raises ValueError if the list is empty."""
    if isinstance(arrays, Array):
        raise TypeError(f"{name} takes a list of arrays, not one array.")
    given = list(arrays)
    if not given:
        raise ValueError(f"{name} needs at least one array, but the list is empty.")
    space = next((x.space for x in given if isinstance(x, Array)), None)
    if space is not None:
        given = [x if isinstance(x, Array) else asarray(space, x) for x in given]
    else:
        raise NoArrayGiven(f"{name} needs at least one array, but got {', '.join(type(x).__name__ for x in given)}.")
    common_space(name, given)
    dtype = result_type(*given)
    return [cast(x, dtype) for x in given]
