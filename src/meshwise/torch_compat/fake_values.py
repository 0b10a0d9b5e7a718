"""Track values of small fake tensors during a rehearsal.

These are the values that a program computes from numbers and from the integers in its batch.

Models read such values: rates along the depth (`linspace(...).item()`), or whether a mask has zeros. A value is a real
CPU tensor that belongs to the fake tensor. A result that is computed from known values has a value too. Views share
real memory, so a write in place changes the values of all of them. If a write cannot be carried out, all of them lose
their values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwise.torch_compat.dispatch import StorageMap, operator_name, without_interception, written_arguments
from meshwise.torch_compat.tree import map_tensors, tensors_in

MOST = 1 << 16
"""The real values of a fake tensor are kept only if it has at most this many elements."""
READS = ("_local_scalar_dense", "item")
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results have no values until they are written."""
OVERWRITES = ("copy_", "fill_", "zero_", "random_")
NOT_FINITE = ("isnan", "isinf")
"""Operators by which programs detect divergence. Inside `with guessing(...)`, they return False for unknown values."""
DRAWN = ("randperm", "randint", "random_")
"""Operators that draw random integers. Their values are kept, because programs use them as indices, e.g. of samples."""
_VALUE = "_value_in_rehearsal"
_lost = StorageMap()  # marks values that a write has made unknown
_of_batch = StorageMap()  # marks values that depend on the batch


class _Value:
    """Holds the values of a fake tensor as a real tensor. A deep copy of the fake tensor copies the real one too."""

    def __init__(self, real: Tensor) -> None:
        self.real = real

    def __deepcopy__(self, memo: dict[int, Any]) -> _Value:
        with without_interception(), torch.no_grad():
            copy = self.real.clone()
            _of_batch.set(copy, _of_batch.get(self.real))
            return _Value(copy)


def _beside(fake: Tensor) -> Tensor | None:
    held: _Value | None = getattr(fake, _VALUE, None)
    return None if held is None else held.real


def give_value(fake: Tensor, real: Tensor) -> None:
    """Record `real` as the values of the fake tensor, if it has at most MOST elements."""
    if real.numel() <= MOST and type(real) is Tensor:
        setattr(fake, _VALUE, _Value(real))


def value_of(fake: Tensor) -> Tensor | None:
    """Return the values of a fake tensor, or None if they are unknown.
    A real tensor is returned unchanged."""
    found = fake if type(fake) is Tensor else _beside(fake)
    return None if found is None or _lost.get(found) else found


def may_differ(fake: Tensor) -> bool:
    """Return whether a tensor may have other values with another batch. False for values that are computed from numbers
    alone."""
    value = value_of(fake)
    return value is None or bool(_of_batch.get(value))


def concerns_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[Any]) -> bool:
    """Return whether `with_values` should run an operator, to compute the values of fake tensors."""
    if not fakes:
        return _is_small(func, args, kwargs, fakes)
    if not any(_VALUE in fake.__dict__ for fake in fakes):  # the common case: no argument has known values
        return operator_name(func) in NOT_FINITE
    if (operator_name(func) in OVERWRITES and _beside(fakes[0]) is not None) or operator_name(func) in NOT_FINITE:
        return True
    return all(value_of(fake) is not None for fake in fakes)


def fake_batch(batch: Any, device: str | None = None) -> Any:
    """Return a copy of a real batch with fake tensors. A tensor of integers or bools keeps its values, if it has at
    most MOST elements. A tensor of floats does not."""

    def faked(tensor: Tensor) -> Tensor:
        there = torch.empty_like(tensor, device=device)
        if not tensor.is_floating_point():
            give_value(there, tensor)
            _of_batch.set(tensor, True)
        return there

    return map_tensors(faked, batch)


@contextmanager
def fake_without_values() -> Iterator[None]:
    """In the block, make transformers treat a fake tensor as a real tensor if its values are known. transformers then
    runs the same code as with real tensors. Fake tensors whose values are unknown remain fake to transformers."""
    library = sys.modules.get("transformers.utils.import_utils")
    changed = patch.object(library, "is_fake_tensor", lambda x: isinstance(x, Tensor) and value_of(x) is None)
    with changed if hasattr(library, "is_fake_tensor") else nullcontext():
        yield


_guesses: list[Callable[[torch.dtype], float | None]] = []


@contextmanager
def guessing(guess: Callable[[torch.dtype], float | None]) -> Iterator[None]:
    """In the block, make a read of an unknown number (`item()`) return `guess(dtype)`. The read is refused as usual if
    the guess is None, or if the read happens in the forward of a module."""
    _guesses.append(guess)
    try:
        yield
    finally:
        _guesses.pop()


def _guessed(tensor: Tensor) -> float | None:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            return None
        frame = frame.f_back
    return _guesses[-1](tensor.dtype)


def with_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any], mode: Any, needs: tuple[Any, ...]
) -> Any:
    """Run an operator on fake tensors by calling `run()`. Return the result, with values if they are known."""
    given = list(tensors_in((args, kwargs)))
    if operator_name(func) in OVERWRITES:
        _find(given)
    known = [value_of(tensor) for tensor in given]
    if any(value is None for value in known) or not _is_small(func, args, kwargs, given):
        lose(written_arguments(func, args, kwargs))
        if _guesses and operator_name(func) in READS and (guess := _guessed(given[0])) is not None:
            return guess
        out = run()
        if _guesses and operator_name(func) in NOT_FINITE:
            with without_interception():
                give_value(out, torch.zeros(out.shape, dtype=torch.bool))
        return out
    if operator_name(func) in READS:
        return known[0].item() if known and known[0] is not None else run()
    ran, out = True, None
    try:
        out = run()
    except needs:
        ran = False
    try:
        if any(tensor.numel() > MOST for tensor in tensors_in(out)):  # a large result of small inputs, such as a mask
            raise OverflowError
        real = _computed(func, args, kwargs)
    except Exception:  # the result is too large, or the CPU cannot compute it: its values stay unknown
        lose(written_arguments(func, args, kwargs))
        return out if ran else run()
    if not ran:
        device = given[0].device if given else torch.device("cpu")
        with mode:
            out = map_tensors(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), real)
    differs = any(value is not None and _of_batch.get(value) for value in known)
    for fake, value in zip(tensors_in(out), tensors_in(real), strict=False):
        give_value(fake, value)
        if differs:
            _of_batch.set(value, True)
        if operator_name(func) in UNWRITTEN:
            _lost.set(value, True)
    return out


def _is_small(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> bool:
    """Return whether an operator is small enough to be run on real values, in addition to its run on fake tensors."""
    if func.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in func.tags and operator_name(func) not in DRAWN:
        return False
    if given:
        return all(tensor.numel() <= MOST for tensor in given)
    sizes = [arg for arg in args if isinstance(arg, list | tuple)]
    elements = 1
    for size in sizes[0] if sizes else ():
        elements *= size if isinstance(size, int) else MOST
    numbers = [arg for arg in args if isinstance(arg, int | float) and operator_name(func) != "randint"]
    return elements <= MOST and all(abs(number) <= MOST for number in numbers) and kwargs.get("device") is not None


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_interception(), torch.no_grad():
        given, named = map_tensors(value_of, args), map_tensors(value_of, kwargs)
        if "device" in named:
            named["device"] = torch.device("cpu")
        return func(*given, **named)


def _find(given: list[Tensor]) -> None:
    """Mark the values of the fake tensor `given[0]` as known, because an operator is about to overwrite all of them."""
    value = _beside(given[0])
    if value is not None and value.nbytes == value.untyped_storage().nbytes():
        _lost.set(value, False)


def lose(written: list[Any]) -> None:
    """Mark the values of the tensors in `written` as unknown."""
    for tensor in tensors_in(written):
        if (value := _beside(tensor)) is not None:
            _lost.set(value, True)
