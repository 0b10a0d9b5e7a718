"""Pick rows of split tensors by index or mask, and write to them.

Rows that a mask picks stay on the rank that holds them. Rows that an index picks are divided anew: each rank receives
the rows of its part of the index. Indices and masks themselves are small, so they are gathered.

Tested in tests/splits/test_row_rules.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from meshwise.compat.torch_function import called
from meshwise.splits.axis import Axis, SplitPart
from meshwise.splits.crossing import enter, gather, gather_over, kept_within, scatter, through
from meshwise.splits.elementwise import RULES as ELEMENTWISE
from meshwise.splits.rule import (
    NoRule,
    Rule,
    first_split,
    given,
    moved,
    numbers,
    part_of,
    positive,
    split_in,
    with_parts_of,
)
from meshwise.splits.shapes import RULES as SHAPES
from meshwise.splits.tensor import SplitTensor, is_split, level_of, parts_of, split, whole_shape

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class _Exchange(Function):
    """Sends entry i of a tensor's first dim to rank i. Its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return through(_Exchange, gradient.contiguous(), ctx.axis), None


def _entries(part: SplitPart, rank: int) -> Tensor:
    """Return the indices of the entries of the split dim that a rank holds."""
    if part.repeats > 1:
        raise NoRule
    return torch.cat([torch.arange(0), *(torch.arange(begin, end) for begin, end in part.of_rank(rank))])


def picked(x: SplitTensor, index: Tensor, into: SplitPart | None = None) -> SplitTensor:
    """Return the entries of the split dim of `x` at `index`, in place of that dim.

    index: a tensor of integers, alike on every rank.
    into: how the first dim of `index` is split in the result. By default, evenly.
    """
    part, axis, dim = x.part, x.part.axis, x.part.dim
    into = SplitPart(axis, 0, len(index)) if into is None else moved(into, 0)
    ranks, rows = range(axis.size), index.detach().cpu()
    if rows.numel() and not -part.length <= rows.min() <= rows.max() < part.length:
        raise NoRule  # torch says so
    rows = rows % max(part.length, 1)
    owner, place = torch.empty(part.length, dtype=torch.int64), torch.empty(part.length, dtype=torch.int64)
    for rank in ranks:
        held = _entries(part, rank)
        owner[held], place[held] = rank, torch.arange(len(held))
    wanted = [rows[_entries(into, rank)].flatten() for rank in ranks]
    longest = max(int(torch.bincount(owner[each], minlength=1).max()) for each in wanted)
    mine = [place[each[owner[each] == axis.rank]] for each in wanted]
    local: Tensor = x
    for deeper in parts_of(x, level_of(part)):
        if deeper.dim == dim:
            local = gather_over(deeper.axis.name, local)
    local = local.movedim(dim, 0)
    sending = torch.cat([torch.nn.functional.pad(each, (0, longest - len(each))) for each in mine])
    if not part.own:  # an entry to send to ranks that do not read it
        local = torch.cat([local, local.new_zeros(1, *local.shape[1:])])
    sent = local.index_select(0, sending.to(x.device)).unflatten(0, (axis.size, longest))
    got = kept_within(level_of(part), sent, through(_Exchange, sent, axis)).flatten(0, 1)
    own = owner[wanted[axis.rank]]
    order = torch.empty_like(own)
    for rank in ranks:
        there = own == rank
        order[there] = rank * longest + torch.arange(int(there.sum()))
    found = got.index_select(0, order.to(x.device)).unflatten(0, (into.own, *index.shape[1:]))
    lead = index.dim()
    found = found.movedim(list(range(lead)), list(range(dim, dim + lead)))
    return split(found, moved(into, dim))


def _masked(x: SplitTensor, mask: Tensor) -> tuple[Tensor, SplitPart]:
    """Return this rank's part of the entries of `x` at a mask whose first dim is the split dim, and how they are
    split."""
    part, dim = x.part, x.part.dim
    if part.repeats > 1 or whole_shape(mask) != whole_shape(x)[dim : dim + mask.dim()]:
        raise NoRule
    rows = moved(part, 0)
    mask = mask.bool()
    own = with_parts_of(mask, rows, mask.dim())
    counts = (own if is_split(mask) else mask).unsqueeze(-1).flatten(1).sum(1)
    ends = [0, *(gather(split(counts, rows)) if is_split(mask) else counts).cumsum(0).tolist()]
    pieces = [[(ends[begin], ends[end]) for begin, end in part.of_rank(rank)] for rank in range(part.axis.size)]
    return x[(slice(None),) * dim + (own,)], part.divided(pieces, ends[-1])


def _listed(x: Tensor, index: Any) -> list[Any]:
    """Return an index with one item for each dim of `x` (a mask stands for its dims), with lists as tensors."""
    items = [*index] if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(each, device=x.device) if isinstance(each, list | range) else each for each in items]
    if any(each is None or isinstance(each, bool) for each in items):
        raise NoRule
    taken = sum(_dims(each) for each in items if each is not Ellipsis)
    at = next((n for n, each in enumerate(items) if each is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * (x.dim() - taken), *items[at + 1 :]]


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _dims(item: Any) -> int:
    """Return how many dims of a tensor an item of an index stands for."""
    return item.dim() if _is_mask(item) else 1


def _is_full(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Index a tensor by tensors of integers and masks, of which any may be split."""
    x, items = args[0], _listed(*args[:2])
    tensors = [n for n, each in enumerate(items) if isinstance(each, Tensor)]
    if not tensors or any(not isinstance(each, Tensor | slice | int) for each in items):
        raise NoRule
    first, adjacent = tensors[0], tensors[-1] - tensors[0] + 1 == len(tensors)
    if not is_split(x):
        return _looked_up(x, items, tensors) if adjacent else _none()
    at = _at(x, items)
    if at == first and all(map(_is_full, items[:at])):
        return _of_rows(x, items, at)
    if at > first or not adjacent or split_in(items) or not _is_full(items[at]) or int in map(type, items[:at]):
        raise NoRule
    return given(x[tuple(items)], moved(x.part, at))


def _none() -> Any:
    raise NoRule


def _at(x: SplitTensor, items: Sequence[Any]) -> int:
    """Return the place of the item that begins with the split dim."""
    ends = list(itertools.accumulate(map(_dims, items), initial=0))
    return ends.index(x.part.dim) if x.part.dim in ends else _none()


def _of_rows(x: SplitTensor, items: Sequence[Any], at: int) -> Any:
    """Index a split tensor by a tensor in its split dim, after which other items may follow."""
    rows, rest, lead = items[at], items[at + 1 :], (slice(None),) * at
    if any(isinstance(each, Tensor) for each in rest):
        x, index = _by_pairs(x, items)
        return given(x[index], moved(x.part, 0))
    if _is_mask(rows):
        made, dims = given(*_masked(x, rows)), 1
    else:
        made, dims = picked(x, gather(rows), part_of(rows)), rows.dim()
    index = (*lead, *[slice(None)] * dims, *rest)
    return SHAPES["__getitem__"](Tensor.__getitem__, (made, index), {})


def _by_pairs(x: SplitTensor, items: Sequence[Any]) -> tuple[SplitTensor, tuple[Any, ...]]:
    """Prepare an index of rows and further tensors, such as `x[torch.arange(len(x)), y]`. Return the rows, and the
    index of this rank's part of them."""
    rows, dims = items[0], max(_dims(each) and each.dim() for each in items if isinstance(each, Tensor))
    plain = all((isinstance(each, Tensor) and not _is_mask(each)) or _is_full(each) for each in items)
    if x.part.dim or not plain or rows.dim() != dims or whole_shape(rows)[1:].numel() != 1:
        raise NoRule
    chosen = gather(rows).flatten()
    every = len(chosen) == x.part.length and bool((chosen == torch.arange(len(chosen), device=x.device)).all())
    x = x if every else picked(x, chosen, part_of(rows))
    own = torch.arange(x.part.own, device=x.device).view(-1, *[1] * (dims - 1))
    others = [with_parts_of(each, x.part, dims) for each in items[1:]]
    return x, (own, *others)


def _looked_up(x: Tensor, items: Sequence[Any], tensors: Sequence[int]) -> Any:
    """Index a whole tensor by tensors of which one is split: each rank looks up the rows of its part."""
    first, found = tensors[0], [items[n] for n in tensors]
    like = split_in(found)[0]
    if not all(map(_is_full, items[:first])):
        raise NoRule
    if _is_mask(like):
        return scatter(x, moved(like.part, first + like.part.dim))[tuple(items)] if len(found) == 1 else _none()
    dims = max(each.dim() for each in found)
    part = moved(like.part, like.part.dim - like.dim() + dims)
    own = {n: with_parts_of(items[n], part, dims) for n in tensors}
    index = tuple(own.get(n, each) for n, each in enumerate(items))
    return given(enter(x, part.axis)[index], moved(part, part.dim + first))


def _setitem(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Write to entries of a split tensor: each rank writes to its own."""
    x, items, value = first_split(args), _listed(*args[:2]), args[2]
    value = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    at, number = _at(x, items), value.dim() == 0 and not is_split(value)
    rows = items[at]
    if isinstance(rows, Tensor) and all(map(_is_full, [*items[:at], *items[at + 1 :]])):
        if not _is_mask(rows):
            mask = torch.zeros(x.part.length, dtype=torch.bool, device=x.device)
            rows = mask.index_fill(0, gather(rows), 1) if number and rows.dim() == 1 else _none()
        part = _masked(x, rows)[1]
        items[at] = with_parts_of(rows, moved(x.part, 0), rows.dim())
        func(x, tuple(items), with_parts_of(value, part, x.dim() - rows.dim() + 1))
    elif isinstance(rows, Tensor):
        target, index = _by_pairs(x, items)
        func(target, index, with_parts_of(value, x.part, index[0].dim())) if target is x else _none()
    elif split_in(items) or not isinstance(rows, int | slice) or int in map(type, items[:at]):
        raise NoRule
    else:
        items[at] = rows if isinstance(rows, slice) else slice(rows, rows + 1 or None)
        target = SHAPES["__getitem__"](Tensor.__getitem__, (x, tuple(items)), {})
        ELEMENTWISE["copy_"](Tensor.copy_, (target, value), {})


def _index_select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, dim, index = [*args, *kwargs.values()]
    return _getitem(func, (x, (*[slice(None)] * positive(dim, x.dim()), index)), {})


def _masked_select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, mask = [*args, *kwargs.values()]
    return _getitem(func, (x, mask), {}) if whole_shape(x) == whole_shape(mask) else _none()


def _nonzero(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the places of a split tensor that are not 0. Those in a rank's rows stay on this rank."""
    x = first_split(args)
    _, part = _masked(x, split(x != 0, x.part)) if x.part.dim == 0 else _none()
    places = _entries(x.part, x.part.axis.rank).to(x.device)
    found = x.nonzero()
    found = torch.cat([places[found[:, :1]], found[:, 1:]], 1)
    return given(tuple(found.unbind(1)) if called(func) == "where" or kwargs.get("as_tuple") else found, part)


def _rearranged(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Flip or roll the rows of a split tensor: what happens to the rows' numbers happens to the rows."""
    x = first_split(args)
    values = dict(zip(("input", "shifts", "dims") if called(func) == "roll" else ("input", "dims"), args, strict=False))
    values |= dict(kwargs)
    values.pop("input")
    dims = numbers((values.pop("dims", ()),)) or _none()
    if len(dims) > 1 or dims[0] % x.dim() != x.part.dim:
        return given(func(*args, **kwargs), x.part) if x.part.dim not in [d % x.dim() for d in dims] else _none()
    places = torch.arange(x.part.length)
    return picked(x, func(places, dims=0, **values) if values else func(places, (0,)))


def _aligned(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Gather or scatter along a dim that is not split."""
    names = ("input", "indices", "dim") if called(func) == "take_along_dim" else ("input", "dim", "index", "src")
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    like, x = split_in([*values.values()])[0].part, values["input"]
    tensors = [each for each in values.values() if isinstance(each, Tensor) and each.dim()]
    written = called(func).endswith("_")
    if values["dim"] is None or values["dim"] % x.dim() == like.dim or (written and not is_split(x)):
        raise NoRule
    if any(each.dim() != x.dim() or whole_shape(each)[like.dim] != like.length for each in tensors):
        raise NoRule
    own = [with_parts_of(each, like, x.dim()) for each in values.values()]
    made = func(*own[: len(args)], **dict(zip(list(values)[len(args) :], own[len(args) :], strict=True)))
    return x if written else given(made, like)


def _diagonal(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    if len(args) > 1 or kwargs or x.dim() != 2 or x.part.dim:
        raise NoRule
    rows = torch.arange(min(whole_shape(x)), device=x.device)
    return _getitem(func, (x, (rows, rows)), {})


RULES: dict[str, Rule] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "index_select": _index_select,
    "masked_select": _masked_select,
    **dict.fromkeys(["nonzero", "where", "argwhere"], _nonzero),
    **dict.fromkeys(["roll", "flip", "flipud"], _rearranged),
    **dict.fromkeys(["gather", "take_along_dim", "scatter", "scatter_", "scatter_add", "scatter_add_"], _aligned),
    **dict.fromkeys(["diag", "diagonal"], _diagonal),
}
"""The rules of this file. They apply where the rules of other files do not."""
