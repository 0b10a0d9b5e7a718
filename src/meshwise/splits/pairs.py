"""Compare or multiply the rows of two tensors.

Of all pairs, each rank computes those of its rows of the first (or larger) tensor with all rows of the other, which is
gathered.

Tested in tests/splits/test_row_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.splits.products import RULES as PRODUCTS
from meshwise.splits.products import by_letters
from meshwise.splits.rule import NoRule, Rule, given, moved, split_in, with_parts_of
from meshwise.splits.tensor import whole_shape

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _letters(first: str, other: str, result: str, may: str | None = None) -> Rule:
    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        a, b = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
        rest, options = args[2:], kwargs if len(args) > 1 else {}
        if not isinstance(b, Tensor) or (a.dim(), b.dim()) != (len(first), len(other)):
            raise NoRule
        return by_letters((a, b), (first, other), result, lambda x, y: func(x, y, *rest, **options), may)

    return rule


def _vector(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Multiply a matrix, or several, by a vector, or two vectors."""
    a, b = [*args, *kwargs.values()][:2]
    if a.dim() == 1 and b.dim() == 2:
        return _letters("k", "kn", "n")(func, (a, b), {})
    lead = "ABCDEFGH"[: a.dim() - 1]
    return _letters(f"{lead}k", "k", lead)(func, (a, b), {})


def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an einsum whose text does not say the result: its letters are those that occur once."""
    text = args[0].replace(" ", "") if isinstance(args[0], str) else "->"
    if "->" in text or "." in text:
        raise NoRule
    result = "".join(sorted(letter for letter in set(text) - {","} if text.count(letter) == 1))
    return PRODUCTS["einsum"](func, (f"{text}->{result}", *args[1:]), kwargs)


def _compared(default: int) -> Rule:
    """Make a rule for operators that compare two tensors, which are broadcast, along one dim, and remove the dim."""

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        operands = [*args[:2], *(kwargs[name] for name in ("x1", "x2", "input1", "input2") if name in kwargs)]
        options = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
        if len(operands) != 2:
            raise NoRule
        dims = max(each.dim() for each in operands)
        first = max(split_in(operands), key=lambda each: whole_shape(each).numel())
        like = moved(first.part, first.part.dim - first.dim() + dims)
        dim = options.get("dim", args[2] if len(args) > 2 and default == 1 else default) % dims
        if dim == like.dim:
            raise NoRule
        made = func(*(with_parts_of(each, like, dims) for each in operands), *args[2:], **options)
        return given(made, moved(like, like.dim - (dim < like.dim and made.dim() < dims)))

    return rule


def _broadcast(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Broadcast tensors, each as it is divided in the largest one."""
    shape = torch.broadcast_shapes(*map(whole_shape, args))
    like = max(split_in(args), key=lambda each: whole_shape(each).numel())
    part = moved(like.part, like.part.dim - like.dim() + len(shape))
    if shape[part.dim] != part.length:
        raise NoRule
    sizes = [part.own if dim == part.dim else length for dim, length in enumerate(shape)]
    return tuple(given(with_parts_of(each, part, len(shape)).expand(sizes), part) for each in args)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["matmul", "__matmul__", "mv", "dot", "inner", "vdot"], _vector),
    **dict.fromkeys(["outer", "ger"], _letters("m", "n", "mn")),
    "cdist": _letters("mk", "nk", "mn", "mn"),
    "einsum": _einsum,
    "cosine_similarity": _compared(1),
    "pairwise_distance": _compared(-1),
    "broadcast_tensors": _broadcast,
}
"""The rules of this file. They apply where the rules of other files do not."""
