"""Define the functions from which rules for split tensors are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.splits.axis import Range, SplitPart
from meshwise.parallel.splits.crossing import add_up, enter, gather, scatter
from meshwise.parallel.splits.tensor import SplitTensor, is_split, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, on_parts

HALF = (torch.float16, torch.bfloat16)
Rule = Callable[[Func, Args, Kwargs], Any]
"""A function that runs an operator on split tensors. Raises NoRule, with nothing changed, if it cannot run the call."""


class NoRule(Exception):
    """Raised by a rule if the operator must run on whole tensors."""


def ones_of_whole(x: SplitTensor) -> Tensor:
    """Return ones in the shape of the whole tensor, and in its memory order, which random draws follow."""
    with on_parts():
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
    held = [x.part.held(rank) for rank in range(x.part.axis.size)]
    if x.dim() > 3 and min(held) < 2 and not x.part.axis.proves:  # strides of a single row may suggest another order
        orders = x.part.axis.all_gather(torch.tensor(order, device=x.device))
        order = orders[held.index(max(held))].tolist()
    shape = whole_shape(x)
    ones = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    return ones.permute([order.index(dim) for dim in range(x.dim())])


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
    if not args or not is_split(args[0]):  # the input may be given by name
        raise NoRule
    return args[0]


def positive(dim: Any, dims: int) -> int:
    """Return the number of a dim from 0 on. The given number may be negative."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise NoRule
    return dim % dims


def moved(part: SplitPart, dim: int, length: int | None = None) -> SplitPart:
    """Return a split like `part`, but along the dim with the number `dim`."""
    length = part.length if length is None else length
    return part if (dim, length) == (part.dim, part.length) else replace(part, dim=dim, length=length)


def given(result: Any, part: SplitPart) -> Any:
    """Turn an operator's result on this rank's parts into split tensors."""
    if isinstance(result, Tensor):
        return split(result, part)
    return type(result)([given(each, part) for each in result]) if isinstance(result, tuple | list) else result


def only_split(args: Sequence[Any], kwargs: Mapping[str, Any], first: Any) -> None:
    """Raise NoRule if an argument other than `first` is split."""
    if any(is_split(thing) and thing is not first for thing in (*args, *kwargs.values())):
        raise NoRule


def with_parts_of(operand: Any, like: SplitPart, dims: int) -> Any:
    """Return this rank's part of an operand, to be combined with parts split like `like`."""
    if not isinstance(operand, Tensor):
        return operand
    from_end, part = like.dim - dims, part_of(operand)
    if part is not None:
        if part.dim - operand.dim() == from_end and part.alike(like):
            return operand
        operand = gather(operand)
    shape = operand.shape
    if len(shape) < -from_end or shape[from_end] == 1 != like.length:
        return enter(operand, like.axis)
    return scatter(operand, moved(like, from_end + len(shape)))


def reduced_dims(dim: Any, dims: int) -> Sequence[int]:
    """Return the numbers of the dims that a reduction over `dim` removes: all dims if `dim` is None or empty."""
    every = dim is None or (isinstance(dim, Sequence) and not dim)
    return range(dims) if every else [each % dims for each in numbers((dim,))]


def entries(part: SplitPart, rank: int) -> Tensor:
    """Return the indices of the entries of the split dim that a rank holds."""
    return torch.cat([torch.arange(0), *(torch.arange(begin, end) for begin, end in _one_run(part).of_rank(rank))])


def largest(things: Sequence[Any]) -> SplitTensor:
    """Return the split tensor with the largest whole, so that all ranks choose the same."""
    return max(split_in(things), key=lambda each: whole_shape(each).numel())


def cut(x: SplitTensor, begin: int, end: int) -> tuple[Tensor, SplitPart]:
    """Return this rank's part of the entries `begin` to `end` of the split dim, and how these are split."""
    part = x.part
    if part.repeats > 1:
        run, held = part.run, part.own // part.repeats
        if begin % run or end % run or begin == end:
            raise NoRule
        new = replace(part, length=end - begin, repeats=(end - begin) // run)
        return x.narrow(part.dim, begin // run * held, new.own), new
    first = sum(min(e, begin) - min(b, begin) for b, e in part.of_rank(part.axis.rank))
    new = part.divided(
        [[(max(b, begin) - begin, min(e, end) - begin) for b, e in each] for each in part.ranges], end - begin
    )
    return x.narrow(part.dim, first, new.own), new


def strided(local: Tensor, part: SplitPart, step: int) -> tuple[Tensor, SplitPart]:
    """Return this rank's part of each `step`-th entry of the split dim, and how these are split, given this rank's part
    `local` of the tensor."""
    held = _one_run(part).ranges
    if step < 1 or max(map(len, held)) > 1:
        raise NoRule
    first = -sum(begin for begin, _ in held[part.axis.rank]) % step
    new = part.divided([[(-(-b // step), -(-e // step)) for b, e in each] for each in held], -(-part.length // step))
    return local[(slice(None),) * part.dim + (slice(first, None, step),)], new


def row(x: SplitTensor, place: int) -> Tensor:
    """Return the entry at index `place` of the split dim, without that dim. The result is whole on each rank."""
    part = _one_run(x.part)
    if not -part.length <= place < part.length:
        raise NoRule  # on whole tensors, torch raises its IndexError
    local, _ = cut(x, place % part.length, place % part.length + 1)
    return add_up(local.sum(part.dim, dtype=local.dtype), part.axis)


def padded(part: SplitPart, pads: list[int], at: int) -> tuple[list[int], SplitPart]:
    """Return this rank's padding, and how the padded tensor is split.

    pads: the padding of the whole tensor.
    """
    before, behind = pads[at : at + 2]
    if _one_run(part).length == 0 or before < 0 or behind < 0:
        raise NoRule
    new, own = [], part.axis.rank
    for rank, each in enumerate(part.ranges):
        first, last = any(b == 0 for b, _ in each), any(e == part.length for _, e in each)
        pieces = [(b + before, e + before) for b, e in each]
        pieces = [(0, before), *pieces] if first else pieces
        new.append([*pieces, (part.length + before, part.length + before + behind)] if last else pieces)
        if rank == own:
            pads = [*pads[:at], before if first else 0, behind if last else 0, *pads[at + 2 :]]
    return pads, part.divided(new, part.length + before + behind)


def joined(tensors: Sequence[Tensor], like: SplitPart) -> tuple[Tensor, SplitPart]:
    """Concatenate tensors along the split dim of `like`. Return this rank's part, and how the result is split."""
    dim, length, parts = like.dim, 0, []
    pieces: list[list[Range]] = [[] for _ in range(like.axis.size)]
    for each in tensors:
        if is_split(each) and each.part.dim != dim:
            raise NoRule
        long = whole_shape(each)[dim]
        part = _one_run(each.part) if is_split(each) else SplitPart(like.axis, dim, long)
        for rank, held in enumerate(part.ranges):
            pieces[rank] += [(b + length, e + length) for b, e in held]
        parts.append((each, part))
        length += long
    local = torch.cat([each if is_split(each) else scatter(each, part) for each, part in parts], dim)
    return local, like.divided(pieces, length)


def _one_run(part: SplitPart) -> SplitPart:
    if part.repeats > 1:
        raise NoRule
    return part
