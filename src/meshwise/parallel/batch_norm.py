"""Batch norm over the global microbatch: the statistics of all ranks' samples, as one device has them.

The layers stay what they are; only their `forward` is replaced, and does otherwise when training. Means and squared
deviations of each rank are gathered in one collective and joined by the parallel form of Chan, Golub and LeVeque
(1979), which does not cancel; the backward sums two numbers a channel. torch's SyncBatchNorm has no CPU form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.modules import check_input_dim
from meshwise.parallel.technique import Setup, Technique
from meshwise.transfer import collectives

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def join_batch_norms(model: nn.Module, counts: Callable[[], bool] = lambda: True) -> list[str]:
    """Let the batch norms of `model` take the statistics of all ranks; returns their names.

    counts: whether what this rank runs now counts; False for a padding sample. From here on a
    forward in training is collective: every rank runs the same layers.
    """
    joined = []
    found: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, KINDS)]
    for name, module in found:
        if getattr(module.forward, "func", None) is not _forward:
            module.forward = functools.partial(_forward, module, module.forward, counts)
            joined.append(name)
    return joined


def _forward(module: Any, alone: Callable[[Tensor], Tensor], counts: Callable[[], bool], /, x: Tensor) -> Tensor:
    if not module.training and module.running_mean is not None:
        return alone(x)
    check_input_dim(module, x)
    result: Tensor
    result, mean, variance, count = _Normalize.apply(x, module.weight, module.bias, module.eps, counts())  # type: ignore[no-untyped-call]
    if module.training and module.running_mean is not None:
        _track(module, mean, variance, count)
    return result


@torch.no_grad()
def _track(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Move the running statistics as torch does: by `momentum`, or as the average of all batches without one."""
    module.num_batches_tracked.add_(1)
    share = 1.0 / module.num_batches_tracked.to(mean.dtype) if module.momentum is None else module.momentum
    unbiased = variance * (count / (count - 1))
    module.running_mean.add_(((mean - module.running_mean) * share).to(module.running_mean.dtype))
    module.running_var.add_(((unbiased - module.running_var) * share).to(module.running_var.dtype))


class _Normalize(torch.autograd.Function):
    """x of shape (samples, channels, ...) to zero mean and unit variance a channel over all ranks, times weight plus
    bias. Gives the mean, the biased variance and the count too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        over = [dim for dim in range(x.ndim) if dim != 1]
        number = wide.numel() // wide.shape[1] if counts else 0
        own = wide.mean(over)
        deviations = (wide - _along(own, wide)).square().sum(over)
        count = torch.full((1,), float(number), dtype=wide.dtype, device=x.device)
        facts = torch.cat([own * bool(number), deviations * bool(number), count])
        means, squares, numbers = collectives.all_gather(facts).split([len(own), len(own), 1], dim=1)
        total = numbers.sum()
        mean = (means * numbers).sum(0) / total
        variance = (squares + (means - mean).square() * numbers).sum(0) / total
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.counts, ctx.with_bias = bool(number), bias is not None
        result = (wide - _along(mean, wide)) * _along(scale if weight is None else scale * weight, wide)
        if bias is not None:
            result = result + _along(bias, wide)
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        over = [dim for dim in range(x.ndim) if dim != 1]
        unit = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        sums = torch.stack([gradient.sum(over), (gradient * unit).sum(over)])
        of_bias, of_weight = sums.clone().unbind()
        if not ctx.counts:
            sums.zero_()
        plain, along = (collectives.all_reduce(sums) / total).unbind()
        if ctx.counts:
            gradient = gradient - _along(plain, x) - unit * _along(along, x)
        result = gradient * _along(scale if weight is None else scale * weight, x)
        return (
            result.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias if ctx.with_bias else None,
            None,
            None,
        )


def _apply(setup: Setup) -> None:
    model, plan, several = setup.model, setup.plan, setup.world.size > 1
    if not any("BatchNorm" in type(module).__name__ for module in model.modules()):
        return
    if setup.counts is not None and several:
        setup.coupled_gradients = bool(join_batch_norms(model, setup.counts))
    if several and not setup.coupled_gradients:
        setup.notes.append(
            "batch norm: each rank takes the statistics of its own slice of the batch, so numbers are not one device's."
        )
    if plan.accumulate > 1:
        setup.notes.append(
            f"batch norm: accumulate={plan.accumulate} takes the statistics of each microbatch by itself, so numbers "
            "are not those of accumulate=1 (they are alike on any number of devices)."
        )


BATCH_NORM = Technique(apply=_apply)


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """One number a channel, shaped to broadcast with a tensor of shape (samples, channels, ...)."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))
