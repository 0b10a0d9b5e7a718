"""Reduce a split dim: each rank's entries, then the ranks' results.

Sums of all kinds are added up over the ranks. Other results, such as a largest entry, are gathered
from all ranks and reduced once more.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import add_up, enter, gather, scatter
from meshwise.parallel.splits.elementwise import RULES as ELEMENTWISE
from meshwise.parallel.splits.rows import alone, filled
from meshwise.parallel.splits.rule import HALF, NoRule, Rule, first_split, given, moved, refuse, with_parts_of
from meshwise.parallel.splits.shapes import RULES as SHAPES
from meshwise.parallel.splits.tensor import SplitTensor, is_split, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, called, named


def _asked(args: Args, kwargs: Kwargs, *names: str) -> tuple[SplitTensor, list[int], dict[str, Any]]:
    """Return the split tensor that an operator reduces, the dims over which it reduces, and its options by name."""
    x, values = first_split(args), named(names, args[1:], kwargs)
    dim, part = values.setdefault("dim", None), x.part
    dims = [dim] if isinstance(dim, int) else [*(dim or range(x.dim()))]
    held = [piece for pieces in part.ranges for piece in pieces]
    known = not set(values) - {*names, "dim"} and part.repeats == 1 and held == sorted(held)
    if not known or part.dim not in [each % x.dim() for each in dims] or not whole_shape(x).numel():
        raise NoRule
    return x, dims, values


def _of_all(found: Tensor, part: SplitPart, dim: int, most: int = 1) -> Tensor:
    """Gather `found` along `dim` from all ranks. A rank sends as many entries as it holds of `part`, but at most
    `most`."""
    ends = list(itertools.accumulate((min(part.held(rank), most) for rank in range(part.axis.size)), initial=0))
    into = replace(part, dim=dim).divided([[each] for each in itertools.pairwise(ends)], ends[-1])
    return gather(split(found.narrow(dim, 0, into.own), into))


def _summed(value: Tensor, part: SplitPart) -> Tensor:
    """Return the sum of the ranks' values as a whole tensor, with gradients."""
    each = replace(part, dim=0, length=part.axis.size, pieces=None)
    return gather(split(value.unsqueeze(0), each)).sum(0)


def _twice(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Reduce this rank's entries, and then the results of all ranks, by the same operator."""
    x, _, values = _asked(args, kwargs, "dim", "keepdim")
    if values["dim"] is None:
        return func(_of_all(func(filled(x, x.part)).reshape(1), x.part, 0))
    found = func(filled(x, x.part), values["dim"], keepdim=True)
    return func(_of_all(found, x.part, x.part.dim), values["dim"], values.get("keepdim", False))


def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    options = {name.replace("ord", "p"): value for name, value in kwargs.items() if value is not None}
    x, dims, values = _asked(args, options, "p", "dim", "keepdim")
    p, keep = values.get("p"), values.get("keepdim", False)
    p = 2 if p in ("fro", None) else p if isinstance(p, int | float) and p > 0 else refuse()
    if p == math.inf:
        return _amax(torch.amax, (split(x.abs(), x.part), dims, keep), {})
    # Round half precision only once, as on one device.
    found = torch.linalg.vector_norm(filled(x, x.part), p, dims, True, dtype=torch.float32 if x.dtype in HALF else None)
    return torch.linalg.vector_norm(_of_all(found, x.part, x.part.dim), p, dims, keep).to(x.dtype)


def _amax(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest (or smallest) entries. Equal ones have equal shares of the gradient."""
    x, dims, values = _asked(args, kwargs, "dim", "keepdim")
    least, keep = torch.amax if "max" in called(func) else torch.amin, values.get("keepdim", False)
    with torch.no_grad():
        whole = least(_of_all(least(filled(x, x.part), dims, True), x.part, x.part.dim), dims, True)
        here = (x == whole) | ((x != x) & (whole != whole))
        share = here.to(x.dtype) / _summed(here.sum(dims, True), x.part)
    found = whole if keep else whole.squeeze(dims)
    if not x.requires_grad or not torch.is_grad_enabled():
        return found
    shared = x.masked_fill(~here | x.isinf(), 0) * share
    return found + add_up((shared - shared.detach()).sum(dims, keep), x.part.axis)


def _largest(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest (or smallest) entries along the split dim, with their indices."""
    topk = called(func) == "topk"
    if not topk and any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):  # a maximum of two tensors
        return ELEMENTWISE["maximum"](func, args, kwargs)
    if len(args) + len(kwargs) == 1:
        return _amax(func, args, kwargs)
    options = {"dim": -1} | dict(kwargs) if topk and len(args) < 3 else kwargs
    names = ("k", "dim", "largest", "sorted") if topk else ("dim", "keepdim")
    x, (dim, *_), values = _asked(args, options, *names)
    most, keep, local = int(values.pop("k", 1)), values.pop("keepdim", topk), filled(x, x.part)
    more = (values if topk else {"dim": dim, "keepdim": True}) if isinstance(values["dim"], int) else refuse()
    if most > whole_shape(x)[dim]:
        raise NoRule  # on whole tensors, torch raises its error for a `k` that is too large
    first = func(local, *([min(most, local.shape[dim])] if topk else []), **more)
    begin = next((begin for begin, _ in x.part.of_rank(x.part.axis.rank)), 0)
    found, at = (_of_all(each, x.part, x.part.dim, most) for each in (first[0], first[1] + begin))
    made = func(found, *([most] if topk else []), **more)
    both = made[0], at.gather(dim, made[1])
    return type(made)(both if keep else [each.squeeze(dim) for each in both])


def _place(func: Func, args: Args, kwargs: Kwargs) -> Any:
    values = named(("dim", "keepdim"), args[1:], kwargs)
    x = split(first_split(args).detach(), args[0].part)
    if values.get("dim") is None:
        x, values = SHAPES["flatten"](torch.flatten, (x,), {}) if not values.get("keepdim") else refuse(), {"dim": 0}
    return _largest(getattr(torch, called(func)[3:]), (x,), values)[1]


def _spread(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a variance or standard deviation, with the mean if the operator returns it."""
    args = (args[0], None, *args[1:]) if len(args) > 1 and isinstance(args[1], bool) else args
    x, dims, values = _asked(args, kwargs, "dim", "unbiased", "keepdim", "correction")
    keep, correction = values.get("keepdim", False), values.get("correction")
    correction = values.get("unbiased") is not False if correction is None else correction
    count = math.prod(whole_shape(x)[dim] for dim in dims)
    free = count - correction if count > correction else refuse()  # otherwise, torch warns on whole tensors
    mean = _summed(x.sum(dims, True), x.part) / count
    squares = (x - enter(mean, x.part.axis)).square().sum(dims, keep)
    made = add_up(squares, x.part.axis) / free
    if called(func).startswith("std"):
        none = made == 0
        made = made.masked_fill(none, 1).sqrt().masked_fill(none, 0)
    return (made, mean if keep else mean.squeeze(dims)) if "mean" in called(func) else made


def _batch_norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run batch norm on rows. In training, its statistics are those of all rows on all ranks."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    values = named(names, args, kwargs)
    x, momentum = first_split(args) if func is functional.batch_norm else refuse(), values["momentum"]
    count, shape = whole_shape(x).numel() // max(x.shape[1], 1), [-1, *[1] * (x.dim() - 2)]
    if not values["training"] or x.part.dim == 1 or count < 2:
        return refuse() if values["training"] else alone(1, 2)(func, args, kwargs)
    wide, dims = split(x.to(torch.promote_types(x.dtype, torch.float32)), x.part), [0, *range(2, x.dim())]
    var, mean = _spread(torch.var_mean, (wide, dims), {"correction": 0})
    made = (wide - enter(mean, x.part.axis).view(shape)) * enter((var + values["eps"]).rsqrt(), x.part.axis).view(shape)
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if values[name] is not None:
            made = apply(made, enter(gather(values[name]), x.part.axis).view(shape))
    for kept, new in zip([values[name] for name in names[1:3]], (mean, var * (count / (count - 1))), strict=True):
        if kept is not None:
            kept.mul_(1 - momentum).add_(new.detach().to(kept.dtype), alpha=momentum)
    return given(made.to(x.dtype), x.part)


def _cumsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute the running sum of rows: each rank adds the totals of the ranks before it."""
    x, (dim,), _ = _asked(args, kwargs, "dim") if not args[0].part.dim else refuse()
    totals = gather(split(x.sum(dim, True), replace(x.part, length=x.part.axis.size, pieces=None)))
    return given(x.cumsum(dim) + enter(totals, x.part.axis)[: x.part.axis.rank].sum(dim, True), x.part)


def _classes(x: SplitTensor, least: int = 0) -> int:
    """Return the number of classes, given a tensor of their indices."""
    most = x.max() + 1 if x.numel() else x.new_zeros(())
    return max(least, int(x.part.axis.all_reduce(most, "max")))


def _counted(func: Func, args: Args, kwargs: Kwargs) -> Any:
    values = named(("input", "weights", "minlength"), args, kwargs)
    x, weights = first_split(args), values.get("weights")
    own, classes = with_parts_of(weights, x.part, 1), _classes(x, values.get("minlength", 0))
    return add_up(torch.bincount(x, own, classes).to(x.dtype if own is None else own.dtype), x.part.axis)


def _one_hot(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, classes = first_split(args), [*args[1:], kwargs.get("num_classes", -1)][0]
    return given(functional.one_hot(x, classes if classes >= 0 else _classes(x)), x.part)


def _accumulated(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Add split rows to entries of a tensor: each rank adds its rows to zeros, and the ranks' results are added up."""
    fits = len(args) == 4 and not kwargs and isinstance(args[3], Tensor)
    x, dim, index, source = (args[0], args[1] % args[0].dim(), *args[2:]) if fits else refuse()
    like = source if is_split(source) else index if is_split(index) else refuse()
    if like.part.dim != (dim if like.dim() > 1 else 0) or (is_split(x) and x.part.dim != dim):
        raise NoRule
    own = [with_parts_of(each, moved(like.part, dim if each.dim() > 1 else 0), each.dim()) for each in (index, source)]
    made = add_up(func(x.new_zeros(whole_shape(x)), dim, *own), like.part.axis)
    made = scatter(made, x.part) if is_split(x) else made
    return x.add_(made) if called(func).endswith("_") else given(x + made, x.part) if is_split(x) else x + made


RULES: dict[str, Rule] = {
    **dict.fromkeys(["all", "any", "prod", "logsumexp", "_is_all_true", "_is_any_true"], _twice),
    **dict.fromkeys(["norm", "linalg_vector_norm", "linalg_norm"], _norm),
    **dict.fromkeys(["amax", "amin"], _amax),
    **dict.fromkeys(["max", "min", "topk"], _largest),
    **dict.fromkeys(["argmax", "argmin"], _place),
    **dict.fromkeys(["std", "var", "std_mean", "var_mean"], _spread),
    **dict.fromkeys(["index_add", "index_add_", "scatter_add", "scatter_add_"], _accumulated),
    "batch_norm": _batch_norm,
    "cumsum": _cumsum,
    "bincount": _counted,
    "one_hot": _one_hot,
    "__contains__": lambda func, args, kwargs: bool(_twice(torch.any, (ELEMENTWISE["eq"](torch.eq, args, {}),), {})),
}
"""The rules of this file. They apply where the rules of other files do not."""
