"""Compute sums, means and losses over split rows as terms (term.py).

Where they apply, the rules of this file take precedence over those of rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor

from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import Axis
from meshwise.parallel.splits.crossing import enter, gather
from meshwise.parallel.splits.losses import EACH_PLACE, NAMES, counted
from meshwise.parallel.splits.rule import HALF, moved, reduced_dims, with_parts_of
from meshwise.parallel.splits.tensor import SplitTensor, at_level, parts_of, split_again, whole_shape
from meshwise.parallel.splits.term import Known, Term, backward, resolved, settled, term
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, argument, called, on_parts
from meshwise.torch_compat.tree import map_kind

_numpy = Tensor.numpy  # torch's own method, which view="whole" replaces


def _parts(x: SplitTensor) -> AbstractContextManager[None]:
    return on_parts() if len(x.parts) == 1 else nullcontext()


def _over(total: Tensor, axis: Axis, count: float, dtype: torch.dtype) -> Term:
    """Return a sum divided by `count`, as a term of this dtype."""
    known = Known(axis, total.detach())
    if count == 1:
        return term(total.to(dtype), axis, known)
    return term((total / count).to(dtype), axis, Known(axis, parent=known, by=count, divides=True))


def _summed(mean: bool) -> Callable[[Func, Args, Kwargs], Any]:
    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x, dim = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim")
        with at_level(0):
            asked = reduced_dims(dim, x.dim())
            if x.part.dim not in asked or "out" in kwargs or (mean and not x.is_floating_point()):
                return NotImplemented
            count = math.prod(whole_shape(x)[each] for each in asked)
        with at_level(0), _parts(x):
            wide = {"dtype": torch.float32} if x.dtype in HALF and "dtype" not in kwargs else {}  # torch adds in fp32
            total = torch.sum(*args, **{**kwargs, **wide})
        return _over(total, x.parts[0].axis, count if mean else 1, x.dtype if wide else total.dtype)

    return rule


def _of_rows(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the cross entropy of split rows as a term (see term.py)."""
    values = dict(zip(NAMES[called(func)], args, strict=False)) | dict(kwargs)
    x, target, weight = values.pop("input"), values.pop("target"), values.pop("weight", None)
    reduction, old = values.pop("reduction", "mean"), [values.pop(each, None) for each in ("size_average", "reduce")]
    with at_level(0), _parts(x):
        part, probable = x.part, target.is_floating_point()
        alone = weight is not None and weight.requires_grad
        if reduction == "none" or part.dim == (x.dim() > 1) or old != [None, None] or alone:
            return NotImplemented
        rows = part if probable else moved(part, part.dim - (part.dim > 1))
        own = with_parts_of(target, rows, x.dim() - (not probable))
        weight = enter(gather(weight), part.axis) if weight is not None else None
        total = func(x, own, weight=weight, reduction="sum", **values)
        if reduction == "sum":
            return term(total, part.axis)
        number = math.prod(whole_shape(x)) // x.shape[1]
        if probable:
            return _over(total, part.axis, number, total.dtype)
        ignored = values.get("ignore_index", -100)
        if weight is None and len(x.parts) == 1 and type(own) in (Tensor, SplitTensor) and own.device.type == "cpu":
            count: Any = int(numpy.count_nonzero(_numpy(own) != ignored))  # faster than with tensors
        else:
            count = counted(own, weight, ignored)
        made = term(total, part.axis, Known(part.axis, total.detach(), count), max(number, 1))
    return made if "of_call" in x.__dict__ else settled(made)


def _each_place(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a loss with one term for each element, and reduce it as the program would by `sum` or `mean`."""
    options = dict(kwargs)
    reduction, old = options.pop("reduction", "mean"), [options.get(each) for each in ("size_average", "reduce")]
    if reduction == "none" or len(args) > 2 or old != [None, None]:
        return NotImplemented
    each = rules.dispatch(func, *map_kind(Term, resolved, (tuple(args), options | {"reduction": "none"})))
    return each.sum() if reduction == "sum" else each.mean() if reduction == "mean" else each.sum() / len(each)


def _gradient(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the `.grad` of a split tensor, divided by the `gradient_scale` of its axis."""
    with on_parts():
        found = func(args[0])
    if found is None:
        return None
    made = own_gradient(found, args[0])
    made.__dict__["of_gradient"] = True  # `made` is a copy, so dispatch.py refuses writes into it
    return made


def own_gradient(found: Tensor, x: SplitTensor) -> Tensor:
    """Return a gradient of `x` as a split tensor, divided by the axis's `gradient_scale`."""
    with on_parts():
        found = found / x.parts[0].axis.gradient_scale
    return split_again(found, parts_of(x))


RULES: dict[str, Callable[[Func, Args, Kwargs], Any]] = {
    "sum": _summed(mean=False),
    "mean": _summed(mean=True),
    **dict.fromkeys(NAMES, _of_rows),
    **dict.fromkeys(EACH_PLACE.split(), _each_place),
    "backward": backward,
    ".grad": _gradient,
}
