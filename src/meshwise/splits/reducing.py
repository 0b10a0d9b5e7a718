"""Reduce a split dim: each rank reduces its entries, then all reduce the ranks' few results.

Sums of all kinds are added up over the ranks. Of other results, such as a largest entry, all ranks gather those of each
rank, and reduce them once more.

Tested in tests/splits/test_row_rules.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.torch_function import called
from meshwise.splits.axis import SplitPart
from meshwise.splits.crossing import add_up, enter, gather
from meshwise.splits.elementwise import RULES as ELEMENTWISE
from meshwise.splits.rows import summed_now
from meshwise.splits.rule import NoRule, Rule, first_split, given, moved, with_parts_of
from meshwise.splits.tensor import SplitTensor, is_split, split, whole_shape

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _asked(x: Tensor, dim: Any) -> list[int]:
    """Return the dims over which an operator reduces. None and () stand for all."""
    dims = [dim] if isinstance(dim, int) else dim
    return sorted(each % x.dim() for each in dims) if dims else list(range(x.dim()))


def _over(x: SplitTensor, dim: Any) -> list[int]:
    """Return the dims over which an operator reduces. Raise NoRule if the split dim is not one of them, if it has no
    entries at all, or if its parts are not in the order of the ranks."""
    part, dims = x.part, _asked(x, dim)
    held = [piece for rank in range(part.axis.size) for piece in part.of_rank(rank)]
    if (
        part.dim not in dims
        or not part.length
        or part.repeats > 1
        or held != sorted(held)
        or x.numel() == 0 != part.own
    ):
        raise NoRule
    return dims


def _filled(x: SplitTensor) -> Tensor:
    """Return this rank's part, or one entry of zeros for a rank that holds none."""
    shape = [1 if dim == x.part.dim else length for dim, length in enumerate(x.shape)]
    return x if x.part.own else torch.cat([x, x.new_zeros(shape)], x.part.dim)


def _of_all(found: Tensor, part: SplitPart, dim: int, most: int = 1) -> Tensor:
    """Gather the entries along `dim` that the ranks have found: each as many as it holds of `part`, but at most
    `most`."""
    counts = [min(part.held(rank), most) for rank in range(part.axis.size)]
    ends = [0, *itertools.accumulate(counts)]
    into = replace(part, dim=dim).divided([[each] for each in itertools.pairwise(ends)], ends[-1])
    return gather(split(found.narrow(dim, 0, into.own), into))


def _named(args: Args, kwargs: Kwargs, *names: str) -> dict[str, Any]:
    values = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    if "axis" in values:
        values["dim"] = values.pop("axis")
    if set(values) - {*names}:
        raise NoRule
    return values


def _twice(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Reduce this rank's entries, and then the results of all ranks, by the same operator."""
    x = first_split(args)
    values = _named(args, kwargs, "dim", "keepdim")
    _over(x, values.get("dim"))
    if values.get("dim") is None:
        return func(_of_all(func(_filled(x)).reshape(1), x.part, 0))
    dim = values["dim"]
    return func(_of_all(func(_filled(x), dim, keepdim=True), x.part, x.part.dim), dim, values.get("keepdim", False))


def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    values = _named(args, {k: v for k, v in kwargs.items() if v is not None}, "p", "dim", "keepdim", "ord")
    p, dim = values.get("ord", values.get("p")), values.get("dim")
    p, keep, dims = 2 if p in (None, "fro") else p, values.get("keepdim", False), _asked(x, dim)
    if not isinstance(p, int | float) or p <= 0:
        raise NoRule
    if x.part.dim not in dims:
        gone = 0 if keep else sum(each < x.part.dim for each in dims)
        return given(torch.linalg.vector_norm(x, p, dims, keep), moved(x.part, x.part.dim - gone))
    if p == math.inf:
        return _amax(torch.amax, (split(x.abs(), x.part), dims, keep), {})
    _over(x, dims)
    found = _of_all(torch.linalg.vector_norm(_filled(x), p, dims, True), x.part, x.part.dim)
    return torch.linalg.vector_norm(found, p, dims, keep)


def _amax(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest (or smallest) entries. Equal ones have equal shares of the gradient."""
    x = first_split(args)
    values = _named(args, kwargs, "dim", "keepdim")
    dims, keep = _over(x, values.get("dim", ())), values.get("keepdim", False)
    least = torch.amax if called(func) in ("amax", "max") else torch.amin
    with torch.no_grad():
        whole = least(_of_all(least(_filled(x), dims, keepdim=True), x.part, x.part.dim), dims, keepdim=True)
        here = (x == whole) | ((x != x) & (whole != whole))
        share = here.to(x.dtype) / summed_now(here.sum(dims, keepdim=True), x.part)
    found = whole if keep else whole.squeeze(dims)
    if not x.requires_grad or not torch.is_grad_enabled():
        return found
    shared = x.masked_fill(~here | x.isinf(), 0) * share
    return found + add_up((shared - shared.detach()).sum(dims, keepdim=keep), x.part.axis)


def _largest(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest (or smallest) entries along the split dim, with their places."""
    x, name = first_split(args), called(func)
    if name in ("max", "min") and len(args) + len(kwargs) == 1:
        return _amax(func, args, kwargs)
    if any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):  # of two tensors
        return ELEMENTWISE["maximum"](func, args, kwargs)
    if name in ("argmax", "argmin"):
        return _argmax(x, name[3:], _named(args, kwargs, "dim", "keepdim"))
    names = ("k", "dim", "largest", "sorted") if name == "topk" else ("dim", "keepdim")
    values = _named(args, kwargs, *names)
    dim, keep = values.pop("dim", -1), values.pop("keepdim", name == "topk")
    if not isinstance(dim, int):
        raise NoRule
    dim, most = _over(x, dim)[0], values.pop("k", 1)
    options = {"dim": dim, **values} if name == "topk" else {"dim": dim, "keepdim": True}
    local = _filled(x)
    first = func(local, min(most, local.shape[dim]), **options) if name == "topk" else func(local, **options)
    found, at = (_of_all(each, x.part, dim, most) for each in (first[0], first[1] + _begin(x.part)))
    if name == "topk" and found.shape[dim] < most:
        raise NoRule  # torch says so
    made = func(found, most, **options) if name == "topk" else func(found, **options)
    places = at.gather(dim, made[1])
    return type(made)((made[0], places) if keep else (made[0].squeeze(dim), places.squeeze(dim)))


def _begin(part: SplitPart) -> int:
    return next((begin for begin, _ in part.of_rank(part.axis.rank)), 0)


def _argmax(x: SplitTensor, name: str, values: dict[str, Any]) -> Tensor:
    dim, keep, x = values.get("dim"), values.get("keepdim", False), split(x.detach(), x.part)
    if dim is not None:
        return _largest(getattr(torch, name), (x, dim, keep), {})[1]  # type: ignore[no-any-return]
    if x.part.dim or keep:
        raise NoRule
    rest = whole_shape(x)[1:].numel()
    _over(x, 0)
    best, at = getattr(torch, name)(_filled(x).flatten(), 0)
    best, at = (_of_all(each.reshape(1), x.part, 0) for each in (best, at + _begin(x.part) * rest))
    found: Tensor = at[getattr(torch, name)(best, 0)[1]]
    return found


def _spread(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a variance or standard deviation, with the mean if the operator returns it."""
    x, name = first_split(args), called(func)
    if len(args) > 1 and isinstance(args[1], bool):
        args = (args[0], None, *args[1:])
    values = _named(args, kwargs, "dim", "unbiased", "keepdim", "correction")
    dims, keep = _over(x, values.get("dim")), values.get("keepdim", False)
    correction = values.get("correction", int(values.get("unbiased", True)))
    correction, count = 1 if correction is None else correction, math.prod(whole_shape(x)[dim] for dim in dims)
    mean = summed_now(x.sum(dims, keepdim=True), x.part) / count
    squares = (x - enter(mean, x.part.axis)).square().sum(dims, keepdim=keep)
    made = add_up(squares, x.part.axis) / max(count - correction, 0)
    if name.startswith("std"):
        none = made == 0
        made = made.masked_fill(none, 1).sqrt().masked_fill(none, 0)
    return (made, mean if keep else mean.squeeze(dims)) if name.endswith("mean") else made


def _cumsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Add up entries along the split dim: each rank adds what the ranks before it hold."""
    x = first_split(args)
    dim = _over(x, _named(args, kwargs, "dim")["dim"])[0]
    if dim:
        raise NoRule
    before = replace(x.part, length=x.part.axis.size, pieces=None)
    totals = gather(split(x.sum(dim, keepdim=True), before))
    return given(
        x.cumsum(dim) + enter(totals, x.part.axis).narrow(dim, 0, x.part.axis.rank).sum(dim, keepdim=True), x.part
    )


def _counted(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Count the numbers in a split tensor."""
    x = first_split(args)
    values = _named(args, kwargs, "weights", "minlength")
    most = x.max() + 1 if len(x) else torch.zeros((), dtype=x.dtype, device=x.device)
    bins = max(int(x.part.axis.all_reduce(most.long(), "max")), values.get("minlength", 0))
    weights = values.get("weights")
    own = None if weights is None else with_parts_of(weights, x.part, 1)
    made = torch.bincount(x, own, bins)
    return add_up(made if own is None or own.numel() else own.new_zeros(bins), x.part.axis)


def _one_hot(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = first_split(args)
    classes = [*args[1:], *(value for name, value in kwargs.items() if name == "num_classes"), -1][0]
    if classes < 0:
        most = x.max() + 1 if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)
        classes = int(x.part.axis.all_reduce(most, "max"))
    return given(torch.nn.functional.one_hot(x, classes), x.part)


def _accumulated(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Add split rows to entries of a whole tensor: each rank adds its rows to zeros, and the ranks' results are added
    up."""
    if len(args) != 4 or kwargs or not isinstance(args[3], Tensor) or is_split(args[0]):
        raise NoRule
    x, dim, index, source = args[0], args[1] % args[0].dim(), args[2], args[3]
    like = source if is_split(source) else index
    if like.part.dim != (dim if like.dim() > 1 else 0):
        raise NoRule
    own = [with_parts_of(each, moved(like.part, dim if each.dim() > 1 else 0), each.dim()) for each in (index, source)]
    made = add_up(func(torch.zeros_like(x), dim, *own), like.part.axis)
    return x.add_(made) if called(func).endswith("_") else x + made


def _first_alone(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator on each entry of its first tensor, with the whole of any other."""
    x = first_split(args)
    return given(func(x, *map(gather, args[1:]), **kwargs), x.part)


def _contains(func: Func, args: Args, kwargs: Kwargs) -> bool:
    return bool(_twice(torch.any, (ELEMENTWISE["eq"](torch.eq, args, {}),), {}))


def _equal(func: Func, args: Args, kwargs: Kwargs) -> bool:
    x, y = args[:2]
    if whole_shape(x) != whole_shape(y):
        return False
    same = ELEMENTWISE["eq"](torch.isclose if called(func) == "allclose" else torch.eq, args, kwargs)
    return bool(_twice(torch.all, (same,), {})) if whole_shape(x).numel() else True


RULES: dict[str, Rule] = {
    **dict.fromkeys(["all", "any", "prod", "logsumexp", "_is_all_true", "_is_any_true"], _twice),
    **dict.fromkeys(["norm", "linalg_vector_norm", "linalg_norm"], _norm),
    **dict.fromkeys(["amax", "amin"], _amax),
    **dict.fromkeys(["max", "min", "argmax", "argmin", "topk"], _largest),
    **dict.fromkeys(["std", "var", "std_mean", "var_mean"], _spread),
    **dict.fromkeys(["index_add", "index_add_", "scatter_add", "scatter_add_"], _accumulated),
    **dict.fromkeys(["isin", "bucketize"], _first_alone),
    **dict.fromkeys(["equal", "allclose"], _equal),
    "cumsum": _cumsum,
    "bincount": _counted,
    "one_hot": _one_hot,
    "__contains__": _contains,
}
"""The rules of this file. They apply where the rules of other files do not."""
