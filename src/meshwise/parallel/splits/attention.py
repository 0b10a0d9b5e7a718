"""Compute attention over split positions, passing keys and values in turn.

Each rank has some rows of queries, and receives the keys and values of every rank in turn.

Keys and values are passed around a ring of ranks while the softmax is accumulated (Ring Attention, arXiv:2310.01889).
In the backward they are passed around again, together with their gradients. A rank keeps only its own queries, keys,
values and results. For calls that a ring cannot compute (dropout, a learned mask), keys and values are gathered on each
rank.

Shapes: B samples, H heads, K heads of keys, S own positions, T all positions of keys, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional

from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import enter, gather, gather_over, kept_within, through
from meshwise.parallel.splits.products import RULES as PRODUCTS
from meshwise.parallel.splits.products import dropped
from meshwise.parallel.splits.rule import NoRule, Rule, entries, moved, part_of, split_in, with_parts_of
from meshwise.parallel.splits.tensor import at_level, is_split, level_of, parts_of, split, whole_shape
from meshwise.torch_compat.torch_function import named, on_parts

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    values = named(NAMES, args, kwargs)
    q, k, v, mask = (values.get(name) for name in NAMES[:4])
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not any(each.part.dim == each.dim() - 2 for each in split_in((q, k, v))):
        return PRODUCTS["scaled_dot_product_attention"](func, args, kwargs)
    dims, dropout = q.dim(), values.get("dropout_p", 0.0)
    if not 3 <= dims == k.dim() == v.dim() <= 4 or any(each.part.dim != dims - 2 for each in split_in((q, k, v))):
        raise NoRule
    if not is_split(q) or q.part.repeats > 1 or len(q) != len(k) or k.shape[:-2] != v.shape[:-2]:
        raise NoRule
    if mask is not None:  # keep the rows of this rank's queries
        if values.get("is_causal"):
            raise NoRule  # on whole tensors, torch raises its error for a mask with is_causal
        mask = mask if mask.dim() == dims else gather(mask).reshape((1,) * (dims - mask.dim()) + whole_shape(mask))
        mask = with_parts_of(mask, q.part, dims)
    scale = values.get("scale")
    asked = _Asked(q.part, math.sqrt(1 / q.shape[-1]) if scale is None else scale, bool(values.get("is_causal")))
    divided = is_split(v) and part_of(k) == v.part and v.part.repeats == 1
    if not is_split(k) or not divided or dropout or (mask is not None and mask.requires_grad):
        return split(_of_whole_keys(q, k, v, mask, asked, dropout), q.part)
    columns = moved(k.part, 2)
    if dims == 4:
        return split(_within((q, k, v), mask, asked, columns), asked.rows)
    mask = None if mask is None else mask.unsqueeze(1)
    return split(_within([each.unsqueeze(1) for each in (q, k, v)], mask, asked, columns).squeeze(1), asked.rows)


def _within(qkv: Sequence[Tensor], mask: Tensor | None, asked: _Asked, columns: SplitPart) -> Tensor:
    """Run ring attention on this rank's part of the positions of queries, keys and values."""
    level = level_of(asked.rows)
    inner = [parts_of(each, level) for each in qkv]
    if any(part.dim > 1 or not part.is_even for parts in inner for part in parts) or any(
        [(part.axis, part.dim) for part in parts] != [(part.axis, part.dim) for part in inner[0]] for parts in inner
    ):
        qkv, inner = [_whole_within(each, level) for each in qkv], [()]
    if mask is not None:
        mask = mask if inner[0] else _whole_within(mask, level)
        for part in inner[0]:
            with at_level(level_of(part)):
                mask = with_parts_of(mask, part, 4)
    return kept_within(level, qkv[0], through(_Ring, *qkv, mask, asked, columns))


def _whole_within(tensor: Tensor, level: int) -> Tensor:
    for part in parts_of(tensor, level):
        tensor = gather_over(part.axis.name, tensor)
    return tensor


@dataclass(frozen=True)
class _Asked:
    """The options of one call of attention. rows: how the positions of the queries are split over the ranks."""

    rows: SplitPart
    scale: float
    is_causal: bool


def _of_whole_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, asked: _Asked, dropout: float) -> Tensor:
    """Gather keys and values on each rank, and return this rank's rows (B, H, S, E) of the attention result."""
    axis = asked.rows.axis
    k, v = (enter(gather(each), axis) for each in (k, v))
    if q.shape[-3] != k.shape[-3]:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    if asked.is_causal:
        allowed = entries(asked.rows, axis.rank)[:, None] >= torch.arange(k.shape[-2])
        mask = allowed.to(q.device)
    if not dropout:
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=asked.scale)
    return dropped(q, k, v, mask, asked.scale, dropout, asked.rows)


class _Ring(Function):
    """Ring attention of this rank's queries (B, H, S, E) to the keys and values of all ranks. Each rank holds keys and
    values of shape (B, K, its positions, E)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, asked: _Asked, columns: SplitPart
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # (B, K, H / K, S, E)
        result = grouped.new_zeros(*grouped.shape[:-1], v.shape[-1])
        largest = grouped.new_full((*grouped.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(largest)
        for keys, values, owner in _round(k, v, columns):
            for rows, cols, hidden in _blocks(asked, columns, owner, mask, grouped):
                key, value = (each[..., cols, :].to(wide).unsqueeze(2) for each in (keys, values))
                scores = _scores(grouped[..., rows, :], key, asked, hidden)
                above = torch.maximum(largest[..., rows, :], scores.amax(-1, keepdim=True))
                finite = above.masked_fill(above == -torch.inf, 0)
                shrink, scores = (largest[..., rows, :] - finite).exp(), (scores - finite).exp_()
                total[..., rows, :] = total[..., rows, :] * shrink + scores.sum(-1, keepdim=True)
                result[..., rows, :] = result[..., rows, :] * shrink + scores @ value
                largest[..., rows, :] = above
        result = (result / total.masked_fill(total == 0, 1)).to(q.dtype)  # a row without visible keys gives zeros
        log_sum = largest + total.log()
        ctx.save_for_backward(q, k, v, mask, result, log_sum.masked_fill_(total == 0, 0))
        ctx.asked, ctx.columns = asked, columns
        flat: Tensor = result.flatten(1, 2)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # outside of `on_parts`, because reading them may recompute a block
        with on_parts():
            return (*_ring_backward(saved, ctx.asked, ctx.columns, gradient), None, None, None)


def _ring_backward(saved: Sequence[Tensor], asked: _Asked, columns: SplitPart, gradient: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of this rank's queries, keys and values from the gradient of this rank's results."""
    q, k, v, mask, result, log_sum = saved
    wide = log_sum.dtype
    grouped, gradient = (each.to(wide).unflatten(1, (k.shape[1], -1)) for each in (q, gradient))
    of_q, mean = torch.zeros_like(grouped), (gradient * result).sum(-1, keepdim=True)
    widths = [k.shape[-1], v.shape[-1]]
    of_kv = grouped.new_zeros(*k.shape[:2], _longest(columns), sum(widths))
    for keys, values, owner in _round(k, v, columns):
        of_kv = of_kv if owner == columns.axis.rank else columns.axis.pass_on(of_kv)  # gradients travel with the keys
        of_k, of_v = of_kv.split(widths, -1)
        for rows, cols, hidden in _blocks(asked, columns, owner, mask, grouped):
            mine, given = grouped[..., rows, :], gradient[..., rows, :]
            key, value = (each[..., cols, :].to(wide).unsqueeze(2) for each in (keys, values))
            weights = (_scores(mine, key, asked, hidden) - log_sum[..., rows, :]).exp_()
            of_scores = weights * (given @ value.transpose(-1, -2) - mean[..., rows, :]) * asked.scale
            of_q[..., rows, :] += of_scores @ key
            of_k[..., cols, :] += (of_scores.transpose(-1, -2) @ mine).sum(2)
            of_v[..., cols, :] += (weights.transpose(-1, -2) @ given).sum(2)
    home = columns.axis.pass_on(of_kv)[..., : k.shape[2], :].to(k.dtype)
    of_k, of_v = home.split(widths, -1)
    return of_q.flatten(1, 2).to(q.dtype), of_k, of_v


def _longest(part: SplitPart) -> int:
    return max(part.held(rank) for rank in range(part.axis.size))


def _round(k: Tensor, v: Tensor, columns: SplitPart) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Pass the keys and values around the ring of ranks. Yield (keys, values, rank that owns them)."""
    axis = columns.axis
    both = functional.pad(torch.cat([k, v], -1), (0, 0, 0, _longest(columns) - k.shape[2]))
    for step in range(axis.size):
        if step:
            both = axis.pass_on(both)
        yield *both.split([k.shape[-1], v.shape[-1]], -1), (axis.rank - step) % axis.size


def _scores(q: Tensor, k: Tensor, asked: _Asked, hidden: Tensor | None) -> Tensor:
    """Compute the attention scores of a block, of shape (samples, key heads, query heads per key head, rows,
    columns)."""
    scores = q @ k.transpose(-1, -2) * asked.scale
    if hidden is None:
        return scores
    return scores.masked_fill_(hidden, -torch.inf) if hidden.dtype == torch.bool else scores.add_(hidden)


def _blocks(
    asked: _Asked, columns: SplitPart, owner: int, mask: Tensor | None, grouped: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (rows, columns, mask) of each block of scores between this rank's queries and the keys of rank `owner`."""
    top = 0
    for begin, end in asked.rows.of_rank(asked.rows.axis.rank):
        left = 0
        for first, last in columns.of_rank(owner):
            if not asked.is_causal or end > first:
                rows, cols = slice(top, top + end - begin), slice(left, left + last - first)
                hidden = _hidden(mask, rows, slice(first, last), grouped)
                if asked.is_causal and begin < last - 1:
                    hidden = torch.arange(begin, end)[:, None] < torch.arange(first, last)
                    hidden = hidden.to(grouped.device)
                yield rows, cols, hidden
            left += last - first
        top += end - begin


def _hidden(mask: Tensor | None, rows: slice, columns: slice, grouped: Tensor) -> Tensor | None:
    """Return the part of the mask that belongs to one block, as the argument `hidden` of `_scores`."""
    if mask is None:
        return None
    block = mask[:, :, rows if mask.shape[2] > 1 else slice(None), columns if mask.shape[3] > 1 else slice(None)]
    block = block.unflatten(1, grouped.shape[1:3]) if mask.shape[1] > 1 else block.unsqueeze(1)
    return ~block if block.dtype == torch.bool else block


RULES: dict[str, Rule] = {"scaled_dot_product_attention": _attention}
