"""Define the split tensor: whole to plain code, one part in memory.

Its operators are intercepted by `__torch_function__`. Rules (rules.py) run an operator on the parts where the result is
exact. Any other operator gets the whole tensor. Autograd records plain operators on the parts, so the gradient of a
split tensor is split like the tensor.

A tensor may be split over several axes, one inside the other (`LEVELS`): a rank's part on the first axis is split over
the next axis. A rule works at one level, where a tensor is a part of the whole on that axis. Operators that the rule
calls on parts run by the rules of the next level, at which these parts are wholes.

Tested in tests/splits/test_split_rules.py, tests/parallel/test_split_context.py and tests/splits/test_split_levels.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from meshwise.compat.fake import over
from meshwise.splits.axis import SplitPart

LEVELS = ("context", "tensor")
"""The axes over which tensors are split, outermost first."""
Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_dispatch: list[Dispatch] = []


class _View(threading.local):
    level = -1


_view = _View()
"""The level of the running rule in this thread. Outside of rules it is -1, and tensors look whole at all levels."""


class SplitTensor(Tensor):
    """A tensor that is split over ranks (see the docstring of the module). parts: how it is split at each level."""

    parts: dict[int, SplitPart]

    @property
    def part(self) -> SplitPart:
        """How the tensor is split at the level of the running rule, or at the outermost level outside of rules."""
        level = _view.level
        return self.parts[level if level >= 0 else min(self.parts)]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch[0](func, args, kwargs or {})


def is_split(thing: Any) -> TypeGuard[SplitTensor]:
    """Return whether `thing` is split at the level of the running rule. Outside of rules, return whether it is split at
    all."""
    return isinstance(thing, SplitTensor) and (_view.level < 0 or _view.level in thing.parts)


def split(local: Tensor, part: SplitPart) -> SplitTensor:
    """Turn `local`, in place, into a split tensor, and return it. `local` is this rank's part of a whole tensor, and
    `part` says how the whole is split. Splits of `local` at other levels stay."""
    level = level_of(part)
    if isinstance(local, SplitTensor):
        local.parts = {**local.parts, level: part}
        return local
    local.__class__ = over(SplitTensor, type(local))
    local.parts = {level: part}  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def level_of(part: SplitPart) -> int:
    """Return the level of a part, which is the position of its axis in `LEVELS`."""
    return LEVELS.index(part.axis.name)


def parts_of(thing: Any, above: int = -1) -> tuple[SplitPart, ...]:
    """Return how `thing` is split at all levels inside `above`. The default of -1 stands for all levels."""
    if not isinstance(thing, SplitTensor):
        return ()
    return tuple(part for level, part in thing.parts.items() if level > above)


def split_again(tensor: Tensor, parts: Sequence[SplitPart]) -> Tensor:
    """Turn `tensor` back into a split tensor after autograd has saved it, because autograd saves plain tensors only. A
    tensor that is still split stays unchanged.

    parts: how the tensor was split before, at each level.
    """
    if not isinstance(tensor, SplitTensor):
        for part in parts:
            split(tensor, part)
    return tensor


def levels_below(things: Iterable[Any]) -> list[int]:
    """Return the levels, outermost first, at which any of `things` is split and which are inside the level of the
    running rule. Outside of rules, return all levels at which any of them is split."""
    found: set[int] = set()
    _add_levels(things, found)
    return sorted(level for level in found if level > _view.level) if len(found) > 1 or _view.level >= 0 else [*found]


def _add_levels(things: Iterable[Any], found: set[int]) -> None:
    for thing in things:
        if isinstance(thing, SplitTensor):
            found.update(thing.parts)
        elif isinstance(thing, tuple | list | dict):
            _add_levels(thing.values() if isinstance(thing, dict) else thing, found)


class at_level:
    """A context manager that sets the level at which rules run in the with-body."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._before, _view.level = _view.level, self._level

    def __exit__(self, *error: object) -> None:
        _view.level = self._before


def dispatch_with(rules: Dispatch) -> None:
    """Let `rules` run the functions that are called on split tensors."""
    _dispatch[:] = [rules]


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole tensor. In a rule, `.shape` is only the shape of the part."""
    shape = list(tensor.shape)
    if is_split(tensor):
        shape[tensor.part.dim] = tensor.part.length
    return torch.Size(shape)
