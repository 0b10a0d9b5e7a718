"""Run operators along dims, on parts where these dims are not split.

The operators may remove the dims; partial sums over a split dim are summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.crossing import add_up, enter
from meshwise.parallel.splits.rule import (
    NoRule,
    Rule,
    first_split,
    given,
    moved,
    only_split,
    positive,
    reduced_dims,
    with_parts_of,
)
from meshwise.parallel.splits.tensor import is_split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, argument, named

REDUCED = """amax amin std var std_mean var_mean logsumexp argmax argmin max min all any prod median nanmedian mode
nansum nanmean count_nonzero cummax cummin logcumsumexp"""


def along(at: int, default: Any = None) -> Rule:
    """Make a rule for operators that combine the entries along one or several dims and leave all other dims
    independent, such as a softmax."""

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x = first_split(args)
        only_split(args, kwargs, x)
        dim = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("dims", default))
        asked = [positive(each, x.dim()) for each in (dim if isinstance(dim, Sequence) else [dim])]
        if x.part.dim in asked:
            raise NoRule
        result = func(*args, **kwargs)
        dims = (result if isinstance(result, Tensor) else [*result, x][0]).dim()
        gone = sum(each < x.part.dim for each in asked) if dims < x.dim() else 0
        return given(result, moved(x.part, x.part.dim - gone))

    return rule


def _summed(mean: bool) -> Rule:
    """Make the rule by which `torch.sum` or `torch.mean` runs on split tensors (see `RULES`)."""
    other = along(1)

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        x = first_split(args)
        asked = reduced_dims(argument(args, kwargs, 1, "dim"), x.dim())
        if x.part.dim not in asked:
            return other(func, args, kwargs)
        total = torch.sum(*args, **kwargs)
        whole = add_up(total, x.part.axis)
        return whole / math.prod(whole_shape(x)[each] for each in asked) if mean else whole

    return rule


def _normalised(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a layer norm on this rank's part of a split tensor."""
    x = first_split(args)
    shape = argument(args, kwargs, 1, "normalized_shape")
    if x.part.dim >= x.dim() - len(shape):
        raise NoRule
    only_split(args, kwargs, x)
    new = [enter(each, x.part.axis) if isinstance(each, Tensor) else each for each in args[1:]]
    options = {k: enter(each, x.part.axis) if isinstance(each, Tensor) else each for k, each in kwargs.items()}
    return given(func(x, *new, **options), x.part)


def _batch_norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run batch norm on a tensor whose channels are split."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    values = named(names, args, kwargs)
    x, rest = values.pop("input"), args[len(names) :]
    if func is not functional.batch_norm or not is_split(x) or x.part.dim != 1:
        raise NoRule
    part = moved(x.part, 0)
    if not all(part.held(rank) for rank in range(part.axis.size)):
        raise NoRule
    kept = {name: values[name] for name in names[1:3] if values.get(name) is not None}
    own = {name: part.slice_of(whole).clone() for name, whole in kept.items()}
    scale, shift = (with_parts_of(values.get(name), part, 1) for name in ("weight", "bias"))
    options = {name: value for name, value in values.items() if name not in names[:5]}
    training = options.pop("training", False)
    made = func(x, own.get("running_mean"), own.get("running_var"), scale, shift, training, *rest, **options)
    if training and own:
        new = moved(part, 1).gathered(torch.stack([*own.values()]))
        for whole, row in zip(kept.values(), new, strict=True):
            whole.copy_(row)
    return given(made, x.part)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "flip"], along(1)),
    **dict.fromkeys(["sort", "argsort", "glu"], along(1, -1)),
    "normalize": along(2, 1),
    "topk": along(2, -1),
    **dict.fromkeys(REDUCED.split(), along(1)),
    "kthvalue": along(2, -1),
    "diff": along(2, -1),
    **dict.fromkeys(["norm", "linalg_vector_norm", "linalg_norm", "roll"], along(2)),
    "index_select": along(1),
    "unbind": along(1, 0),
    "batch_norm": _batch_norm,
    "sum": _summed(mean=False),
    "mean": _summed(mean=True),
    **dict.fromkeys(["layer_norm", "rms_norm"], _normalised),
}
