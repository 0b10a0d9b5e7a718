"""Define the split tensor: whole to plain code, a part in memory.

Operators find it through `__torch_function__`. Rules (rules.py) run on parts alone, where that is exact; any other
operator finds the whole. Autograd sees plain operators on the parts: the gradient of a split tensor is split alike.

A tensor may be split along several axes, one inside the other (`LEVELS`): what a rank holds of the first is split along
the next. A rule knows of one level: to it a tensor is a part of that axis' whole, and what it calls on parts is carried
out by the rule of the next level, which sees those parts whole.

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
"""The axes along which tensors are split, outermost first."""
Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_dispatch: list[Dispatch] = []


class _View(threading.local):
    level = -1


_view = _View()
"""The level whose rule is running; -1 outside of rules, where tensors look whole at all levels."""


class SplitTensor(Tensor):
    """A tensor that is split over ranks; see the module. parts: this rank's part at each level."""

    parts: dict[int, SplitPart]

    @property
    def part(self) -> SplitPart:
        """The part at the level of the running rule; outside of rules, at the outermost level."""
        level = _view.level
        return self.parts[level if level >= 0 else min(self.parts)]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch[0](func, args, kwargs or {})


def is_split(thing: Any) -> TypeGuard[SplitTensor]:
    """Return whether `thing` is a part at the level of the running rule; outside of rules, at any level."""
    return isinstance(thing, SplitTensor) and (_view.level < 0 or _view.level in thing.parts)


def split(local: Tensor, part: SplitPart) -> SplitTensor:
    """Make `local` this rank's part of a whole, in place: it becomes a split tensor. Inner splits stay."""
    level = level_of(part)
    if isinstance(local, SplitTensor):
        local.parts = {**local.parts, level: part}
        return local
    local.__class__ = over(SplitTensor, type(local))
    local.parts = {level: part}  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def level_of(part: SplitPart) -> int:
    """Return the level of a part."""
    return LEVELS.index(part.axis.name)


def parts_of(thing: Any, above: int = -1) -> tuple[SplitPart, ...]:
    """Return the parts that `thing` is at the levels inside `above`."""
    if not isinstance(thing, SplitTensor):
        return ()
    return tuple(part for level, part in thing.parts.items() if level > above)


def split_again(tensor: Tensor, parts: Sequence[SplitPart]) -> Tensor:
    """Split a tensor again that was split before autograd saved it, as autograd saves plain tensors only."""
    if not isinstance(tensor, SplitTensor):
        for part in parts:
            split(tensor, part)
    return tensor


def levels_below(things: Iterable[Any]) -> list[int]:
    """Return the levels inside the running rule at which tensors among `things` are split, outermost first."""
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
    """Run rules of this level inside."""

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
    """Return the shape of the whole. For use in rules, which see the shapes of parts."""
    shape = list(tensor.shape)
    if is_split(tensor):
        shape[tensor.part.dim] = tensor.part.length
    return torch.Size(shape)
