"""Compute softmax and losses over a split dim.

If the vocabulary is split, the ranks exchange a few numbers per row. If rows are split, they exchange only the sum.

This is the vocabulary-parallel cross entropy of Megatron-LM, with label smoothing and ignored targets, but without
class weights.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.splits.along import RULES as ALONG
from meshwise.parallel.splits.crossing import add_up, enter, gather
from meshwise.parallel.splits.elementwise import RULES as ELEMENTWISE
from meshwise.parallel.splits.rule import HALF, NoRule, Rule, first_split, moved, with_parts_of
from meshwise.parallel.splits.tensor import SplitTensor, is_split, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, argument, called, named, on_parts

OF_ROWS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
NAMES = {"cross_entropy": (*OF_ROWS, "label_smoothing"), "nll_loss": OF_ROWS}
EACH_PLACE = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
kl_div soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss"""


def _as_given(made: Tensor, func: Func, x: Tensor, *rest: Any) -> Tensor:
    """Cast `made` to the dtype that torch's `func(x, *rest)` returns."""
    return made.to(func(x.new_zeros([1] * x.dim()), *rest).dtype) if x.dtype in HALF else made


def _log_sum(x: SplitTensor) -> tuple[Tensor, Tensor]:
    """Return `x` minus its maximum, and the logarithm of the sum of its exponentials, along the split dim."""
    part = x.part
    if x.dtype in HALF:  # like torch, sum in float32
        x = split(x.to(torch.float32), part)
    largest = x.detach().amax(part.dim, keepdim=True) if part.own else x.new_full(_one(x, part.dim), -torch.inf)
    with on_parts():
        part.axis.all_reduce(largest, "max")
    below = x - torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    return below, add_up(below.exp().sum(part.dim, keepdim=True), part.axis).log()


def _one(x: Tensor, dim: int) -> list[int]:
    return [1 if d == dim else size for d, size in enumerate(x.shape)]


def _softmax(log: bool) -> Rule:
    other = ALONG["log_softmax"]

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x, dim = first_split(args), argument(args, kwargs, 1, "dim")
        if not isinstance(dim, int) or dim % x.dim() != x.part.dim:
            return other(func, args, kwargs)
        dtype = kwargs.get("dtype")
        if dtype is not None:
            x = split(x.to(dtype), x.part) if x.dtype != dtype else x
        below, total = _log_sum(x)
        logs = below - enter(total, x.part.axis)
        return split(_as_given(logs if log else logs.exp(), func, x, dim), x.part)

    return rule


def _cross_entropy(func: Func, args: Args, kwargs: Kwargs) -> Any:
    values = named(NAMES[called(func)], args, kwargs)
    x, target = values["input"], values["target"]
    classes = 1 if x.dim() > 1 else 0
    if values.get("size_average") is not None or values.get("reduce") is not None or not is_split(x):
        raise NoRule
    if x.part.dim != classes:
        return _over_rows(func, values)
    unknown = values.get("weight") is not None or is_split(target) or target.is_floating_point()
    if unknown or not x.part.is_plain or called(func) != "cross_entropy":
        raise NoRule
    axis, below, smoothing = x.part.axis, _log_sum(x), values.get("label_smoothing", 0.0)
    rows, total = below[0], below[1].squeeze(classes)
    losses = total - add_up(_own_targets(rows, target, x, classes), axis)
    if smoothing:
        even = total - add_up(rows.sum(classes), axis) / x.part.length
        losses = (1 - smoothing) * losses + smoothing * even
    reduced = _reduced(losses, target != values.get("ignore_index", -100), values.get("reduction", "mean"))
    return _as_given(reduced, func, x, target.new_zeros([1] * target.dim()))


def _over_rows(func: Func, values: dict[str, Any]) -> Any:
    """Compute a loss, such as a cross entropy, of rows that are split over the ranks."""
    x, target, weight = values.pop("input"), values.pop("target"), values.pop("weight", None)
    part, reduction = x.part, values.pop("reduction", "mean")
    rows = moved(part, part.dim - (part.dim > 1))
    probable = target.is_floating_point()
    own = with_parts_of(target, part, x.dim()) if probable else with_parts_of(target, rows, x.dim() - 1)
    weight = enter(gather(weight), part.axis) if weight is not None else None
    losses = func(x, own, weight=weight, reduction="none" if reduction == "none" else "sum", **values)
    if reduction == "none":
        return split(losses, rows)
    total = add_up(losses, part.axis)
    if reduction == "sum":
        return total
    if probable:
        return total / (math.prod(whole_shape(x)) // x.shape[1])
    whole = not is_split(target)
    counts = counted(target if whole else own, weight, values.get("ignore_index", -100))
    return total / (counts if whole else add_up(counts, part.axis))


def counted(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return the number of targets that are not ignored, or with `weight` the sum of their weights."""
    counted = target != ignored
    return counted.sum() if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum()


def _each_place(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a loss with one term for each element, such as `mse_loss`, on split tensors."""
    options = dict(kwargs)
    reduction = options.pop("reduction", "mean")
    if (
        not all(isinstance(each, Tensor) for each in args)
        or options.pop("size_average", None) is not None
        or options.pop("reduce", None) is not None
    ):
        raise NoRule
    losses = ELEMENTWISE["add"](partial(func, reduction="none"), args, options)
    if reduction == "none":
        return losses
    total = ALONG["mean" if reduction == "mean" else "sum"](torch.sum, (losses,), {})
    return total / whole_shape(losses)[0] if reduction == "batchmean" else total


def _own_targets(rows: Tensor, target: Tensor, x: SplitTensor, classes: int) -> Tensor:
    """Return the value of each row at its target class if this rank holds that class, and 0 otherwise."""
    own = target - x.part.begin
    elsewhere = (own < 0) | (own >= x.part.own)
    if x.part.own == 0:
        return rows.sum(classes)
    found = rows.gather(classes, own.masked_fill(elsewhere, 0).unsqueeze(classes)).squeeze(classes)
    return found.masked_fill(elsewhere, 0)


def _reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    losses = torch.where(counted, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


RULES: dict[str, Rule] = {
    "softmax": _softmax(log=False),
    "log_softmax": _softmax(log=True),
    **dict.fromkeys(NAMES, _cross_entropy),
    **dict.fromkeys(EACH_PLACE.split(), _each_place),
}
