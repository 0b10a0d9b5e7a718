"""Softmax and cross entropy over a split dim (a vocabulary): numbers of each row are exchanged, never the row.

As Megatron-LM's vocabulary-parallel cross entropy; with class weights left out, label smoothing and ignored targets in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.split.crossing import add_up, enter
from meshwise.parallel.split.rule import NoRule, Rule
from meshwise.parallel.split.shapes import RULES as SHAPES
from meshwise.parallel.split.tensor import SplitTensor, split

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _log_sum(x: SplitTensor) -> tuple[Tensor, Tensor]:
    """The part less the largest of its whole row, and the log of the row's sum of exponentials of that; both of one
    shape but for the split dim."""
    part = x.part
    largest = x.detach().amax(part.dim, keepdim=True) if part.own else x.new_full(_one(x, part.dim), -torch.inf)
    part.axis.all_reduce(largest, "max")
    below = x - torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    return below, add_up(below.exp().sum(part.dim, keepdim=True), part.axis).log()


def _one(x: Tensor, dim: int) -> list[int]:
    return [1 if d == dim else size for d, size in enumerate(x.shape)]


def _softmax(log: bool) -> Rule:
    other = SHAPES["log_softmax"]

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(x, SplitTensor) or not isinstance(dim, int) or dim % x.dim() != x.part.dim:
            return other(func, args, kwargs)
        dtype = kwargs.get("dtype")
        if dtype is not None:
            x = split(x.to(dtype), x.part) if x.dtype != dtype else x
        below, total = _log_sum(x)
        logs = below - enter(total, x.part.axis)
        return split(logs if log else logs.exp(), x.part)

    return rule


def _cross_entropy(func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    x, target, smoothing = values["input"], values["target"], values.get("label_smoothing", 0.0)
    classes = 1 if x.dim() > 1 else 0
    unknown = values.get("weight") is not None or values.get("size_average") is not None or values.get("reduce")
    if unknown or not isinstance(x, SplitTensor) or x.part.dim != classes or isinstance(target, SplitTensor):
        raise NoRule
    if target.is_floating_point():
        raise NoRule
    axis, below = x.part.axis, _log_sum(x)
    rows, total = below[0], below[1].squeeze(classes)
    losses = total - add_up(_own_targets(rows, target, x, classes), axis)
    if smoothing:
        even = total - add_up(rows.sum(classes), axis) / x.part.length
        losses = (1 - smoothing) * losses + smoothing * even
    return _reduced(losses, target != values.get("ignore_index", -100), values.get("reduction", "mean"))


def _own_targets(rows: Tensor, target: Tensor, x: SplitTensor, classes: int) -> Tensor:
    """Of each row the value of its target, where this rank has it; else 0."""
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
    "cross_entropy": _cross_entropy,
}
