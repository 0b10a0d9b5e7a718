"""Compute products by the letters of their dims, as einsum does.

In the result, the split dim remains or is summed over.

    the split letter is in the result   each rank computes its part of the result: operands with this letter are split,
                                        other operands are used whole
    the split letter is summed over     each rank computes a partial sum from its parts: the partial sums are added

Convolutions (over channels), embeddings and attention (over heads, over samples) are products in this sense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.parallel.splits.axis import Axis, SplitPart
from meshwise.parallel.splits.crossing import add_apart, enter, gather, scatter, spread
from meshwise.parallel.splits.elementwise import RULES as ELEMENTWISE
from meshwise.parallel.splits.rule import NoRule, Rule, moved, refuse, split_in, with_parts_of
from meshwise.parallel.splits.tensor import SplitTensor, is_split, split, whole_shape
from meshwise.torch_compat.torch_function import Args, Func, Kwargs, named

BATCH = "ABCDEFGHIJKLMNOP"  # letters for leading dims


def by_letters(
    operands: Sequence[Any], letters: Sequence[str], result: str, call: Callable[..., Tensor], may: str | None = None
) -> Any:
    """Compute a product on this rank's parts of its operands."""
    letter, like = _chosen(operands, letters, may)
    length, axis = like.part.length, like.part.axis
    parts: list[Any] = []
    for operand, own in zip(operands, letters, strict=True):
        if not isinstance(operand, Tensor):
            parts.append(operand)
        elif letter not in own:
            parts.append(_entered(operand, axis))
        else:
            parts.append(_divided(operand, own.index(letter), like))
    made = call(*parts)
    if not made.numel() and not made.requires_grad:  # so that each rank takes part in the backward
        made = sum((each.sum() * 0 for each in parts if isinstance(each, Tensor) and each.requires_grad), made)
    if letter not in result:
        return add_apart(made, axis)
    return split(made, moved(like.part, result.index(letter), length))


def _entered(operand: Tensor, axis: Axis) -> Tensor:
    """Return the whole tensor of an operand, for a product with parts of another operand."""
    plain = is_split(operand) and operand.part.is_plain
    return spread(operand, axis) if plain and torch.is_grad_enabled() else enter(gather(operand), axis)


def _chosen(operands: Sequence[Any], letters: Sequence[str], may: str | None) -> tuple[str, SplitTensor]:
    """Choose the dim along which the ranks divide a product. Return its letter, and an operand split there."""
    found = []
    for operand, own in zip(operands, letters, strict=True):
        if is_split(operand):
            letter = own[operand.part.dim]
            if letter != "." and (may is None or letter in may):
                first = operand.is_leaf or bool(getattr(operand, "of_parameter", False))
                found.append((first, whole_shape(operand).numel(), letter, operand))
    if not found:
        raise NoRule
    *_, letter, operand = max(found, key=lambda each: each[:2])
    return letter, operand


def _divided(operand: Tensor, dim: int, like: SplitTensor) -> Tensor:
    part = moved(like.part, dim)
    if is_split(operand):
        if operand.part == part:
            return operand
        operand = gather(operand)
    if operand.shape[dim] != part.length:
        raise NoRule
    return scatter(operand, part)


def _leading(dims: int) -> str:
    return BATCH[:dims]


def _linear(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias = [*args, *kwargs.values(), None][:3]
    if weight.dim() != 2:
        raise NoRule
    lead = _leading(x.dim() - 1)
    return _with_bias(func, (x, weight), (f"{lead}i", "oi"), f"{lead}o", bias)


def _with_bias(
    func: Func, operands: Sequence[Any], letters: Sequence[str], result: str, bias: Tensor | None, at: int = -1
) -> Any:
    """Compute a product with a bias, which is added only once if the split letter is summed over."""
    chosen, _ = _chosen(operands, letters, None)
    if bias is not None and chosen in result:
        return by_letters([*operands, bias], [*letters, result[at]], result, func)
    made = by_letters(operands, letters, result, lambda *parts: func(*parts, None))
    if bias is None:
        return made
    bias = gather(bias).reshape(-1, *[1] * (made.dim() - 1 - at % made.dim()))
    return ELEMENTWISE["add"](torch.add, (made, bias), {}) if is_split(made) else made + bias


def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    bias, x, weight = args[:3]
    if kwargs or len(args) > 3 or bias.dim() != 1:
        raise NoRule

    def product(a: Tensor, b: Tensor, added: Tensor | None) -> Tensor:
        return a @ b if added is None else torch.addmm(added, a, b)

    return _with_bias(product, (x, weight), ("Ai", "io"), "Ao", bias)


def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    a, b = [*args, *kwargs.values()][:2]
    if not isinstance(b, Tensor) or (a.dim() < 2 and b.dim() > 2):
        raise NoRule
    if a.dim() < 2 or b.dim() < 2:
        first, other = _leading(a.dim() - 1) + "k", "kn"[: b.dim()]
        return by_letters((a, b), (first, other), first[:-1] + other[1:], torch.matmul)
    lead = _leading(max(a.dim(), b.dim()) - 2)

    def letters(each: Tensor, other: Tensor, own: str) -> str:
        mine, theirs = whole_shape(each)[:-2], whole_shape(other)[:-2]
        found = list(lead[len(lead) - len(mine) :])
        for back in range(1, min(len(mine), len(theirs)) + 1):
            if mine[-back] == 1 != theirs[-back]:
                found[-back] = "."
        return "".join(found) + own

    return by_letters((a, b), (letters(a, b, "mk"), letters(b, a, "kn")), f"{lead}mn", torch.matmul)


def _outer(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return by_letters(args, ("m", "n"), "mn", func) if len(args) == 2 else refuse()


def _cdist(func: Func, args: Args, kwargs: Kwargs) -> Any:
    lead = _leading(args[0].dim() - 2) if len(args) > 1 and args[0].dim() == args[1].dim() else refuse()
    own = (f"{lead}mk", f"{lead}nk")
    return by_letters(args[:2], own, f"{lead}mn", lambda a, b: func(a, b, *args[2:], **kwargs), f"{lead}mn")


def _baddbmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    values = named(("input", "batch1", "batch2"), args, kwargs)
    added, a, b = (values.pop(name) for name in ("input", "batch1", "batch2"))
    if added.dim() != 3 or "out" in values:
        raise NoRule
    shape = whole_shape(added)
    own = "".join("." if shape[i] == 1 else letter for i, letter in enumerate("Amn"))
    return by_letters((added, a, b), (own, "Amk", "Akn"), "Amn", lambda *p: func(*p, **values), may="Amn")


def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    text, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = tuple(operands[0])
    text = text.replace(" ", "") if isinstance(text, str) and "." not in text else refuse()
    if "->" not in text:  # without `->`, the result has the letters that occur once
        text += "->" + "".join(sorted(each for each in set(text) - {","} if text.count(each) == 1))
    inputs, result = text.split("->")
    letters = inputs.split(",")
    if any(len(set(own)) != len(own) for own in [*letters, result]):
        raise NoRule
    return by_letters(operands, letters, result, lambda *parts: torch.einsum(text, *parts))


def _convolution(spatial: int) -> Rule:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def rule(func: Func, args: Args, kwargs: Kwargs) -> Any:
        values = named(names, args, kwargs)
        x, weight, bias = values.pop("input"), values.pop("weight"), values.pop("bias", None)
        if values.get("groups", 1) != 1 or x.dim() != spatial + 2:
            raise NoRule
        rest = "." * spatial
        operands, letters = (x, weight), (f"Ai{rest}", f"oi{rest}")

        return _with_bias(functools.partial(func, **values), operands, letters, f"Ao{rest}", bias, at=1)

    return rule


def _embedding(func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    values = named(names, args, kwargs)
    ids, weight, padding = values["input"], values["weight"], values.get("padding_idx")
    if values.get("max_norm") is not None or values.get("sparse") or values.get("scale_grad_by_freq"):
        raise NoRule
    if not is_split(weight) or weight.part.dim == 1:
        lead = _leading(ids.dim())
        return by_letters((ids, weight), (lead, ".h"), f"{lead}h", lambda i, w: functional.embedding(i, w, padding))
    part, ids = weight.part, gather(ids)
    if padding is not None:
        padding = padding % part.length - part.begin
        padding = padding if 0 <= padding < part.own else None
    own = ids - part.begin
    elsewhere = (own < 0) | (own >= part.own)
    if part.own == 0:  # this rank has no rows: their sum is 0, but connects `weight` to the autograd graph
        found = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
    else:
        found = functional.embedding(own.masked_fill(elsewhere, 0), weight, padding)
    return add_apart(found.masked_fill(elsewhere[..., None], 0), part.axis)


def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute `scaled_dot_product_attention` of tensors that are split along their heads or samples."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    values = named(names, args, kwargs)
    q, k, v, mask = (values.pop(name, None) for name in names[:4])
    dims = q.dim() if q.dim() == k.dim() == v.dim() and q.dim() in (3, 4) else refuse()
    if dims == 4 and any(is_split(each) and each.part.dim == 1 for each in (q, k, v)):
        heads, groups = whole_shape(q)[1], whole_shape(k)[1]
        axis = split_in((q, k, v))[0].part.axis
        if heads % axis.size or groups % axis.size:
            raise NoRule
        if heads != groups:
            return _grouped(func, (q, k, v), mask, values, axis)
    letters, own = "Ah.." if dims == 4 else "A..", "."
    if mask is not None:
        shape = (1,) * (dims - mask.dim()) + tuple(whole_shape(mask))
        own = "".join("." if length == 1 else letter for length, letter in zip(shape, letters, strict=True))
        own = own[-mask.dim() :]
    every = (letters, letters, letters, own)
    letter, like = _chosen((q, k, v, mask), every, "Ah")
    part = moved(like.part, letters.index(letter))
    return by_letters((q, k, v, mask), every, letters, functools.partial(_attended, values, part), may="Ah")


def _grouped(func: Func, operands: Sequence[Tensor], mask: Any, values: Kwargs, axis: Axis) -> Any:
    """Compute grouped-query attention, in which several query heads share a key head."""
    parts = []
    for each in operands:
        first = split_in(operands)[0].part
        part = replace(first, dim=1, length=whole_shape(each)[1])
        parts.append(each if is_split(each) and each.part == part else scatter(gather(each), part))
    result = moved(parts[0].part, 1)
    if mask is not None:
        mask = with_parts_of(mask, result, 4)
    q, k, v = parts
    return split(_attended(values, result, q, k, v, mask), result)


def _attended(values: Kwargs, part: SplitPart, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention for this rank's part of the heads or samples."""
    dropout = values.get("dropout_p", 0.0)
    if not dropout:
        return functional.scaled_dot_product_attention(q, k, v, mask, **values)
    if k.shape[1] != q.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    if values.get("is_causal"):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scale = values.get("scale")
    return dropped(q, k, v, mask, math.sqrt(1 / q.shape[-1]) if scale is None else scale, dropout, part)


def dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, part: SplitPart
) -> Tensor:
    """Compute this rank's part of an attention with dropout."""
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = split(scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0), part)
    kept: Tensor = ELEMENTWISE["dropout"](functional.dropout, (weights, dropout), {})
    return kept @ v


RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(["matmul", "__matmul__", "mm", "bmm", "mv", "dot"], _matmul),
    "outer": _outer,
    "cdist": _cdist,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
}
