"""Gather an array on one device for operations without a sharded implementation.

A warning is issued once per operation.

`with mw.guard("error")` raises an error instead. `WITHOUT_RULE` lists these operations, for the docs.
"""

from __future__ import annotations

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
"""The names of functions that gather their arguments on one device, as they have no sharded implementation."""
MODES = ("warn", "error", "allow")
_mode: ContextVar[str] = ContextVar("guard", default="warn")
_told: set[str] = set()


class GatherWarning(UserWarning):
    """Warns that an operation without a sharded implementation gathers a whole array on one device."""


@contextmanager
def guard(mode: str) -> Iterator[None]:
    """Choose what happens in the `with` block if an operation would gather a whole array on one device.

    The choice also holds for writes to a view on other devices than its original array, which send the whole view back.
    It holds in the current thread only.
    mode: `error` raises UsageError. `warn`, the default outside of all blocks, warns once per operation, and for writes
        once per source line. `allow` does nothing.
    """
    check_known("mode", mode, MODES)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def tell(x: Array, operation: str, wanted: Sharding) -> None:
    """Warn that an operation gathers `x`, or raise UsageError, depending on the mode of `guard`."""
    size = elements_moved(x.shape, x.sharding, wanted) * x.dtype.itemsize
    if not size or _mode.get() == "allow":
        return
    text = f"{operation} cannot run on the shards of this array, so it gathers {bytes_text(size)}"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Gather the array yourself: x.to_device(device).")
    if operation not in _told:
        _told.add(operation)
        warnings.warn(f"{text} on one device. mw.guard('error') raises an error instead.", GatherWarning, stacklevel=4)


def tell_return(x: Array, operation: str) -> None:
    """Warn before a write to the view `x`, because all of `x` is then sent back to the devices of the original
    array."""
    if _mode.get() == "allow" or EXPLAINED:
        return
    at, size = user_place(), bytes_text(x.nbytes)
    text = f"{at}: {operation} writes to a view that is not on its array's devices, so all {size} of the view move back"
    if _mode.get() == "error":
        raise UsageError(f"{text}, which mw.guard('error') forbids. Write to the original array.")
    if at not in _told:
        _told.add(at)
        warnings.warn(f"{text}. Write to the original array.", GatherWarning, stacklevel=2)


def gathered(x: Array, operation: str, place: int | None = None) -> Array:
    """Gather all of `x` on one device, or on every rank of a run."""
    if x.space.over_ranks:
        tell(x, operation, sharding(x.space.places))
        return replicate(x, operation=operation)
    target = x.sharding.places[0] if place is None else place
    tell(x, operation, sharding((target,)))
    return to_single(x, target, operation)


def placed_as(whole: Tensor, place: int, space: Space, lies: Sharding, operation: str) -> Array:
    """Make an array from a tensor with all values. It is sharded as `lies`, if the shape allows it."""
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
