"""Weigh a loss by the number of items in its mean.

The scaled means of unequal parts add up to the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.reductions import REDUCTIONS
from meshwise.spec.user_code import user_place
from meshwise.training.autograd.loss_graph import summed_loss, uneven_mean
from meshwise.training.data.order import BatchSlice
from meshwise.transfer import collectives

Losses = list[tuple[Tensor, Tensor | float]]
"""For each microbatch of a step, the loss and its weight. Tensors stay on their device."""


class StepWeights:
    """Scales this rank's losses, so that the average of the gradients over the ranks is the gradient of the mean over
    the batch."""

    def __init__(self, ranks: int, coupled: bool) -> None:
        self._ranks, self.coupled = ranks, coupled
        self.unit: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None
        self.losses: Losses = []

    def scale(
        self, mean: Tensor, weight: Tensor | float | None, part: BatchSlice, before: Tensor | None = None
    ) -> Tensor:
        """Return the loss to call backward on."""
        seen = mean.detach() if before is None else before.detach()
        if weight is not None:
            return self._scale(mean, weight, seen)
        self.losses.append((seen, float(part.samples)))
        ratio = part.ratio(self._ranks)
        return mean if ratio == 1 else mean * ratio

    def _scale(self, mean: Tensor, weight: Tensor | float, seen: Tensor) -> Tensor:
        weight = as_weight(weight, mean)
        self.losses.append((seen, weight))
        if self.unit is None:
            self.unit = torch.ones_like(weight) if self.coupled else weight.clamp(min=1)
        return mean * (weight / self.unit).to(mean.dtype)

    def begin_sum(self, more: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin to sum losses and weights over the ranks. The returned function waits, and returns the factor for
        gradients."""
        assert self.unit is not None
        unit, sums = self.unit, total_of(self.losses)
        sent = sums if more is None else torch.cat([sums, more.to(sums)])
        wait = self._wait = collectives.begin_sum(sent, of="the loss").wait
        return lambda: unit * self._ranks / wait()[1]

    def global_mean(self) -> Tensor:
        """Return the weighted mean of the losses over all ranks. Call `begin_sum` first."""
        assert self._wait is not None
        total, weight = self._wait()[:2].unbind()
        return total / weight

    def means(self) -> Tensor:
        """Return the sums of `begin_sum`, each divided by the number of ranks: the sum of the weighted losses, the sum
        of the weights, and the sums of the numbers that were passed as `more`."""
        assert self._wait is not None
        return self._wait() / self._ranks


def total_of(losses: Losses) -> Tensor:
    """Return the weighted sum of the losses and the sum of their weights, as a tensor of shape (2,)."""
    return totals_of([losses])[0]


def totals_of(steps: Sequence[Losses]) -> Tensor:
    """Return the weighted sum of the losses, and the sum of their weights, for each step: a tensor of shape (steps, 2).
    The number of operators does not grow with the number of steps."""
    losses, weights = stacked([pair for step in steps for pair in step])
    pairs = torch.stack([losses.to(weights.dtype) * weights, weights], 1)
    if len(pairs) == len(steps):
        return pairs
    return torch.stack([of_step.sum(0) for of_step in pairs.split([len(step) for step in steps])])


def stacked(pairs: Losses) -> tuple[Tensor, Tensor]:
    """Return the losses as one tensor, and their weights as another."""
    losses, weights = zip(*pairs, strict=True)
    like = losses[0]
    if any(isinstance(weight, Tensor) for weight in weights):
        return torch.stack(losses), torch.stack([as_weight(weight, like) for weight in weights])
    return torch.stack(losses), torch.tensor(weights, dtype=_dtype_of_weights(like), device=like.device)


def mean_of_sum(total: Tensor, part: BatchSlice, over: int) -> Tensor:
    """Convert a sum over this rank's samples to their mean, multiplied by `over`."""
    return total * (over / max(part.samples, 1))


def split_weight(
    result: Any, part: BatchSlice, where: str, *, summed: int | None = None
) -> tuple[Tensor, Tensor | float | None]:
    """Return the loss and its weight, given the result of a job's loss function. The weight is None if it is the number
    of samples.

    A padding sample has weight 0. Raises UsageError if the loss or its weight is not a single number.
    summed: None if the loss is a mean. If the loss is a sum over samples, return `mean_of_sum` of it, with
        `over=summed`."""
    if isinstance(result, Tensor) and summed is None and result.numel() == 1:
        return result.reshape(()), None
    return _split_weight(result, part, where, summed)


def _split_weight(
    result: Any, part: BatchSlice, where: str, summed: int | None
) -> tuple[Tensor, Tensor | float | None]:
    mean, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        shape = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
        raise UsageError(
            f"{where} returned {shape}, not one number. Return a mean, for example loss.mean(), or (mean, weight)."
        )
    mean = mean.reshape(())
    if summed is not None:
        check_sum_alone(weight, where)
        return mean_of_sum(mean, part, summed), None
    return (mean, None) if weight is None else unpadded(mean, weight, part.samples)


def refuse_loss(loss: Tensor, part: BatchSlice | None) -> NoReturn:
    """Raise UsageError for a loss that is not one number, or is outside a loop over a distributed loader."""
    if part is not None:
        raise UsageError(
            f"mw.backward needs a loss of one number, not of shape {tuple(loss.shape)}. Call loss.mean() first."
        )
    raise UsageError(
        "mw.backward was called outside a loop over a distributed loader, so the size of the batch is not known. Pass "
        "the loader to mw.distribute too, or the loader that wraps it, or write x, y = mw.split(x, y)."
    )


def check_said(reduction: str, weight: object) -> None:
    """Raise UsageError for an unknown reduction, or for a weight that is given together with reduction="sum"."""
    check_known("reduction", reduction, REDUCTIONS)
    if reduction == "sum":
        check_sum_alone(weight, "mw.backward")


def check_reduction(found: Any, reduction: str | None, ranks: int, where: str, verb: str, samples: int) -> str:
    """Raise UsageError for an undeclared sum over samples. Return a warning for a mean not over samples, or ""."""
    loss = found[0] if isinstance(found, tuple) and found else found
    if not isinstance(loss, Tensor):
        return ""
    if reduction is None and (what := summed_loss(loss)):
        raise UsageError(
            f"{where}: this loss is a sum over samples ({what}). If it is used as a mean, its gradients are those of "
            f"one device divided by {ranks}. Write {verb}reduction='sum'), or reduction='mean' to accept them."
        )
    said = samples <= 0 or reduction == "sum" or loss is not found
    weight = "" if said else uneven_mean(loss, samples)
    return weight and (
        f"{where}: this loss is not a mean over samples (classes have weights, samples have different numbers of "
        "targets, or it is divided by its own count), and the ranks average over unequal numbers of items. "
        f"Pass this rank's weight: {f'{verb}weight={weight})' if verb.startswith('mw.') else f'return loss, {weight}'}."
    )


def refuse_joined_sum() -> None:
    """Raise UsageError for mw.backward with reduction="sum" on a loss that has a term of mw.sum."""
    raise UsageError(
        f"{user_place()}: mw.backward(…, reduction='sum') got a loss with a term of mw.sum(…, grad=True). That term "
        "covers the whole batch, and would be added once per rank. Call mw.sum(…, grad=True) on all terms, and remove "
        "reduction='sum'."
    )


def check_sum_alone(weight: object, where: str) -> None:
    """Raise UsageError if a weight is given for a loss that is a sum over samples."""
    if weight is not None:
        raise UsageError(
            f"{where}: weight= works only for a mean, but this loss is a sum over samples. Remove weight=, or pass the "
            "mean over that many items with reduction='mean'."
        )


def unpadded(mean: Tensor, weight: Tensor | float, samples: int) -> tuple[Tensor, Tensor | float]:
    """Return the loss `mean` and its weight. Both are 0 if this rank has only padding."""
    counted = as_weight(weight, mean)
    return torch.where(counted * bool(samples) != 0, mean, torch.zeros_like(mean)), weight if samples else counted * 0


def as_weight(weight: Tensor | float, like: Tensor) -> Tensor:
    """Return `weight` as a detached float64 scalar on the device of `like` (float32 if the device has no float64).
    Raise UsageError for a number that cannot be a count, such as a negative one. The value of a tensor is not read."""
    try:
        if not isinstance(weight, Tensor) and not 0 <= weight < float("inf"):
            raise ValueError
        return torch.as_tensor(weight, dtype=_dtype_of_weights(like), device=like.device).detach().reshape(())
    except (TypeError, ValueError, RuntimeError):  # also raised for a text, or a tensor with several elements
        told = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise UsageError(
            f"weight must be the number of items that the loss is a mean over, 0 or more, but it is {told}."
        ) from None


def _dtype_of_weights(like: Tensor) -> torch.dtype:
    return torch.float32 if like.device.type == "mps" else torch.float64
