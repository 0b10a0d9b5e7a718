"""Count elements in bins on each device, and add the counts."""

from __future__ import annotations

from typing import Any

import torch

from meshwise.arrays.array import Array
from meshwise.arrays.moves import combined, stacked
from meshwise.arrays.reductions import as_array, together
from meshwise.arrays.rules import by_name


def histogram(
    x: Any, /, bins: Any = 10, range: tuple[float, float] | None = None, weights: Any = None, density: bool = False
) -> tuple[Array, Array]:
    """Return the number of elements in each bin, and the edges of the bins."""
    x = as_array("histogram", x).reshape(-1)
    xp = x.__array_namespace__()
    if isinstance(bins, int):
        low, high = range if range is not None else (float(x.min()), float(x.max())) if x.size else (0.0, 1.0)
        edges = xp.linspace(*((low, high) if low < high else (low - 0.5, high + 0.5)), bins + 1)
    else:
        edges = xp.asarray(bins)
    known = edges.reshard(xp.replicated())
    w = None if weights is None else xp.asarray(weights).reshape(-1).reshard(x.sharding)
    found: Array = counted(x, known, w)
    if density:
        found = found / found.sum() / (edges[1:] - edges[:-1])
    return found, edges


def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Array:
    """Count how often each integer from 0 on occurs in `x`, or sum the weights of each integer."""
    x = as_array("bincount", x)
    xp = x.__array_namespace__()
    if x.size and int(x.min()) < 0:
        raise ValueError(f"bincount: x must not contain negative numbers, but contains {int(x.min())}. Pass x[x >= 0].")
    count = max(minlength, int(x.max()) + 1 if x.size else 0)
    edges = xp.arange(count + 1, sharding=xp.replicated())
    w = None if weights is None else xp.asarray(weights).reshard(x.sharding)
    return counted(x, edges, w)


def counted(x: Array, edges: Array, weights: Array | None) -> Array:
    """Count the elements of `x` in each bin, or sum their weights: first on each device, then over the devices."""
    from_each, dtype = [], torch.int64 if weights is None else weights.dtype
    bins = edges.shape[0] - 1
    for at, part in enumerate(x.parts):
        own = edges.parts[0 if x.space.over_ranks else x.space.local(x.sharding)[at][1]]
        bin = torch.searchsorted(own, part.to(own.dtype), right=True) - 1
        bin = torch.where(part == own[-1], bins - 1, bin)
        inside = (bin >= 0) & (bin < bins)
        weight = torch.ones_like(bin) if weights is None else weights.parts[at]
        total = torch.zeros(bins + 1, dtype=dtype, device=part.device)
        total.index_add_(0, torch.where(inside, bin, bins), weight)
        from_each.append(total[:-1])
    if x.sharding.dim is None:
        return Array(tuple(from_each), x.sharding, (bins,), dtype, x.space)
    partials = stacked(x, x.sharding.places, from_each, (bins,), dtype)
    return combined(partials, lambda rows: rows.sum(0, dtype=dtype), together(x, (bins,)), dtype, "histogram")


FUNCTIONS = by_name(histogram, bincount)
