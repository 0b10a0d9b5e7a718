"""Run row-wise operators on this rank's rows.

Batch norm and the losses of rows need sums over the other ranks' rows. Each rank draws the random numbers of all rows,
from generators in the same state, so the numbers are those of one device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.along import RULES as ALONG
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import enter, gather
from meshwise.parallel.splits.rule import (
    NoRule,
    Rule,
    entries,
    given,
    moved,
    ones_of_whole,
    refuse,
    split_in,
    with_parts_of,
)
from meshwise.parallel.splits.tensor import SplitTensor, is_split, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, called
from meshwise.torch_compat.tree import map_kind, map_tensors

ALONE = {
    (1, 2): "group_norm prelu embedding_bag diag_embed",
    (2, 2): "bilinear lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    (1, 3): "fold interpolate upsample instance_norm local_response_norm tril triu matrix_exp linalg_matrix_exp",
    (1, 4): "unfold pixel_shuffle pixel_unshuffle channel_shuffle",
    (2, 4): "grid_sample",
}
"""Operators that treat each row (entry of dim 0) independently, by (number of first arguments with rows, fewest dims of
the first argument)."""
POOLS = """max_pool{}d max_pool{}d_with_indices avg_pool{}d adaptive_avg_pool{}d adaptive_max_pool{}d max_unpool{}d
adaptive_max_pool{}d_with_indices lp_pool{}d conv{}d conv_transpose{}d"""
LOSSES = "triplet_margin_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss"
DRAWS = """rand_like randn_like randint_like bernoulli normal multinomial normal_ uniform_ bernoulli_ exponential_
random_ log_normal_ cauchy_ geometric_"""
NOISE = "alpha_dropout dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout gumbel_softmax"


def alone(rows: int, dims: int) -> Rule:
    """Make a rule for operators that treat each row independently."""

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        like = (split_in(args[:rows]) or refuse())[0].part
        updated = kwargs.get("running_mean") is not None and kwargs.get("use_input_stats", True)
        other = called(func) == "unfold" and func is not functional.unfold
        if args[0].dim() < dims or like.dim or like.repeats > 1 or updated or other:
            raise NoRule
        own = map_tensors(lambda each: filled(each, like), list(args[:rows]))
        rest, options = map_tensors(lambda each: enter(gather(each), like.axis), (list(args[rows:]), dict(kwargs)))
        return _as_rows(func(*own, *rest, **options), like, 0)

    return rule


def filled(each: Tensor, part: SplitPart) -> Tensor:
    """Return this rank's rows, or one row of zeros on a rank without rows, for operators that need a row."""
    rows = with_parts_of(each, part, each.dim()) if whole_shape(each)[part.dim] == part.length else refuse()
    zeros = [1 if dim == part.dim else length for dim, length in enumerate(rows.shape)]
    return rows if part.own else torch.cat([rows, rows.new_zeros(zeros)], part.dim)


def _as_rows(made: Any, part: SplitPart, dim: int) -> Any:
    """Turn an operator's results on filled rows into split tensors, whose rows are at `dim`."""
    return map_tensors(lambda each: split(each.narrow(dim, 0, part.own), moved(part, dim)), made)


def _loss(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute a loss with one term for each row."""
    options = {name: value for name, value in kwargs.items() if value is not None}
    reduction = options.pop("reduction", "mean")
    if {"size_average", "reduce"} & set(options):
        raise NoRule
    losses = alone(len(args), 2)(partial(func, reduction="none"), args, options)
    return losses if reduction == "none" else ALONG[reduction](torch.sum, (losses,), {})


def _ctc_loss(func: Func, args: Args, kwargs: Kwargs) -> Any:
    def of_each(x: Tensor, targets: Tensor, times: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        losses: Tensor = func(x.transpose(0, 1), targets, times, lengths, **options)
        return losses / lengths.clamp_min(1) if kwargs.get("reduction", "mean") == "mean" else losses

    x = args[0] if is_split(args[0]) and args[0].part.dim == 1 and args[1].dim() == 2 else refuse()
    x = split(x.transpose(0, 1), moved(x.part, 0))
    return _loss(of_each, (x, args[1], *(torch.as_tensor(each, device=x.device) for each in args[2:])), kwargs)


def _recurrent(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a recurrent layer on this rank's rows: its states have the rows in dim 1."""
    x, states, weights, *options = args
    if len(args) != 9 or not is_split(x) or isinstance(weights, Tensor) or (options[2] and options[3]):
        raise NoRule  # no rule for packed sequences, or for dropout between layers
    rows = x.part if x.part.dim == (0 if options[5] else 1) else refuse()
    own = map_tensors(lambda each: filled(each, moved(rows, 1)), states)
    made, *after = func(filled(x, rows), own, [enter(gather(each), rows.axis) for each in weights], *options)
    return (_as_rows(made, rows, rows.dim), *_as_rows(after, rows, 1))


def _drawn(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that draws random numbers. Its input is a whole tensor in which only this rank's part has the
    right values, and the result is this part."""
    like, name = split_in([*args, *kwargs.values()])[0], called(func)
    mixed = {"multinomial": like.dim() - 1, "gumbel_softmax": kwargs.get("dim", -1) % like.dim()}
    part = like.part if mixed.get(name) != like.part.dim else refuse()

    def whole(x: SplitTensor) -> Tensor:
        x = x if x.part == part else refuse()
        return ones_of_whole(x).index_copy_(part.dim, entries(part, part.axis.rank).to(x.device), x)

    new_args, new_kwargs = map_kind(SplitTensor, whole, (tuple(args), dict(kwargs)))
    made = func(*new_args, **new_kwargs)
    if name not in NOISE.split():
        part.axis.divides(made.detach(), part.dim)
    own = part.slice_of(made)
    return args[0].copy_(own) if name.endswith("_") else given(own, part)


RULES: dict[str, Rule] = {
    **{name: alone(*how) for how, names in ALONE.items() for name in names.split()},
    **dict.fromkeys(LOSSES.split(), _loss),
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], _recurrent),
    **dict.fromkeys(f"{DRAWS} {NOISE}".split(), _drawn),
    "ctc_loss": _ctc_loss,
    **{name.format(n): alone(1 + ("un" in name), n + 2) for n in (1, 2, 3) for name in POOLS.split()},
}
"""The rules of this file. They apply where the rules of other files do not."""
