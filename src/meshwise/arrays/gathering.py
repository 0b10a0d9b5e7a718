"""Gather an array for operations without a rule, and warn.

The whole array goes to one place; the warning comes once per operation.

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
"""The functions that gather what they are given on one place."""
MODES = ("warn", "error", "allow")
_mode: ContextVar[str] = ContextVar("guard", default="warn")
_told: set[str] = set()


class GatherWarning(UserWarning):
    """An operation gathers a whole array on one place, since it has no rule for parts."""


@contextmanager
def guard(mode: str) -> Iterator[None]:
    """What happens in the block where an operation would gather a whole array on one device without being asked to, or
    where a write to a view has to send all of it back to other devices.

    mode: `error` raises UsageError; `warn`, as outside of all blocks, tells it once an operation, of writes once a
    line; `allow` is silent. It holds in the thread that opened it: one that is started in the block opens its own.
    """
    check_known("mode", mode, MODES)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def tell(x: Array, operation: str, wanted: Sharding) -> None:
    """Warn of, or refuse, the move of `x` to `wanted`, which nobody asked for; nothing where no byte moves."""
    size = elements_moved(x.shape, x.sharding, wanted) * x.dtype.itemsize
    if not size or _mode.get() == "allow":
        return
    text = f"{operation} has no rule for an array that lies on several devices: it gathers {bytes_text(size)}"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Gather it yourself: x.to_device(device).")
    if operation not in _told:
        _told.add(operation)
        warnings.warn(f"{text} on one. mw.guard('error') finds where.", GatherWarning, stacklevel=4)


def tell_return(x: Array, operation: str) -> None:
    """Warn of, or refuse, a write to a view whose elements lie elsewhere than those of its array, and go back there."""
    if _mode.get() == "allow" or EXPLAINED:
        return
    at, size = user_place(), bytes_text(math.prod(x.shape) * x.dtype.itemsize)
    text = f"{at}: a write to a view by {operation} that lies on other devices than its array: all goes back, {size}"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Write to the array itself.")
    if at not in _told:
        _told.add(at)
        warnings.warn(f"{text}. Write to the array itself.", GatherWarning, stacklevel=2)


def gathered(x: Array, operation: str, place: int | None = None) -> Array:
    """All of `x` on one place, the first where it lies unless another is named, told or refused as `guard` says.

    Over ranks on each of them: every rank then calculates the same, and keeps its part.
    """
    if x.space.over_ranks:
        tell(x, operation, sharding(x.space.places))
        return replicate(x, operation=operation)
    target = x.sharding.places[0] if place is None else place
    tell(x, operation, sharding((target,)))
    return to_single(x, target, operation)


def placed_as(whole: Tensor, place: int, space: Space, lies: Sharding, operation: str) -> Array:
    """A tensor on one place, over ranks on each, as an array: divided along the dim along which another is that lies
    so, if there is such a dim."""
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
