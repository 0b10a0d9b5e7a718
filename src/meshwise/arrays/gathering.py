"""Gather an array for operations without a rule, and warn.

The whole array goes to one device; the warning comes once per operation.

`with mw.guard("error")` forbids it. `WITHOUT_RULE` lists these operations, for the docs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.moves import EXPLAINED, elements_moved, replicate, reshard, to_single
from meshwise.arrays.sharding import Sharding, evenly, sharding
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.units import bytes_text
from meshwise.spec.user_code import user_place

WITHOUT_RULE: set[str] = set()
"""The names of functions that gather their arguments on one device."""
MODES = ("warn", "error", "allow")
_mode: ContextVar[str] = ContextVar("guard", default="warn")
_told: set[str] = set()


class GatherWarning(UserWarning):
    """Warns that an operation without a rule for parts gathers a whole array on one device."""


@contextmanager
def guard(mode: str) -> Iterator[None]:
    """Choose what happens in the block when an operation without a rule would gather a whole array on one device, or
    when a write to a view would send all of it back to other devices.

    mode: `error` raises UsageError; `warn`, the default outside of all blocks, warns once per operation, for writes
    once per source line; `allow` is silent. The mode holds in the current thread only, not in threads that it starts.
    """
    check_known("mode", mode, MODES)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def tell(x: Array, operation: str, wanted: Sharding) -> None:
    """Warn or raise UsageError, as `guard` says, before an operation without a rule moves `x` to `wanted`."""
    size = elements_moved(x.shape, x.sharding, wanted) * x.dtype.itemsize
    if not size or _mode.get() == "allow":
        return
    text = f"{operation} has no rule for an array that lies on several devices: it gathers {bytes_text(size)}"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Gather it yourself: x.to_device(device).")
    if operation not in _told:
        _told.add(operation)
        warnings.warn(f"{text} on one device. mw.guard('error') stops there.", GatherWarning, stacklevel=4)


def tell_return(x: Array, operation: str) -> None:
    """Warn or raise UsageError, as `guard` says, of a write to a view that goes back to its array on other devices."""
    if _mode.get() == "allow" or EXPLAINED:
        return
    at, size = user_place(), bytes_text(math.prod(x.shape) * x.dtype.itemsize)
    text = f"{at}: {operation} writes to a view on other devices than its array, so all {size} of it move back"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Write to the array itself.")
    if at not in _told:
        _told.add(at)
        warnings.warn(f"{text}. Write to the array itself.", GatherWarning, stacklevel=2)


def gathered(x: Array, operation: str, place: int | None = None) -> Array:
    """Gather all of `x` on one device, by default the first where it lies; warn or raise as `guard` says.

    Over ranks, every rank gets all of `x`: all ranks then calculate the same, and each keeps its part.
    """
    if x.space.over_ranks:
        tell(x, operation, sharding(x.space.places))
        return replicate(x, operation=operation)
    target = x.sharding.places[0] if place is None else place
    tell(x, operation, sharding((target,)))
    return to_single(x, target, operation)


def placed_as(whole: Tensor, place: int, space: Space, lies: Sharding, operation: str) -> Array:
    """Make an array of a tensor that lies whole on one device (over ranks: on each), divided along the same dim as
    `lies`, if the tensor has that dim."""
    shape = tuple(whole.shape)
    if lies.dim is None:
        wanted = lies
    elif lies.dim < len(shape):
        same = sum(lies.sizes) == shape[lies.dim]
        wanted = lies if same else evenly(shape[lies.dim], lies.places, lies.dim)
    else:
        wanted = sharding(lies.places[:1])
    held = sharding(space.places if space.over_ranks else (place,))
    return reshard(Array((whole,), held, shape, whole.dtype, space), wanted, operation, own=wanted != held)
