"""Build rules for split tensors from operands and their alignment.

Tested in tests/splits/test_split_rules.py and tests/parallel/test_split_context.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from meshwise.compat.torch_function import Args, Func, Kwargs
from meshwise.splits.axis import SplitPart
from meshwise.splits.crossing import enter, gather, scatter
from meshwise.splits.tensor import SplitTensor, is_split, split, whole_shape

Rule = Callable[[Func, Args, Kwargs], Any]
"""A function that runs an operator on split tensors. Raises NoRule, with nothing changed, if it cannot run the call."""


class NoRule(Exception):
    """Raised by a rule if the operator must run on whole tensors."""


def refuse() -> Any:
    """Raise NoRule, from within an expression."""
    raise NoRule


def part_of(thing: Any) -> SplitPart | None:
    """Return how `thing` is split, or None if it is not split."""
    return thing.part if is_split(thing) else None


def split_in(things: Sequence[Any]) -> list[SplitTensor]:
    """Return the split tensors among `things`."""
    return [thing for thing in things if is_split(thing)]


def numbers(args: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes or dims as one tuple. They may be given as separate arguments or as one sequence."""
    one = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    return tuple(int(each) for each in one)


def first_split(args: Sequence[Any]) -> SplitTensor:
    """Return the first argument if it is split. Raise NoRule otherwise."""
    if not is_split(args[0]):
        raise NoRule
    return args[0]


def positive(dim: Any, dims: int) -> int:
    """Convert a dim that may count from the end to one that counts from the front. Raise NoRule if it is not an
    integer."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise NoRule
    return dim % dims


def moved(part: SplitPart, dim: int, length: int | None = None) -> SplitPart:
    """Return a split like `part`, but along the dim with the number `dim`.

    length: the length of this dim in the whole tensor. By default `part.length`. Another length is only valid if
        `part.is_plain` is True."""
    length = part.length if length is None else length
    return part if (dim, length) == (part.dim, part.length) else replace(part, dim=dim, length=length)


def given(result: Any, part: SplitPart) -> Any:
    """Turn an operator's result on this rank's parts into split tensors. `result` may be a tensor, or a tuple or list
    of tensors.

    part: how the whole result is split.
    """
    if isinstance(result, Tensor):
        return split(result, part)
    return type(result)([given(each, part) for each in result]) if isinstance(result, tuple | list) else result


def only_split(args: Sequence[Any], kwargs: Mapping[str, Any], first: Any) -> None:
    """Raise NoRule if an argument other than `first` is split."""
    if any(is_split(thing) and thing is not first for thing in (*args, *kwargs.values())):
        raise NoRule


def with_parts_of(operand: Any, like: SplitPart, dims: int) -> Any:
    """Prepare an operand of an elementwise operator. Return this rank's part of the operand, or the whole operand if it
    is broadcast along the split dim.

    like: how the result of the operator is split.
    dims: the number of dims of the result.
    """
    if not isinstance(operand, Tensor):
        return operand
    from_end = like.dim - dims
    shape = whole_shape(operand)
    part = part_of(operand)
    if part is not None:
        if part.dim - len(shape) == from_end and part.alike(like):
            return operand
        operand = gather(operand)
    if len(shape) < -from_end or shape[from_end] == 1 != like.length:
        return enter(operand, like.axis)
    return scatter(operand, moved(like, from_end + len(shape)))
