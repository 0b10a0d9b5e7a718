"""Compute Fourier transforms, with a transpose if the axis is sharded.

Axes that are not sharded are transformed without communication.

Bytes moved, for an array of S bytes that is divided evenly over p devices:

    no sharded axis      0
    the sharded axis     (1 - 1/p) S, for a transpose. The result stays sharded along the other dim, as the next
                         transform needs it: fftn and then ifftn make one transpose each, and restore the layout
    a vector             2 (1 - 1/p) S, to one device and back. From LONG entries on, if their number has a divisor
                         near its square root, it is transformed in parts on all devices: 3 (1 - 1/p) S, for three
                         transposes of the complex values
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.array import Array, numbered
from meshwise.arrays.creation import Placement, made
from meshwise.arrays.dtypes import as_dtype, complex_of
from meshwise.arrays.gathering import tell
from meshwise.arrays.joining import roll
from meshwise.arrays.lanes import free_dim, fullest
from meshwise.arrays.moves import reshard
from meshwise.arrays.reductions import as_array
from meshwise.arrays.rules import by_name, named
from meshwise.arrays.sharding import evenly, resized, sharding
from meshwise.arrays.space import Space
from meshwise.arrays.statistics import as_floats
from meshwise.arrays.views import axis_of

LONG = 1 << 22  # a vector of at least this many entries is transformed in parts
NORMS = ("backward", "ortho", "forward")
Transform = Callable[..., Tensor]
OF_REAL = {"rfft", "ihfft"}


def _one(name: str) -> Callable[..., Array]:
    def rule(x: Array, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
        x = _floats(x, name, norm)
        return along(x, name, axis_of(axis, x.ndim, name), n, norm)

    doc = f"Apply `{name}` along `axis`, cut or padded with zeros to `n` entries. norm: {', '.join(NORMS)}."
    return named(rule, name, doc)


def _several(name: str, doc: str) -> Callable[..., Array]:
    def rule(
        x: Array, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
    ) -> Array:
        x = _floats(x, name, norm)
        return _complex_ones(x, name, *_lengths(x, f"{name}n", s, axes), norm)

    return named(rule, f"{name}n", doc)


fftn = _several("fft", "Compute the Fourier transform along several axes, by default along all.")
ifftn = _several("ifft", "Compute the inverse of `fftn`.")


def rfftn(
    x: Array, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    """Compute the Fourier transform of real values along several axes, by default along all."""
    x = _floats(x, "rfft", norm)
    lengths, dims = _lengths(x, "rfftn", s, axes)
    x = along(x, "rfft", dims[-1], lengths[-1], norm, dims)
    return _complex_ones(x, "fft", lengths[:-1], dims[:-1], norm)


def irfftn(
    x: Array, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    """Compute the inverse of `rfftn`."""
    x = _floats(x, "irfft", norm)
    lengths, dims = _lengths(x, "irfftn", s, axes)
    x = _complex_ones(x, "ifft", lengths[:-1], dims[:-1], norm)
    return along(x, "irfft", dims[-1], lengths[-1], norm)


def _complex_ones(x: Array, name: str, lengths: list[int | None], dims: list[int], norm: str) -> Array:
    """Apply `fft` or `ifft` along several axes, one after another, in an order that moves little data."""
    order = sorted(range(len(dims)), key=lambda k: (dims[k] == x.sharding.dim, k))
    others = [dim for dim in range(x.ndim) if dim not in dims]
    if others and max(x.shape[dim] for dim in others) >= len(x.sharding.places):
        order.reverse()
    for k in order:
        x = along(x, name, dims[k], lengths[k], norm, dims)
    return x


def _lengths(
    x: Array, name: str, s: Sequence[int] | None, axes: Sequence[int] | None
) -> tuple[list[int | None], list[int]]:
    """Return the lengths and the axes of a transform over several axes."""
    count = x.ndim
    if axes is None:
        axes = range(count) if s is None else range(count - len(s), count)
    dims = [axis_of(axis, x.ndim, name) for axis in axes]
    lengths: list[int | None] = [None] * len(dims)
    if s is not None:
        lengths = [None if length == -1 else int(length) for length in s]
    if len(lengths) != len(dims) or len(set(dims)) < len(dims) or not dims:
        raise ValueError(f"{name}(s={s}, axes={axes}): name at least one axis, each once, and one length per axis.")
    return lengths, dims


def _floats(given: Any, name: str, norm: str) -> Array:
    x = as_array(name, given)
    if norm not in NORMS:
        raise ValueError(f"{name}: norm must be one of {', '.join(NORMS)}, but it is {norm!r}.")
    if name in OF_REAL and x.dtype.is_complex:
        raise TypeError(f"{name} takes real numbers, not {x.dtype}. Pass xp.real(x), or use xp.fft.fft or xp.fft.ifft.")
    return as_floats(name, x)


def along(x: Array, name: str, axis: int, n: int | None, norm: str, avoid: Sequence[int] = ()) -> Array:
    """Apply `torch.fft.<name>` along one axis."""
    x = _apart(x, axis, avoid, name)
    if x.sharding.dim == axis:
        return _vector(x, name, axis, n, norm)
    function = partial(getattr(torch.fft, name), n=n, dim=axis, norm=norm)
    parts = tuple(_checked(function, part, axis) for part in x.parts)
    length, dtype = _result(name, x.shape[axis], n, x.dtype)
    return Array(parts, x.sharding, resized(x.shape, axis, length), dtype, x.space)


def _apart(x: Array, axis: int, avoid: Sequence[int], name: str) -> Array:
    """Shard `x` along another dim than `axis`, so that `axis` can be transformed."""
    held = x.sharding
    if held.dim != axis:
        return x
    dim = free_dim(x.shape, {axis, *avoid})
    if dim is None or x.shape[dim] < len(held.places):
        dim = free_dim(x.shape, {axis})
    return x if dim is None else reshard(x, evenly(x.shape[dim], held.places, dim), name)


def _checked(function: Transform, part: Tensor, axis: int) -> Tensor:
    """Transform a part, which may be empty. Raises ValueError if torch refuses, as for an axis without entries."""
    try:
        if part.numel() or not part.shape[axis]:
            return function(part).resolve_conj()
        full = [max(1, length) for length in part.shape]  # FFT libraries reject 0 rows
        row = function(part.new_zeros(full))
        return row[tuple(slice(0 if length == 0 else None) for length in part.shape)].resolve_conj()
    except RuntimeError as error:
        raise ValueError(f"the FFT of shape {tuple(part.shape)} along axis {axis} failed: {error}") from error


def _vector(x: Array, name: str, axis: int, n: int | None, norm: str) -> Array:
    """Apply `torch.fft.<name>` to a sharded array in which `axis` is the only dim with more than one entry."""
    held, length = x.sharding, x.shape[axis]
    if name in ("fft", "ifft") and n in (None, length) and length >= LONG and _divisor(length, len(held.places)):
        return _in_parts(x, name, axis, norm)
    lies = sharding((fullest(held),))
    if length >= LONG:  # cannot be split: no divisor fits, `n` changes the length, or the numbers are real
        tell(x, name, lies)
    whole = reshard(x, lies, name)
    parts = tuple(
        _checked(partial(getattr(torch.fft, name), n=n, dim=axis, norm=norm), part, axis) for part in whole.parts
    )
    length, dtype = _result(name, length, n, x.dtype)
    found = Array(parts, whole.sharding, resized(x.shape, axis, length), dtype, x.space)
    return reshard(found, evenly(length, held.places, axis), name)


def _result(name: str, length: int, n: int | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the length and dtype of the transform of `length` entries."""
    meta = torch.empty(length, dtype=dtype, device="meta")
    found = getattr(torch.fft, name)(meta, n=n)
    return len(found), found.dtype


def _divisor(length: int, places: int) -> int | None:
    """Return the number of rows into which to divide a vector: the largest divisor of `length` up to its square root.
    Return None if it is below `places`, the number of devices: some device would get no row."""
    for one in range(math.isqrt(length), places - 1, -1):
        if length % one == 0:
            return one
    return None


def _in_parts(x: Array, name: str, axis: int, norm: str) -> Array:
    """Apply `fft` or `ifft` to a long sharded vector, with the work divided over all devices."""
    held, space, length = x.sharding, x.space, x.shape[axis]
    rows = _divisor(length, len(held.places))
    assert rows is not None
    columns = length // rows
    places, dtype = held.places, x.dtype if x.dtype.is_complex else complex_of(x.dtype)
    function = getattr(torch.fft, name)
    flat = Array(tuple(part.reshape(-1) for part in x.parts), held.along(0), (length,), x.dtype, space)
    by_rows, by_columns = evenly(rows, places), evenly(columns, places, 1)
    flat = reshard(flat, sharding(places, 0, tuple(size * columns for size in by_rows.sizes)), name)
    parts = tuple(part.reshape(-1, columns).to(dtype) for part in flat.parts)
    grid = reshard(Array(parts, by_rows, (rows, columns), dtype, space), by_columns, name)
    turned = []
    for k, part in numbered(grid):
        found = function(part, dim=0, norm=norm)
        turned.append(found.mul_(_twiddles(rows, by_columns.offsets[k], part, length, -1 if name == "fft" else 1)))
    grid = reshard(Array(tuple(turned), by_columns, (rows, columns), dtype, space), by_rows, name)
    parts = tuple(function(part, dim=1, norm=norm) for part in grid.parts)
    grid = reshard(Array(parts, by_rows, (rows, columns), dtype, space), by_columns, name)
    lies = sharding(places, axis, tuple(size * rows for size in by_columns.sizes))
    shapes = [lies.part_shape(x.shape, k) for k, _ in space.local(lies)]
    final = tuple(part.mT.reshape(shape) for part, shape in zip(grid.parts, shapes, strict=True))
    return Array(final, lies, x.shape, dtype, space)


def _twiddles(rows: int, begin: int, part: Tensor, length: int, sign: int) -> Tensor:
    """Return the twiddle factors exp(2 pi i * sign * row * column / length) for the columns in `part`."""
    row = torch.arange(rows, device=part.device)[:, None]
    column = torch.arange(begin, begin + part.shape[1], device=part.device)
    angle = (row * column % length).to(torch.float64) * (sign * 2 * math.pi / length)
    return torch.polar(torch.ones_like(angle), angle).to(part.dtype)


def fftfreq(
    space: Space, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None, sharding: Placement = None
) -> Array:
    """Return the frequencies that belong to the entries of `fft`."""
    return _frequencies(space, n, d, dtype, (device, sharding), n)


def rfftfreq(
    space: Space, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None, sharding: Placement = None
) -> Array:
    """Return the frequencies that belong to the entries of `rfft`."""
    return _frequencies(space, n, d, dtype, (device, sharding), n // 2 + 1)


def _frequencies(space: Space, n: int, d: float, dtype: Any, placement: tuple[Any, Placement], count: int) -> Array:
    """Return the first `count` of the `n` sample frequencies of a transform."""
    kind = space.default_float if dtype is None else as_dtype(dtype)

    def make(_: Any, within: tuple[slice, ...], device: torch.device) -> Tensor:
        at = torch.arange(within[0].start, within[0].stop, dtype=torch.float64, device=device)
        if count == n:
            at = torch.where(at < (n + 1) // 2, at, at - n)
        return (at / (n * d)).to(kind)

    return made(space, count, kind, placement, make)


def fftshift(x: Array, /, axes: int | Sequence[int] | None = None) -> Array:
    """Move the entry of frequency 0 to the middle of these axes. None means all axes."""
    return _shifted(as_array("fftshift", x), axes, 1)


def ifftshift(x: Array, /, axes: int | Sequence[int] | None = None) -> Array:
    """Compute the inverse of `fftshift`."""
    return _shifted(as_array("ifftshift", x), axes, -1)


def _shifted(x: Array, axes: int | Sequence[int] | None, sign: int) -> Array:
    dims = list(range(x.ndim)) if axes is None else [axes] if isinstance(axes, int) else list(axes)
    return roll(x, tuple(sign * (x.shape[dim] // 2) for dim in dims), axis=tuple(dims)) if dims else x


FUNCTIONS = by_name(*map(_one, ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")))


def _of_two(name: str, rule: Callable[..., Array]) -> Callable[..., Array]:
    def transform(
        x: Array, /, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str = "backward"
    ) -> Array:
        return rule(x, s=s, axes=axes, norm=norm)

    return named(transform, name, f"Apply `{rule.__name__}` along two axes, by default the last.")


FUNCTIONS |= by_name(fftn, ifftn, rfftn, irfftn, fftshift, ifftshift)
FUNCTIONS |= {name: _of_two(name, FUNCTIONS[f"{name[:-1]}n"]) for name in ("fft2", "ifft2", "rfft2", "irfft2")}
MAKERS = {"fftfreq": fftfreq, "rfftfreq": rfftfreq}
"""The functions whose first parameter is the `Space`."""
