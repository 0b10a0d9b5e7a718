"""The weight of a loss: what its mean is over, so that means of unequal parts add up to the mean of the whole."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from meshwise.spec.errors import UsageError
from meshwise.training.order import BatchSlice
from meshwise.transfer import collectives

Losses = list[tuple[Tensor, Tensor | float]]
"""A loss and its weight for each microbatch of a step, still on the device."""


class StepWeights:
    """What makes of the losses of this rank's microbatches the gradient of the mean over the global batch.

    Weights that the sampler knows (samples) scale each loss before its backward, and nothing is communicated for them.
    Weights that only the loss knows (tokens) are added over the ranks while the backward runs, and divide the
    gradients before those are averaged. Until then gradients are in units of the first weight, so that they are neither
    huge nor tiny; coupled: ranks' gradients meet inside the backward, so that they must share the unit, which is 1.
    """

    def __init__(self, ranks: int, coupled: bool) -> None:
        self._ranks, self._coupled = ranks, coupled
        self.unit: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None
        self.losses: Losses = []

    def scale(self, mean: Tensor, weight: Tensor | float | None, part: BatchSlice) -> Tensor:
        """The scalar to run the backward of. weight: None where the samples of `part` weigh it."""
        if weight is None:
            self.losses.append((mean.detach(), float(part.samples)))
            ratio = part.samples * self._ranks / part.total
            return mean if ratio == 1 else mean * ratio
        weight = as_weight(weight, mean)
        self.losses.append((mean.detach(), weight))
        if self.unit is None:
            self.unit = torch.ones_like(weight) if self._coupled else weight.clamp(min=1)
        return mean * (weight / self.unit).to(mean.dtype)

    def begin_sum(self) -> Callable[[], Tensor]:
        """Begin to add losses and weights over the ranks; the result gives the factor that gradients are left with."""
        assert self.unit is not None
        unit = self.unit
        wait = self._wait = collectives.begin_sum(total_of(self.losses)).wait
        return lambda: unit * self._ranks / wait()[1]

    def global_mean(self) -> Tensor:
        """The mean of the losses over all ranks, once their sum has begun."""
        assert self._wait is not None
        total, weight = self._wait().unbind()
        return total / weight


def total_of(losses: Losses) -> Tensor:
    """The weighted sum of losses and the sum of their weights: shape (2,)."""
    weights = [as_weight(weight, loss) for loss, weight in losses]
    total = torch.stack([loss.to(w.dtype) * w for (loss, _), w in zip(losses, weights, strict=True)]).sum()
    return torch.stack([total, torch.stack(weights).sum()])


def split_weight(result: Any, samples: int, where: str) -> tuple[Tensor, Tensor | float | None]:
    """A loss and its weight from what a job's function returned; weight None when the batch's samples weigh it.

    A padding sample (samples 0) weighs nothing. Raises UsageError when the loss or its weight is not one number.
    """
    mean, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        shape = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
        raise UsageError(
            f"{where} gave {shape}, not one number. Return a mean, for instance loss.mean(), or (mean, weight)."
        )
    number = weight.numel() == 1 if isinstance(weight, Tensor) else weight is None or isinstance(weight, Real)
    if not number:
        raise UsageError(
            f"{where} gave a {type(weight).__name__} as its weight, not one number. "
            "Return a mean alone, or (mean, weight), where weight counts what the mean is over."
        )
    return unpadded(mean.reshape(()), weight, samples)


def unpadded(mean: Tensor, weight: Tensor | float | None, samples: int) -> tuple[Tensor, Tensor | float | None]:
    """A loss and its weight, which is 0 where the batch is padding. A mean over nothing is no number, which no weight
    of 0 takes out of a sum: it becomes 0."""
    if weight is None:
        return mean, None
    weight = weight if samples else weight * 0
    return torch.where(as_weight(weight, mean) != 0, mean, torch.zeros_like(mean)), weight


def as_weight(weight: Tensor | float, like: Tensor) -> Tensor:
    """`weight` as a detached float64 scalar on the device of `like` (float32 where the device has no float64)."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    if isinstance(weight, Tensor):
        return weight.detach().to(device=like.device, dtype=dtype).reshape(())
    return torch.tensor(float(weight), dtype=dtype, device=like.device)
