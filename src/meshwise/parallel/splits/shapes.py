"""Permute, join and divide dims on parts, keeping the split dim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.along import along
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.rule import (
    NoRule,
    Rule,
    cut,
    first_split,
    given,
    joined,
    largest,
    moved,
    numbers,
    padded,
    positive,
    row,
    strided,
    with_parts_of,
)
from meshwise.parallel.splits.tensor import SplitTensor, is_split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, argument, called


def reshaped(part: SplitPart, before: Sequence[int], after: Sequence[int]) -> SplitPart:
    """Return how a split tensor is split after the whole tensor is reshaped from shape `before` to shape `after`."""
    lead, found = math.prod(before[: part.dim]) * part.repeats, list[SplitPart]()
    for dim, length in enumerate(after):
        repeats, rest = divmod(lead, max(math.prod(after[:dim]), 1))
        if repeats and not rest and length % repeats == 0:
            run = length // repeats
            new = part if run == part.run else part.scaled(run) if run > 1 else None
            if new is not None:
                found.append(replace(new, dim=dim, length=length, repeats=repeats))
    if not found:
        raise NoRule
    return min(found, key=lambda each: each.repeats)


def _view(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    given_sizes = kwargs.get("shape", kwargs.get("size"))
    if len(args) > 1 and isinstance(args[1], torch.dtype | Tensor):
        raise NoRule
    return _into(func, x, numbers(args[1:] if given_sizes is None else (given_sizes,)))


def _into(func: Func, x: SplitTensor, sizes: Sequence[int]) -> Any:
    whole = whole_shape(x)
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes = [whole.numel() // known if size == -1 else size for size in sizes] if known else sizes
    part = reshaped(x.part, whole, sizes)
    local = [part.own if dim == part.dim else size for dim, size in enumerate(sizes)]
    return given(func(x, local), part)


def _flatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, dims = first_split(args), args[0].dim()
    begin = positive(argument(args, kwargs, 1, "start_dim", 0), dims)
    end = positive(argument(args, kwargs, 2, "end_dim", -1), dims)
    shape = whole_shape(x)
    return _into(torch.reshape, x, [*shape[:begin], math.prod(shape[begin : end + 1]), *shape[end + 1 :]])


def _unflatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    dim = positive(argument(args, kwargs, 1, "dim"), x.dim())
    sizes = list(argument(args, kwargs, 2, "sizes", ()))
    shape = whole_shape(x)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return _into(torch.reshape, x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _expand(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    sizes = list(whole_shape(args[1]) if isinstance(args[1], Tensor) else numbers(args[1:]))
    dim = x.part.dim + len(sizes) - x.dim()
    if sizes[dim] not in (-1, x.part.length):
        raise NoRule
    sizes[dim] = x.part.own
    return given(x.expand(sizes), moved(x.part, dim))


def _permuted(order: Callable[[Args, Kwargs, int], Sequence[int]]) -> Rule:
    """Make a rule that permutes dims. order: returns the dims of the input in the order that they have in the
    output."""

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x = first_split(args)
        dims = list(order(args[1:], kwargs, x.dim()))
        return given(x.permute(dims), moved(x.part, dims.index(x.part.dim)))

    return rule


def _swapped(args: Args, kwargs: Kwargs, dims: int) -> Sequence[int]:
    first, second = [*args, *kwargs.values()] if args or kwargs else (0, dims - 1)
    order = list(range(dims))
    one, other = positive(first, dims), positive(second, dims)
    order[one], order[other] = other, one
    return order


def _squeeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    given_dims = args[1:] or tuple(kwargs.values())
    ones = [dim for dim, size in enumerate(whole_shape(x)) if size == 1]
    wanted = [dim % x.dim() for dim in numbers(given_dims)] if given_dims else ones
    gone = [dim for dim in wanted if dim in ones]
    if x.part.dim in gone:  # the dim has one row, which one rank holds
        raise NoRule
    return given(x.squeeze(gone), moved(x.part, x.part.dim - sum(dim < x.part.dim for dim in gone)))


def _unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    dim = positive(argument(args, kwargs, 1, "dim"), x.dim() + 1)
    return given(x.unsqueeze(dim), moved(x.part, x.part.dim + (dim <= x.part.dim)))


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Index a split tensor with integers, slices, None and an ellipsis."""
    x, index = first_split(args), args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index):
        raise NoRule
    taken = sum(each is not None and each is not Ellipsis for each in index)
    full: list[Any] = []
    for each in index:
        full += [slice(None)] * (x.dim() - taken) if each is Ellipsis else [each]
    full += [slice(None)] * (x.dim() - sum(each is not None for each in full))
    dim, now = 0, 0
    for place, each in enumerate(full):
        if each is None:
            now += 1
            continue
        if dim == x.part.dim:
            others = tuple(slice(None) if number == place else other for number, other in enumerate(full))
            if type(each) is slice:
                return _sliced(x, each, others, now)
            one = row(x, each)
            return one[others[:place] + others[place + 1 :]]
        dim, now = dim + 1, now + (type(each) is slice)
    raise NoRule


def _sliced(x: SplitTensor, along: slice, others: tuple[Any, ...], now: int) -> Any:
    """Index a split tensor with the slice `along` in its split dim, and with `others` in its other dims."""
    begin, end, step = along.indices(x.part.length)
    local, part = cut(x, begin, max(begin, end)) if end - begin < x.part.length else (x, x.part)
    local, part = strided(local, part, step) if step != 1 else (local, part)
    return given(local[others], moved(part, now))


def _narrow(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    dim, begin, length = [*args[1:], *kwargs.values()]
    if not isinstance(begin, int) or not 0 <= begin <= begin + length <= whole_shape(x)[dim]:
        raise NoRule
    return _getitem(func, (x, (*[slice(None)] * positive(dim, x.dim()), slice(begin, begin + length))), {})


def _joined(func: Func, args: Args, kwargs: Kwargs, *, new: bool = False) -> Any:
    """Run `torch.cat` on split tensors, or `torch.stack` if `new`."""
    if not args:
        raise NoRule
    empty = torch.Size([0])  # skip empty tensors, such as an empty cache
    tensors = [each for each in args[0] if new or whole_shape(each) != empty]
    first = largest(tensors)
    dims = first.dim()
    dim = positive(argument(args, kwargs, 1, "dim", 0), dims + new)
    if any(each.dim() != dims for each in tensors):
        raise NoRule
    if dim == first.part.dim and not new:
        return given(*joined(tensors, first.part))
    tensors = [with_parts_of(each, first.part, dims) for each in tensors]
    if any(not is_split(each) for each in tensors):
        raise NoRule
    return given(func(tensors, dim), moved(first.part, first.part.dim + (new and dim <= first.part.dim)))


def _in_pieces(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run `torch.chunk`, `torch.split` or `torch.tensor_split` on a split tensor."""
    x = first_split(args)
    dim = positive(argument(args, kwargs, 2, "dim", 0), x.dim())
    if dim != x.part.dim:
        return along(2, 0)(func, args, kwargs)
    if x.part.repeats == 1 and dim:
        raise NoRule  # the ranks would hold unequal parts of each piece, so gathering once is cheaper
    places_of = torch.empty(x.part.length, device="meta")
    others = {name: value for name, value in kwargs.items() if name not in ("dim", "tensor")}
    sizes = [len(each) for each in getattr(places_of, called(func))(*args[1:2], **others)]
    ends = list(itertools.accumulate(sizes))
    if x.part.repeats > 1 and any(end % x.part.run for end in ends):
        raise NoRule
    return tuple(given(*cut(x, end - size, end)) for size, end in zip(sizes, ends, strict=True))


def _repeat_interleave(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    dim = positive(argument(args, kwargs, 2, "dim"), x.dim())
    if dim != x.part.dim:
        return given(func(*args, **kwargs), x.part)
    times = argument(args, kwargs, 1, "repeats")
    if not isinstance(times, int) or x.part.repeats > 1:
        raise NoRule
    pieces = [[(b * times, e * times) for b, e in each] for each in x.part.ranges]
    return given(func(*args, **kwargs), x.part.divided(pieces, x.part.length * times))


def _pad(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    pads = argument(args, kwargs, 1, "pad")
    mode = argument(args, kwargs, 2, "mode", "constant")
    if mode != "constant":
        raise NoRule
    if x.part.dim < x.dim() - len(pads) // 2:
        return given(func(*args, **kwargs), x.part)
    at, value = 2 * (x.dim() - 1 - x.part.dim), argument(args, kwargs, 3, "value")
    pads, part = padded(x.part, list(pads), at)
    return given(functional.pad(x, pads, value=value), part)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["view", "reshape"], _view),
    **dict.fromkeys(
        ["view_as", "reshape_as"], lambda func, args, _: _view(torch.reshape, [args[0], whole_shape(args[1])], _)
    ),
    "flatten": _flatten,
    "unflatten": _unflatten,
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], _expand),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims"], _permuted(_swapped)),
    "permute": _permuted(lambda args, kwargs, dims: [dim % dims for dim in numbers(args or (kwargs["dims"],))]),
    "t": _permuted(lambda args, kwargs, dims: range(dims)[::-1]),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "narrow": _narrow,
    **dict.fromkeys(["cat", "concat", "concatenate"], _joined),
    "stack": lambda func, args, kwargs: _joined(func, args, kwargs, new=True),
    **dict.fromkeys(["chunk", "split", "split_with_sizes", "tensor_split"], _in_pieces),
    "repeat_interleave": _repeat_interleave,
    "pad": _pad,
}
