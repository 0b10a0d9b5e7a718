"""Add NumPy's functions of samples and signals that the standard lacks.

Examples are `interp`, `convolve`, `gradient` and `cov`.

They are composed of the array API standard's functions, and move the same data. `interp` sends its table to each device
that has values. To each device with a part of the longer array, `convolve` sends the shorter array and the entries that
follow the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.array import Array, like
from meshwise.arrays.dtypes import COMPLEXES, promoted
from meshwise.arrays.joining import diff, halo
from meshwise.arrays.moves import replicate
from meshwise.arrays.products import matmul
from meshwise.arrays.reductions import as_array, as_arrays, total
from meshwise.arrays.reshaping import along_dim
from meshwise.arrays.rules import by_name
from meshwise.arrays.sharding import sharding
from meshwise.arrays.statistics import as_floats
from meshwise.arrays.views import axis_of
from meshwise.spec.errors import UsageError


def _entries(x: Array, axis: int, *bounds: int | None) -> Array:
    return x[(slice(None),) * axis + (slice(*bounds),)]


def digitize(x: Any, bins: Any, /, right: bool = False) -> Any:
    """Return, for each element, the index of the bin in which it lies."""
    x = as_array("digitize", x)
    xp, borders = x.__array_namespace__(), np.asarray(bins)
    steps = np.diff(borders)
    if borders.ndim != 1 or not (bool((steps >= 0).all()) or bool((steps <= 0).all())):
        raise ValueError("digitize: bins must be a vector in ascending or descending order. Write xp.sort(bins).")
    side = "left" if right else "right"
    if len(borders) and borders[0] > borders[-1]:
        return len(borders) - xp.searchsorted(xp.asarray(borders[::-1].copy()), x, side=side)
    return xp.searchsorted(xp.asarray(borders), x, side=side)


def interp(x: Any, xs: Any, ys: Any, /, left: Any = None, right: Any = None, period: None = None) -> Array:
    """Interpolate linearly at `x` between points with the ascending coordinates `xs` and the values `ys`."""
    if period is not None:
        raise UsageError(
            "interp(period=...) is not supported. Write xp.interp(x % period, xs, ys) with points of one period."
        )
    x = as_floats("interp", x)
    xp = x.__array_namespace__()
    points, values = (
        replicate(as_floats("interp", xp.asarray(each)), x.sharding.places, "interp") for each in (xs, ys)
    )
    if points.shape != values.shape or points.ndim != 1 or not points.shape[0]:
        raise ValueError(
            f"interp: xs and ys must be vectors of one length above 0, not shapes {points.shape} and {values.shape}."
        )
    dtype = promoted(promoted(x.dtype, points.dtype), values.dtype)

    def found(part: Tensor, at: Tensor, of: Tensor) -> Tensor:
        part, at, of = part.to(at.dtype), at.contiguous(), of.to(dtype)
        begin = (torch.searchsorted(at, part.contiguous(), right=True) - 1).clamp(0, max(len(at) - 2, 0))
        end = begin + (len(at) > 1)
        slope = (of[end] - of[begin]) / torch.where(at[end] == at[begin], 1, at[end] - at[begin])
        line = torch.where(part == at[end], of[end], of[begin] + (part - at[begin]) * slope)
        line = torch.where(part > at[-1], of[-1] if right is None else right, line)
        line = torch.where(part < at[0], of[0] if left is None else left, line)
        return torch.where(part.isnan(), part, line).to(dtype)

    return like(x, [found(*each) for each in zip(x.parts, points.parts, values.parts, strict=True)], dtype)


def convolve(a: Any, v: Any, /, mode: str = "full") -> Array:
    """Convolve two vectors."""
    a, v = as_arrays("convolve", a, v)
    xp = a.__array_namespace__()
    if a.ndim != 1 or v.ndim != 1 or not a.shape[0] or not v.shape[0]:
        raise ValueError(f"convolve takes two vectors with at least one element, not shapes {a.shape} and {v.shape}.")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"convolve: mode must be full, same or valid, but it is {mode!r}.")
    a, v = (v, a) if v.shape[0] > a.shape[0] else (a, v)
    count, dtype = v.shape[0], promoted(a.dtype, v.dtype)
    ahead = {"full": count - 1, "same": count // 2, "valid": 0}[mode]
    behind = {"full": count - 1, "same": (count - 1) // 2, "valid": 0}[mode]
    if a.sharding.dim is None and len(a.space.places) > 1 and not a.sharding.single:
        a = a.reshard(xp.shard(0))
    a = xp.pad(a.astype(dtype), (ahead, behind))
    length = a.shape[0] - count + 1
    weights = replicate(v.astype(dtype), a.sharding.places, "convolve")
    return _slid(a, weights, length, count)


def correlate(a: Any, v: Any, /, mode: str = "valid") -> Any:
    """Correlate the first vector with the complex conjugate of the second, at each offset. mode: as in `convolve`."""
    a, v = as_arrays("correlate", a, v)
    xp = a.__array_namespace__()
    if a.shape < v.shape:  # swap the operands, as NumPy does
        return xp.flip(xp.conj(correlate(v, a, mode)))
    return convolve(a, xp.flip(xp.conj(v)), mode)


def _slid(a: Array, weights: Array, length: int, count: int) -> Array:
    """Return `length` weighted sums of `count` successive entries of `a`."""
    held = a.sharding
    spans = held.spans(0, a.shape[0])
    lies = sharding(held.places, 0, tuple(max(0, min(begin + size, length) - begin) for begin, size in spans))
    parts = []
    for part, weight, (k, _) in zip(halo(a, 0, count - 1), weights.parts, a.space.local(a.sharding), strict=True):
        size = lies.sizes[k]
        total = torch.zeros(size, dtype=a.dtype, device=part.device)
        for at in range(count if size else 0):
            total += part[at : at + size] * weight[count - 1 - at]
        parts.append(total)
    return Array(tuple(parts), lies, (length,), a.dtype, a.space)


def gradient(x: Any, /, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Return the slope of `x` along each axis."""
    x = as_floats("gradient", x)
    if edge_order != 1:
        raise UsageError(f"gradient(edge_order={edge_order}): only edge_order=1 is supported. Leave edge_order out.")
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    dims = [axis_of(each, x.ndim, "gradient") for each in axes]
    steps = spacing * len(dims) if len(spacing) == 1 else spacing or (1.0,) * len(dims)
    if len(steps) != len(dims):
        raise TypeError(f"gradient along {len(dims)} axes takes one spacing, or one for each axis, not {len(spacing)}.")
    found = [_slope(x, dim, step) for dim, step in zip(dims, steps, strict=True)]
    return found[0] if len(found) == 1 else found


def _slope(x: Array, dim: int, step: Any) -> Array:
    if x.shape[dim] < 2:
        raise ValueError(f"gradient along axis {dim} needs 2 entries or more, but the shape is {x.shape}.")
    xp = x.__array_namespace__()
    change = diff(x, axis=dim)
    if not np.shape(step):
        slopes = change / step
        middle = (_entries(x, dim, 2, None) - _entries(x, dim, 0, -2)) / (2.0 * step)
    else:
        at = xp.asarray(step)
        if at.shape != (x.shape[dim],):
            raise ValueError(
                f"gradient: coordinates must be a vector of length {x.shape[dim]}, but have shape {at.shape}."
            )
        width = along_dim(diff(at), dim, x.ndim)
        slopes = change / width
        before, after = _entries(width, dim, 0, -1), _entries(width, dim, 1, None)
        ahead, behind = _entries(slopes, dim, 0, -1), _entries(slopes, dim, 1, None)
        middle = (after * ahead + before * behind) / (before + after)
    joined: Array = xp.concat([_entries(slopes, dim, 0, 1), middle, _entries(slopes, dim, -1, None)], axis=dim)
    return joined


def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Array:
    """Integrate `y` along an axis by the trapezoidal rule."""
    y = as_array("trapezoid", y)
    dim = axis_of(axis, y.ndim, "trapezoid")
    width: Any = dx
    if x is not None:
        x = y.__array_namespace__().asarray(x)
        width = diff(x, axis=-1 if x.ndim == 1 else dim)
        if x.ndim == 1:
            width = along_dim(width, dim, y.ndim)
    return total((_entries(y, dim, 1, None) + _entries(y, dim, 0, -1)) * width / 2.0, axis=dim)


def cov(m: Any, y: Any = None, /, rowvar: bool = True, bias: bool = False, ddof: int | None = None) -> Any:
    """Return the covariance matrix of variables."""
    m = as_floats("cov", m)
    xp = m.__array_namespace__()
    if m.ndim > 2:
        raise ValueError(f"cov takes a vector or a matrix, but this array has shape {m.shape}.")

    def rows(x: Array) -> Array:
        return xp.reshape(x, (1, -1)) if x.ndim < 2 else x if rowvar else x.T

    x = rows(m)
    if y is not None:
        x = xp.concat([x, rows(as_floats("cov", xp.asarray(y)))], axis=0)
    over = x.shape[1] - (int(not bias) if ddof is None else ddof)
    apart = x - x.mean(1, keepdims=True)
    found = matmul(apart, xp.conj(apart.T)) / (over if over > 0 else float("nan"))
    return found.reshape(()) if found.shape == (1, 1) else found


def corrcoef(x: Any, y: Any = None, /, rowvar: bool = True) -> Any:
    """Return the correlation matrix of variables."""
    found = cov(x, y, rowvar)
    xp = found.__array_namespace__()
    if not found.shape:
        return found / found
    spread = xp.sqrt(xp.real(xp.linalg.diagonal(found)))
    found = found / spread[:, None] / spread[None, :]
    return found if found.dtype in COMPLEXES else xp.clip(found, -1.0, 1.0)


def select(conditions: Sequence[Any], choices: Sequence[Any], /, default: Any = 0) -> Any:
    """Choose each element from one of several arrays, by the first condition that is true for this element."""
    if not conditions or len(conditions) != len(choices):
        raise ValueError(f"select needs one choice per condition, but got {len(choices)} for {len(conditions)}.")
    as_array("select", conditions[0])
    found = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        found = condition.__array_namespace__().where(condition, choice, found)
    return found


def polyval(coefficients: Any, x: Any, /) -> Any:
    """Evaluate a polynomial at `x`. The coefficient of the highest power comes first. Waits for the coefficients."""
    x = as_array("polyval", x)
    found = x * 0
    for each in np.asarray(coefficients):
        found = found * x + each
    return found


FUNCTIONS = by_name(digitize, interp, convolve, correlate, gradient, trapezoid, cov, corrcoef, select, polyval)
