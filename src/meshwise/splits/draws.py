"""Draw random numbers for split tensors as one device draws them.

Each rank draws the numbers of the whole tensor, as its generator is in the state of the others' generators, and uses
those of its part. So the generator moves as on one device.

Tested in tests/splits/test_row_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.torch_function import called
from meshwise.compat.tree import map_kind
from meshwise.splits.rule import NoRule, Rule, first_split, given, split_in
from meshwise.splits.tensor import SplitTensor, is_split, whole_shape

LIKE = "rand_like randn_like randint_like bernoulli normal multinomial"
NOISE = "alpha_dropout dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout gumbel_softmax"
IN_PLACE = "normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_"


def _drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on a whole tensor in which only this rank's part has the right values, and return this part of
    the result."""
    like = split_in([*args, *kwargs.values()])[0]
    part, name = like.part, called(func)
    if name == "gumbel_softmax" and kwargs.get("dim", -1) % like.dim() == part.dim:
        raise NoRule
    if name == "multinomial" and part.dim:
        raise NoRule

    def whole(x: Tensor) -> Tensor:
        if not is_split(x) or x.part != part:
            raise NoRule
        places = torch.cat([torch.arange(b, e) for b, e in ((0, 0), *part.of_rank(part.axis.rank))])
        return x.new_ones(whole_shape(x)).index_copy(part.dim, places.to(x.device), x)

    if part.repeats > 1:
        raise NoRule
    new_args, new_kwargs = map_kind(SplitTensor, whole, (tuple(args), dict(kwargs)))
    made = func(*new_args, **new_kwargs)
    if name in LIKE.split():
        part.axis.divides(made.detach(), part.dim)
    return given(part.slice_of(made), part)


def _drawn_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = first_split(args)
    made = func(x.new_empty(whole_shape(x)), *args[1:], **kwargs)
    x.part.axis.divides(made, x.part.dim)
    x.copy_(x.part.slice_of(made))
    return x


RULES: dict[str, Rule] = {
    **dict.fromkeys([*LIKE.split(), *NOISE.split()], _drawn),
    **dict.fromkeys(IN_PLACE.split(), _drawn_in_place),
}
