"""Convert whole tensors to split ones and back, with gradients.

Megatron-LM (arXiv:1909.08053) describes these conversions.

A whole tensor and its gradient are the same on all ranks of the axis. The gradient of a split tensor is split like the
tensor.

    enter     a whole tensor is about to be used with parts      backward: the ranks' gradients are added
    add_up    the ranks' values are added to a whole             backward: each rank gets the gradient of the whole
    gather    a split tensor becomes whole                       backward: each rank takes its part
    scatter   each rank takes its part of a whole                backward: the parts are gathered
    sum apart    a reduce-scatter: the ranks' values are added, each takes a part     backward: spread
    spread       an all-gather: a split tensor becomes whole, to be used with parts   backward: sum apart

The backward of each conversion is another conversion of this list, so each can be differentiated twice.

On an axis with a `gradient_scale` of n, the gradient of a part is n times that of the whole tensor. Gradients of
parameters, which each rank computes from its parts, are then averaged instead of summed, as in DDP and FSDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from meshwise.parallel.splits.axis import Axis, SplitPart
from meshwise.parallel.splits.tensor import (
    LEVELS,
    SplitTensor,
    at_level,
    is_split,
    level_of,
    parts_of,
    split,
    split_again,
)
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import on_parts

_entered: list[dict[tuple[int, str, int], tuple[Tensor, Tensor]]] = []
"""The conversions of each open `entering_once`: (id of tensor, axis name, version) -> (tensor, converted tensor)."""


@contextlib.contextmanager
def entering_once() -> Iterator[None]:
    """Within the context, let operators share the converted tensor if they use the same tensor through `enter` or
    `spread`."""
    _entered.append({})
    try:
        yield
    finally:
        _entered.pop()


def enter(whole: Tensor, axis: Axis) -> Tensor:
    """Return a whole tensor for operators that combine it with split tensors. Its values stay the same. The backward
    sums the gradients of the ranks.
    """
    if not (whole.requires_grad and torch.is_grad_enabled()) or axis.averages(whole):
        return whole
    return _once(whole, "enter", axis, axis.name)


def spread(tensor: Tensor, axis: Axis) -> Tensor:
    """Gather `tensor` for an operator that combines it with split tensors."""
    if not is_split(tensor):
        return enter(tensor, axis)
    return _once(tensor, "spread", tensor.part, axis.name)


def _once(tensor: Tensor, way: str, where: Any, axis: str) -> Tensor:
    if not _entered:
        return _crossed(tensor, way, where)
    key = id(tensor), axis, version(tensor)
    if key not in _entered[-1]:
        _entered[-1][key] = tensor, _crossed(tensor, way, where)
    return _entered[-1][key][1]


def add_up(value: Tensor, axis: Axis) -> Tensor:
    """Sum `value` over the ranks. The result is whole on each rank."""
    return _crossed(value, "add up", axis)


def averaged(value: Tensor, axis: Axis) -> Tensor:
    """Return the mean of the ranks' values. Each is the gradient that a rank has computed from its parts."""
    return through(_Crossing, value, "add up", axis, 1 / axis.size)


def add_apart(value: Tensor, axis: Axis) -> Tensor:
    """Sum `value` over the ranks. If the axis has `sequence`, each rank gets its positions of the sum."""
    if not axis.sequence or value.dim() != 3 or value.shape[1] < axis.size:
        return add_up(value, axis)
    part = SplitPart(axis, 1, value.shape[1])
    return split(_crossed(value, "sum apart", part), part)


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a split tensor. Any other tensor is returned unchanged."""
    while is_split(tensor):
        tensor = _crossed(tensor, "gather", tensor.part)
    return tensor


def gather_over(axis: str, tensor: Tensor) -> Tensor:
    """Gather a tensor over the axis named `axis`. Its splits over other axes stay."""
    level = LEVELS.index(axis)
    with at_level(level):
        whole = gather(tensor)
    return split_again(whole, [part for part in parts_of(tensor) if level_of(part) != level])


def scatter(whole: Tensor, part: SplitPart) -> SplitTensor:
    """Return this rank's part of a whole tensor as a split tensor."""
    part.axis.divides(whole, part.dim)
    return split(_crossed(whole, "scatter", part), part)


def _crossed(tensor: Tensor, way: str, where: Axis | SplitPart) -> Tensor:
    """Convert a tensor over one axis by the conversion `way`, such as "gather"."""
    if not isinstance(tensor, SplitTensor):
        return through(_Crossing, tensor, way, where)
    level = LEVELS.index(where.axis.name if isinstance(where, SplitPart) else where.name)
    for part in parts_of(tensor, level):
        if isinstance(where, SplitPart) and part.dim == where.dim:
            tensor = gather_over(part.axis.name, tensor)
    return kept_within(level, tensor, through(_Crossing, tensor, way, where))


def kept_within(level: int, tensor: Tensor, made: Tensor) -> Tensor:
    """Return `made` split in the same way as `tensor` over the axes of `LEVELS` that come after index `level`."""
    found = split_again(made, parts_of(tensor, level))
    if isinstance(found, SplitTensor) and getattr(tensor, "of_parameter", False):
        found.of_parameter = True  # type: ignore[attr-defined]
    return found


def through(function: Any, *given: Any) -> Tensor:
    """Apply an autograd function to the local values of tensors, which may be split."""
    with on_parts():
        made: Tensor = function.apply(*given)
    return made


class _Crossing(Function):
    """The autograd function that runs a conversion of `_WAYS`, and in its backward the opposite conversion."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, way: str, where: Any, factor: float = 1) -> Tensor:
        ctx.way, ctx.where, ctx.factor = way, where, factor  # type: ignore[attr-defined]
        made = _WAYS[way][0](tensor, where)
        return made if factor == 1 else made * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _, back, power = _WAYS[ctx.way]
        axis = ctx.where.axis if isinstance(ctx.where, SplitPart) else ctx.where
        factor = ctx.factor * axis.gradient_scale**power if power else ctx.factor
        return through(_Crossing, gradient, back, ctx.where, factor), None, None, None


_WAYS: dict[str, tuple[Callable[[Tensor, Any], Tensor], str, int]] = {
    "enter": (lambda whole, axis: whole.view_as(whole), "add up", -1),
    "add up": (lambda value, axis: axis.all_reduce(value.clone(memory_format=torch.contiguous_format)), "enter", 1),
    "gather": (lambda local, part: part.gathered(local), "scatter", 1),
    "scatter": (lambda whole, part: part.slice_of(whole), "gather", -1),
    "sum apart": (lambda value, part: part.summed(value), "spread", 0),
    "spread": (lambda local, part: part.gathered(local), "sum apart", 0),
}
"""For each conversion: its function, the conversion that its backward runs, and the power of the axis's
`gradient_scale` by which that backward multiplies. The module's docstring lists the conversions."""
