"""Run a function of tensors on each part of an array.

Use `map_shards` if the namespace lacks a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.align import common_space
from meshwise.arrays.array import Array
from meshwise.arrays.joining import halo as with_halo
from meshwise.arrays.moves import reshard
from meshwise.arrays.sharding import Sharding, resized, sharding
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives
from meshwise.workers.verb_log import log_verb


def map_shards(
    function: Callable[..., Any], x: Array, /, *others: Any, halo: int | tuple[int, int] = 0, wrap: bool = False
) -> Any:
    """Call a function of torch tensors on each part of `x`, and join the results into an array.

    If `function` returns a tuple of tensors, the result is a tuple of arrays. `function` must keep the length of the
    divided dim. Empty parts are skipped.

    others: more arguments of `function`. An array is divided like `x`, and each call gets the part that matches the
        part of `x`. An array that lacks the divided dim is passed whole, and so is any other value.
    halo: how many entries of the neighboring parts are added to a part on each side, or a pair (before, after). If the
        result of `function` still has these entries, they are cut off.
    wrap: True also extends the first and last parts, with entries from the other end of the array.
    """
    if not isinstance(x, Array):
        raise UsageError(f"map_shards: the second argument must be an array of meshwise, not {type(x).__name__}.")
    before, after = (halo, halo) if isinstance(halo, int) else halo
    dim, placed = x.sharding.dim, x.sharding
    common_space("map_shards", [x, *(other for other in others if isinstance(other, Array))])
    given = with_halo(x, before, after, wrap=wrap) if dim is not None and (before or after) else x.parts
    rest = [_beside(x, other) for other in others]
    results: list[list[Tensor] | None] = []
    several = False
    for at, (own, part) in enumerate(zip(x.parts, given, strict=True)):
        if not own.numel() and dim is not None:
            results.append(None)
            continue
        inputs = [part, *(other(at) for other in rest)]
        made = function(*inputs)
        several = isinstance(made, tuple)
        lead = 0 if dim is None else _ahead(x, at, before, wrap)
        found = [_cut(one, dim, own, part, lead) for one in (made if several else (made,))]
        # Copy a tensor that the function returns unchanged, because it belongs to an argument.
        results.append([one.clone() if any(one is each for each in inputs) else one for one in found])
    arrays = _joined(x, results, placed)
    return tuple(arrays) if several or len(arrays) > 1 else arrays[0]


def _beside(x: Array, other: Any) -> Callable[[int], Any]:
    """Return a function from the position of a part in `x.parts` to the argument for this part."""
    if not isinstance(other, Array):
        return lambda at: other
    wanted = sharding(x.sharding.places)
    if x.sharding.dim is not None:
        dim = x.sharding.dim - x.ndim + other.ndim
        if dim >= 0 and other.shape[dim] == x.shape[x.sharding.dim]:
            wanted = x.sharding.along(dim)
    return reshard(other, wanted, "map_shards").parts.__getitem__


def _ahead(x: Array, at: int, before: int, wrap: bool) -> int:
    """Return how many halo entries precede the local part number `at`."""
    part, _ = x.space.local(x.sharding)[at]
    return before if wrap else min(before, x.sharding.offsets[part])


def _cut(made: Any, dim: int | None, own: Tensor, given: Tensor, lead: int) -> Tensor:
    """Remove the halo from one result of the user's function."""
    if not isinstance(made, Tensor):
        raise UsageError(
            f"map_shards: the function returned {type(made).__name__}. Return a tensor, or a tuple of tensors."
        )
    if dim is None:
        return made
    length = made.shape[dim] if dim < made.dim() else -1
    if length == own.shape[dim]:
        return made
    if length == given.shape[dim]:
        return made.narrow(dim, lead, own.shape[dim])
    raise UsageError(
        f"map_shards: the function returned shape {tuple(made.shape)} for a part of shape {tuple(own.shape)}, but it "
        f"must keep the length of dim {dim}, which is divided. To reduce over this dim, call for example xp.sum."
    )


def _joined(x: Array, results: Sequence[list[Tensor] | None], placed: Sharding) -> list[Array]:
    """Join the results of all parts into arrays.
    Skipped parts get the shape and dtype of the others."""
    found = next((each for each in results if each is not None), None)
    forms = None if found is None else [(tuple(one.shape), one.dtype) for one in found]
    if x.space.over_ranks:
        log_verb("map_shards")
        known = [form for form in collectives.gather_from_all(forms) if form is not None]
        forms = known[0] if known else None
    if forms is None:
        forms = [(x.shape, x.dtype)]
    arrays = []
    for number, (shape, dtype) in enumerate(forms):
        parts = []
        for (part, place), made in zip(x.space.local(placed), results, strict=True):
            own = placed.part_shape(shape, part)
            one = torch.empty(own, dtype=dtype, device=x.space.devices[place]) if made is None else made[number]
            if tuple(one.shape) != own or one.dtype is not dtype:
                raise UsageError(
                    f"map_shards: for two shards, the function returned {own} {dtype} and {tuple(one.shape)} "
                    f"{one.dtype}. Return the same dtype, and shapes that differ only in the divided dim."
                )
            parts.append(one)
        whole = shape if placed.dim is None else resized(shape, placed.dim, x.shape[placed.dim])
        arrays.append(Array(tuple(parts), placed, whole, dtype, x.space))
    return arrays
