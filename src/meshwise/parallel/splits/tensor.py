"""Define the split tensor: whole to plain code, one part in memory.

Its operators are intercepted by `__torch_function__`. Rules (rules.py) run an operator on the parts where the result is
exact. Any other operator gets the whole tensor. Autograd records plain operators on the parts, so the gradient of a
split tensor is split like the tensor.

A tensor may be split over several axes, one inside the other (`LEVELS`): a rank's part on the first axis is split over
the next axis. A rule works at one level, where a tensor is a part of the whole on that axis. Operators that the rule
calls on parts run by the rules of the next level, at which these parts are wholes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from meshwise.parallel.splits.axis import SplitPart
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import over
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import leaves_of, map_tensors

LEVELS = ("data", "context", "tensor")
"""The axes over which tensors are split, outermost first."""
NUMPYS = {"axis": "dim", "keepdims": "keepdim"}
"""NumPy's names of arguments, which torch takes too."""
Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_dispatch: list[Dispatch] = []


class _View(threading.local):
    level = -1


_view = _View()
"""`level` is the index in LEVELS of the axis that `at_level` has set, or -1 outside of `at_level`."""


class SplitTensor(Tensor):
    """A tensor of which each rank holds a part. To a program it looks like the whole tensor.

    parts: how the tensor is split over each axis. The key is the index of the axis in `LEVELS`.
    """

    parts: dict[int, SplitPart]

    @property
    def part(self) -> SplitPart:
        """How the tensor is split over the axis that `at_level` has set. Without `at_level`, this is the outermost axis
        over which the tensor is split.
        """
        level = _view.level
        return self.parts[level if level >= 0 else min(self.parts)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch[0](func, args, _renamed(kwargs) if kwargs and NUMPYS.keys() & kwargs.keys() else kwargs or {})


def _renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {NUMPYS.get(name, name): value for name, value in kwargs.items()}


def is_split(thing: Any) -> TypeGuard[SplitTensor]:
    """Return whether `thing` is a tensor that is split over the axis that `at_level` has set."""
    return isinstance(thing, SplitTensor) and (_view.level < 0 or _view.level in thing.parts)


def split(local: Tensor, part: SplitPart) -> SplitTensor:
    """Turn `local`, in place, into a split tensor, and return it. If it is already split over another axis, that split
    is kept.

    local: this rank's part of a whole tensor.
    part: how the whole tensor is split.
    """
    level = level_of(part)
    if isinstance(local, SplitTensor):
        local.parts = {**local.parts, level: part}
        return local
    local.__class__ = over(SplitTensor, type(local))
    local.parts = {level: part}  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def level_of(part: SplitPart) -> int:
    """Return the index in `LEVELS` of the axis over which `part` is split."""
    return LEVELS.index(part.axis.name)


def parts_of(thing: Any, above: int = -1) -> tuple[SplitPart, ...]:
    """Return how `thing` is split over each axis. The result is empty if `thing` is not split.

    above: only axes with a greater index in `LEVELS` count. By default, all axes count.
    """
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
    """Return the axes over which any tensor of `things` is split, as ascending indices in `LEVELS`."""
    found: set[int] = set()
    _add_levels(things, found)
    return sorted(level for level in found if level > _view.level) if len(found) > 1 or _view.level >= 0 else [*found]


def _add_levels(things: Iterable[Any], found: set[int]) -> None:
    for thing in things:
        if isinstance(thing, SplitTensor):
            found.update(thing.parts)
        elif isinstance(thing, tuple | list | dict):
            _add_levels(thing.values() if isinstance(thing, dict) else thing, found)


def level() -> int:
    """Return the index in `LEVELS` of the axis that `at_level` has set, or -1 outside of `at_level`."""
    return _view.level


class at_level:
    """A context manager that selects one axis, by its index `level` in `LEVELS`. Inside, a tensor counts as split only
    if it is split over this axis."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._before, _view.level = _view.level, self._level

    def __exit__(self, *error: object) -> None:
        _view.level = self._before


def dispatch_with(rules: Dispatch) -> None:
    """Set the function that runs torch functions on split tensors. rules.py sets it when it is imported."""
    _dispatch[:] = [rules]


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole tensor."""
    shape = list(tensor.shape)
    if is_split(tensor):
        shape[tensor.part.dim] = tensor.part.length
    return torch.Size(shape)


@dataclass(frozen=True)
class Form:
    """The form of one tensor that a stage sends to the next.

    parts: how the tensor is split over ranks. Empty for a whole tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    parts: tuple[SplitPart, ...]


@dataclass(frozen=True)
class Hidden:
    """The output of a block that is sent to the next stage."""

    form: Any
    carried: list[Any]
    before: dict[int, Any]

    @property
    def tensors(self) -> list[Form]:
        return list(forms_in(self.form))


def one_stage_on(hidden: Hidden) -> Hidden:
    """Return what the third stage of a pipeline sends, if the second has the same layers and sends `hidden`."""
    own = len(hidden.before) // 2
    more = {number + own: form for number, form in hidden.before.items() if number >= own}
    return replace(hidden, before=hidden.before | more)


def form_of(given: Any) -> Any:
    """Return a block's output with a `Form` in place of each tensor."""
    with on_parts():
        return map_tensors(lambda t: Form(tuple(t.shape), t.dtype, t.requires_grad, parts_of(t)), given)


def forms_in(tree: Any) -> Iterator[Form]:
    """Return the forms in the result of `form_of`, in order."""
    return leaves_of(Form, tree)


VIEWS = {"select", "chunk", "split", "unbind", "narrow", "tensor_split", "__iter__", "diagonal", "hsplit", "vsplit"}
KEPT, MOST = 1 << 20, 64  # bytes up to which a copy is kept alive with its batch, and the most copies tracked per batch
BASIC = (int, slice, type(None), type(Ellipsis))


def gives_view(name: str, args: Any) -> bool:
    """Return whether an operator returns a view of its first argument on one device."""
    if name != "__getitem__":
        return name in VIEWS
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(isinstance(each, BASIC) for each in index)


def note_copies(batch: SplitTensor, made: Any) -> None:
    """Track results of a view operator that do not share the batch's memory. Mark results as parts of a gradient if
    `batch` is one."""
    with on_parts():
        memory = batch.untyped_storage().data_ptr()
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if "of_gradient" in batch.__dict__ and isinstance(each, SplitTensor):
                each.__dict__["of_gradient"] = True
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != memory:
                size = each.numel() * each.element_size()
                held: Any = (lambda each=each: each) if size <= KEPT else weakref.ref(each)
                noted = batch.__dict__.setdefault("copies", [])
                noted += [(held, version(each))] if len(noted) < MOST else []


def check_copies(batch: SplitTensor) -> None:
    """Raise UsageError if the program has written into a tracked copy of this batch."""
    if not (noted := batch.__dict__.get("copies")):
        return
    with on_parts():
        if any((each := held()) is not None and version(each) != before for held, before in noted):
            raise UsageError(
                f'{user_place()}: the program has written into rows that it took out of this batch. With view="whole" '
                "they are copies, so the batch keeps its values. Write into the batch: x[2] = 0, not x[2].zero_()."
            )
