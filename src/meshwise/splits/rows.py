"""Run operators that treat each row alone on this rank's rows.

Batch norm and the losses of rows need a few numbers of the other ranks' rows: sums.

Tested in tests/splits/test_row_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.compat.torch_function import called
from meshwise.compat.tree import map_tensors
from meshwise.splits.along import RULES as ALONG
from meshwise.splits.axis import SplitPart
from meshwise.splits.crossing import enter, gather
from meshwise.splits.products import RULES as PRODUCTS
from meshwise.splits.rule import NoRule, Rule, first_split, given, moved, split_in, with_parts_of
from meshwise.splits.tensor import is_split, split, whole_shape

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]

LINEAR_ALGEBRA = """inverse linalg_inv det linalg_det slogdet logdet linalg_slogdet cholesky linalg_cholesky qr
linalg_qr svd linalg_svd linalg_svdvals linalg_eigh linalg_eigvalsh matrix_exp linalg_matrix_exp pinverse linalg_pinv
matrix_power linalg_matrix_power linalg_solve cholesky_solve linalg_solve_triangular"""
POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool conv conv_transpose max_unpool"
ALONE = [
    (1, 2, "group_norm prelu embedding_bag diag_embed"),
    (2, 2, "bilinear lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    (1, 3, "fold interpolate upsample instance_norm local_response_norm tril triu"),
    (2, 3, LINEAR_ALGEBRA),
    (1, 4, "unfold pixel_shuffle pixel_unshuffle channel_shuffle"),
    (2, 4, "grid_sample"),
]
ALONE += [
    (1 + ("unpool" in name), dims + 2, f"{name}{dims}d {name}{dims}d_with_indices")
    for dims in (1, 2, 3)
    for name in POOLS.split()
]
"""Operators that treat each row (each entry of dim 0) alone: how many first arguments have rows, the least dims of the
first argument, and the names."""
LOSSES = "triplet_margin_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss"
RECURRENT = "lstm gru rnn_tanh rnn_relu"


def _alone(rows: int, dims: int) -> Rule:
    """Make a rule for operators that treat each row alone.

    rows: how many arguments, the first ones, have rows. Other arguments are used whole.
    dims: how many dims the first argument has at least, so that its first dim are the rows.
    """

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        like = first_split(split_in(args[:rows]) or [None]).part
        x, updated = args[0], kwargs.get("running_mean") is not None and kwargs.get("use_input_stats", True)
        if x.dim() < dims or like.dim or updated or (called(func) == "unfold" and func is not functional.unfold):
            raise NoRule
        fill = called(func) not in LINEAR_ALGEBRA
        own = map_tensors(lambda each: (_filled if fill else _rows_of)(each, like), list(args[:rows]))
        rest, options = map_tensors(lambda each: enter(gather(each), like.axis), (list(args[rows:]), dict(kwargs)))
        return _as_rows(func(*own, *rest, **options), like, 0)

    return rule


def _rows_of(each: Tensor, part: SplitPart) -> Tensor:
    if whole_shape(each)[part.dim] != part.length:
        raise NoRule
    found: Tensor = with_parts_of(each, part, each.dim())
    return found


def _filled(each: Tensor, part: SplitPart) -> Tensor:
    """Return this rank's rows, or one row of zeros on a rank without rows, for operators that need a row."""
    rows = _rows_of(each, part)
    if part.own:
        return rows
    shape = [1 if dim == part.dim else length for dim, length in enumerate(rows.shape)]
    return torch.cat([rows, rows.new_zeros(shape)], part.dim)


def _as_rows(made: Any, part: SplitPart, dim: int) -> Any:
    """Return the results of operators on filled rows, which have rows at `dim`, as split tensors."""
    return map_tensors(lambda each: split(each.narrow(dim, 0, part.own), moved(part, dim)), made)


def _loss(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a loss that has one number for each row."""
    options = dict(kwargs)
    reduction = options.pop("reduction", "mean")
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise NoRule
    tensors = [each for each in args if isinstance(each, Tensor)]
    losses = _alone(len(tensors), 2)(partial(func, reduction="none"), args, options)
    return losses if reduction == "none" else ALONG[reduction](torch.sum, (losses,), {})


def _ctc_loss(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, targets, lengths = args[0], args[1], [torch.as_tensor(each) for each in args[2:4]]
    options = dict(kwargs)
    reduction = options.pop("reduction", "mean")
    if len(args) > 4 or not is_split(x) or x.dim() != 3 or x.part.dim != 1 or targets.dim() != 2:
        raise NoRule
    rows = moved(x.part, 0)
    own = [_filled(x, x.part), *(_filled(each, rows) for each in (targets, *lengths))]
    losses = _as_rows(func(*own, reduction="none", **options), rows, 0)
    if reduction == "mean":
        of_each = with_parts_of(lengths[1].clamp_min(1).to(x.device), rows, 1)
        losses = split(losses / of_each, rows)
    return losses if reduction == "none" else ALONG[reduction](torch.sum, (losses,), {})


def _recurrent(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a recurrent layer on this rank's rows: its states have the rows in dim 1."""
    x, states, weights, *options = args
    if len(args) != 9 or not is_split(x) or isinstance(weights, Tensor) or (options[2] and options[3]):
        raise NoRule  # packed sequences; dropout between layers
    rows = x.part
    if rows.dim != (0 if options[5] else 1):
        raise NoRule
    axis, inner = rows.axis, moved(rows, 1)
    weights = [enter(gather(each), axis) for each in weights]
    made, *after = func(_filled(x, rows), map_tensors(lambda each: _filled(each, inner), states), weights, *options)
    return (_as_rows(made, rows, rows.dim), *_as_rows(after, rows, 1))


def _batch_norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run batch norm on rows. In training, its statistics are those of all rows on all ranks."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    x, training, kept = values["input"], values.get("training", False), [values.get(name) for name in names[1:3]]
    if func is not functional.batch_norm or not is_split(x) or x.part.dim == 1:
        raise NoRule
    part, count = x.part, whole_shape(x).numel() // x.shape[1]
    scale, shift = (None if values.get(n) is None else enter(gather(values[n]), part.axis) for n in names[3:5])
    if not training:
        return given(func(x, *kept, scale, shift, False, eps=values.get("eps", 1e-5)), part)
    if count < 2:
        raise NoRule  # torch says so
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims, shape = [dim for dim in range(x.dim()) if dim != 1], [-1 if dim == 1 else 1 for dim in range(x.dim())]
    mean = summed_now(wide.sum(dims), part) / count
    far = wide - enter(mean, part.axis).view(shape)
    squares = summed_now(far.square().sum(dims), part)
    made = far * enter((squares / count + values.get("eps", 1e-5)).rsqrt(), part.axis).view(shape)
    made = made if scale is None else made * scale.view(shape)
    made = made if shift is None else made + shift.view(shape)
    with torch.no_grad():
        momentum = values.get("momentum", 0.1)
        for each, new in zip(kept, (mean, squares / (count - 1)), strict=True):
            if each is not None:
                each.mul_(1 - momentum).add_(new.to(each.dtype), alpha=momentum)
    return given(made.to(x.dtype), part)


def summed_now(value: Tensor, part: SplitPart) -> Tensor:
    """Return the sum of the ranks' values, for use in the same operator."""
    each = replace(part, dim=0, length=part.axis.size, repeats=1, pieces=None)
    return gather(split(value.unsqueeze(0), each)).sum(0)


def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute attention of samples without heads, (B, S, E), as that of one head."""
    q, k, v, mask = [*args, *[None] * 4][:4]
    mask = kwargs.get("attn_mask", mask)
    if len(args) > 4 or q.dim() != 3 or not all(is_split(each) and each.part.dim == 0 for each in (q, k, v)):
        raise NoRule
    heads = [split(each.unsqueeze(1), each.part) for each in (q, k, v)]
    if mask is not None and mask.dim() == 3:
        mask = split(mask.unsqueeze(1), mask.part) if is_split(mask) else mask.unsqueeze(1)
    made = PRODUCTS["scaled_dot_product_attention"](func, heads, {**kwargs, "attn_mask": mask})
    return given(made.squeeze(1), made.part)


RULES: dict[str, Rule] = {
    **{name: _alone(rows, dims) for rows, dims, names in ALONE for name in names.split()},
    **dict.fromkeys(LOSSES.split(), _loss),
    **dict.fromkeys(RECURRENT.split(), _recurrent),
    "ctc_loss": _ctc_loss,
    "batch_norm": _batch_norm,
    "scaled_dot_product_attention": _attention,
}
"""The rules of this file. They apply where the rules of other files do not."""
