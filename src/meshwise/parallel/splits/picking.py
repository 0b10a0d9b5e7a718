"""Pick rows of split tensors by index or mask, or write them.

Rows that a mask picks stay on the rank that holds them. Rows that an index picks are redistributed: each rank receives
the rows of its part of the index. Indices and masks themselves are small, so they are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional

from meshwise.parallel.splits.axis import Axis, SplitPart
from meshwise.parallel.splits.crossing import enter, gather, kept_within, scatter, through
from meshwise.parallel.splits.elementwise import RULES as ELEMENTWISE
from meshwise.parallel.splits.rule import (
    NoRule,
    Rule,
    entries,
    first_split,
    given,
    moved,
    numbers,
    refuse,
    split_in,
    with_parts_of,
)
from meshwise.parallel.splits.shapes import RULES as SHAPES
from meshwise.parallel.splits.tensor import SplitTensor, is_split, level_of, parts_of, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, called, named


class _Exchange(Function):
    """Sends entry i of a tensor's first dim to rank i. Its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return through(_Exchange, gradient.contiguous(), ctx.axis), None


def picked(x: SplitTensor, index: Tensor) -> SplitTensor:
    """Return `x` with the entries at `index` in place of its split dim."""
    part, axis, dim, ranks = x.part, x.part.axis, x.part.dim, range(x.part.axis.size)
    into = moved(index.part, 0) if is_split(index) else SplitPart(axis, 0, len(index))
    rows, long = gather(index).cpu(), max(part.length, 1)
    outside = rows.numel() and not -part.length <= rows.min() <= rows.max() < part.length  # let torch raise the error
    if outside or any(each.dim == dim for each in parts_of(x, level_of(part))):
        raise NoRule
    held = [entries(part, rank) for rank in ranks]
    code = torch.empty(part.length, dtype=torch.int64)  # each row's rank and index there, as rank * long + index
    code[torch.cat(held)] = torch.cat([rank * long + torch.arange(len(held[rank])) for rank in ranks])
    wanted = [code[rows[entries(into, rank)].flatten() % long] for rank in ranks]
    longest = max(1, *(int(torch.bincount(each // long, minlength=1).max()) for each in wanted))
    mine = [each[each // long == axis.rank] % long for each in wanted]
    sent = torch.cat([functional.pad(each, (0, longest - len(each))) for each in mine])
    local = x.movedim(dim, 0)
    # `sent` is padded with zeros, so there must be a row 0, even on a rank that holds no rows.
    local = local if part.own else torch.cat([local, local.new_zeros(1, *local.shape[1:])])
    local = local.index_select(0, sent.to(x.device)).unflatten(0, (axis.size, longest))
    got = kept_within(level_of(part), local, through(_Exchange, local, axis)).flatten(0, 1)
    owner = wanted[axis.rank] // long
    place = functional.one_hot(owner, axis.size).cumsum(0).gather(1, owner[:, None])[:, 0] - 1
    found = got.index_select(0, (owner * longest + place).to(x.device)).unflatten(0, (into.own, *index.shape[1:]))
    lead = list(range(index.dim()))
    return split(found.movedim(lead, [dim + each for each in lead]), moved(into, dim))


def _masked(x: SplitTensor, mask: Tensor) -> tuple[Tensor, SplitPart]:
    """Return this rank's part of the entries of `x` that a mask picks, and how they are split. The mask begins at the
    split dim."""
    part, rows, dim = x.part, moved(x.part, 0), x.part.dim
    if part.repeats > 1 or whole_shape(mask) != whole_shape(x)[dim : dim + mask.dim()]:
        raise NoRule
    own = with_parts_of(mask, rows, mask.dim()).bool()
    counts = (own if is_split(mask) else mask.bool()).unsqueeze(-1).flatten(1).sum(1)
    ends = [0, *(gather(split(counts, rows)) if is_split(mask) else counts).cumsum(0).tolist()]
    pieces = [[(ends[begin], ends[end]) for begin, end in each] for each in part.ranges]
    return x[(slice(None),) * dim + (own,)], part.divided(pieces, ends[-1])


def _listed(x: Tensor, index: Any) -> list[Any]:
    """Return an index as a list: one item for each dim of `x`. A mask may stand for several. Lists become tensors."""
    items = [*index] if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(each, device=x.device) if isinstance(each, list | range) else each for each in items]
    if not all(each.dim() if isinstance(each, Tensor) else type(each) in (int, slice, EllipsisType) for each in items):
        raise NoRule
    at = next((n for n, each in enumerate(items) if each is Ellipsis), len(items))
    full = x.dim() - sum(_dims(each) for each in items if each is not Ellipsis)
    return [*items[:at], *[slice(None)] * full, *items[at + 1 :]]


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _dims(item: Any) -> int:
    """Return how many dims of a tensor an item of an index stands for."""
    return item.dim() if _is_mask(item) else 1


def _full(items: Sequence[Any]) -> bool:
    return all(isinstance(each, slice) and each == slice(None) for each in items)


def _at(x: SplitTensor, items: Sequence[Any]) -> int:
    """Return the number of the item that stands for the split dim. Items before it must be slices."""
    ends = list(itertools.accumulate(map(_dims, items), initial=0))
    at = ends.index(x.part.dim) if x.part.dim in ends else refuse()
    return at if all(isinstance(each, slice) for each in items[:at]) else refuse()


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Index a tensor by tensors of integers and masks, any of which may be split."""
    x, items = args[0], _listed(*args[:2])
    tensors = [n for n, each in enumerate(items) if isinstance(each, Tensor)]
    if not tensors or tensors[-1] - tensors[0] >= len(tensors):
        raise NoRule
    if not is_split(x):
        return _looked_up(x, items, tensors) if _full(items[: tensors[0]]) else refuse()
    at = _at(x, items)
    if at < tensors[0]:
        fits = _full(items[at : at + 1]) and not split_in(items)
        return given(x[tuple(items)], moved(x.part, at)) if fits else refuse()
    if len(tensors) > 1:
        x, index = _by_pairs(x, items)
        return given(x[index], x.part)
    rows, rest = items[at], items[at + 1 :]
    made = given(*_masked(x, rows)) if _is_mask(rows) else picked(x, rows)
    return SHAPES["__getitem__"](func, (made, (*[slice(None)] * (made.dim() - len(rest)), *rest)), {})


def _by_pairs(x: SplitTensor, items: Sequence[Any]) -> tuple[SplitTensor, tuple[Any, ...]]:
    """Return this rank's rows, and the index into them, for an index such as `x[torch.arange(len(x)), y]`."""
    rows, dims = items[0], max(each.dim() for each in items if isinstance(each, Tensor))
    if x.part.dim or any(map(_is_mask, items)) or rows.dim() != dims or whole_shape(rows)[1:].numel() != 1:
        raise NoRule
    length = torch.broadcast_shapes(*(whole_shape(each) for each in items if isinstance(each, Tensor)))[0]
    if whole_shape(rows)[0] != length:
        rows = gather(rows).expand(length, *rows.shape[1:])
    if not torch.equal(gather(rows).flatten(), torch.arange(x.part.length, device=rows.device)):
        made = picked(x, rows)
        x = split(made.flatten(0, dims - 1), made.part)
    own = torch.arange(x.part.own, device=x.device).view(-1, *[1] * (dims - 1))
    return x, (own, *(with_parts_of(each, x.part, dims) for each in items[1:]))


def _looked_up(x: Tensor, items: list[Any], tensors: Sequence[int]) -> Any:
    """Index a whole tensor by tensors, one of them split: each rank looks up the rows of its part."""
    first, found = tensors[0], [items[n] for n in tensors]
    like = split_in(found)[0]
    if any(map(_is_mask, found)):
        x = scatter(x, moved(like.part, first + like.part.dim)) if len(found) == 1 else refuse()
        return _getitem(Tensor.__getitem__, (x, tuple(items)), {})
    dims = max(each.dim() for each in found)
    part = moved(like.part, like.part.dim - like.dim() + dims)
    for n in tensors:
        items[n] = with_parts_of(items[n], part, dims)
    return given(enter(x, part.axis)[tuple(items)], moved(part, part.dim + first))


def _setitem(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Write to entries of a split tensor: each rank writes to its own."""
    x, items, value = first_split(args), _listed(*args[:2]), args[2]
    value = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    at = _at(x, items)
    rows = items[at]
    if isinstance(rows, Tensor) and _full(items[:at] + items[at + 1 :]):
        if not _is_mask(rows):
            mask = torch.zeros(x.part.length, dtype=torch.bool, device=x.device)
            rows = mask.index_fill(0, gather(rows), 1) if value.dim() == 0 and rows.dim() == 1 else refuse()
        items[at] = with_parts_of(rows, moved(x.part, 0), rows.dim())
        func(x, tuple(items), with_parts_of(value, _masked(x, rows)[1], x.dim() - rows.dim() + 1))
    elif isinstance(rows, Tensor):
        target, index = _by_pairs(x, items)
        func(x, index, with_parts_of(value, x.part, index[0].dim())) if target is x else refuse()
    else:
        items[at] = rows if isinstance(rows, slice) else slice(rows, rows + 1 or None)
        target = SHAPES["__getitem__"](Tensor.__getitem__, (x, tuple(items)), {})
        ELEMENTWISE["copy_"](Tensor.copy_, (target, value), {})


def _selected(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, *where = [*args, *kwargs.values()]
    if len(where) == 1 and whole_shape(x) != whole_shape(where[0]):  # the index is a mask
        raise NoRule
    lead = [slice(None)] * (where[0] % x.dim()) if len(where) == 2 else []
    return _getitem(Tensor.__getitem__, (x, (*lead, where[-1])), {})


def _nonzero(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the indices of elements that are not 0. Those in a rank's rows stay on that rank."""
    x = first_split(args)
    part, found = _masked(x, split(x != 0, x.part))[1] if x.part.dim == 0 else refuse(), x.nonzero()
    rows = entries(x.part, x.part.axis.rank).to(x.device)[found[:, :1]]
    made = torch.cat([rows, found[:, 1:]], 1)
    return given(made.unbind(1) if called(func) == "where" or kwargs.get("as_tuple") else made, part)


def _rearranged(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Flip or roll the rows of a split tensor: do this to the row numbers, and pick rows by them."""
    x = first_split(args)
    *shifts, dims = [*args[1:], *(kwargs[name] for name in ("shifts", "dims") if name in kwargs)]
    if [dim % x.dim() for dim in numbers((dims,))] != [x.part.dim] or len(shifts) != (called(func) == "roll"):
        raise NoRule
    return picked(x, func(torch.arange(x.part.length), *shifts, (0,)))


def _aligned(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Gather or scatter along a dim that is not split."""
    names = ("input", "indices", "dim") if called(func) == "take_along_dim" else ("input", "dim", "index", "src")
    values = named(names, args, kwargs)
    like, x, written = split_in([*values.values()])[0].part, values["input"], called(func).endswith("_")
    tensors = [each for each in values.values() if isinstance(each, Tensor) and each.dim()]
    fits = all(each.dim() == x.dim() and whole_shape(each)[like.dim] == like.length for each in tensors)
    if not fits or values.get("dim") in (None, like.dim, like.dim - x.dim()) or (written and not is_split(x)):
        raise NoRule
    own = {name: with_parts_of(each, like, x.dim()) for name, each in values.items()}
    made = func(*[*own.values()][: len(args)], **{name: own[name] for name in kwargs})
    return x if written else given(made, like)


def _diagonal(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if len(args) == 1 and not kwargs and args[0].dim() == 2 else refuse()
    ranks, most = x.part.ranges, min(whole_shape(x))
    if x.part.dim or x.part.repeats > 1 or max(map(len, ranks)) > 1:
        raise NoRule
    pieces = [[(min(begin, most), min(end, most)) for begin, end in each] for each in ranks]
    first = next((begin for begin, _ in ranks[x.part.axis.rank]), 0)
    return given(func(x, first), x.part.divided(pieces, most))


RULES: dict[str, Rule] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    **dict.fromkeys(["index_select", "masked_select"], _selected),
    **dict.fromkeys(["nonzero", "where", "argwhere"], _nonzero),
    **dict.fromkeys(["roll", "flip"], _rearranged),
    **dict.fromkeys(["gather", "take_along_dim", "scatter", "scatter_", "scatter_add", "scatter_add_"], _aligned),
    **dict.fromkeys(["diag", "diagonal"], _diagonal),
}
"""The rules of this file. They apply where the rules of other files do not."""
