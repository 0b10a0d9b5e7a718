"""The weight of a loss: what its mean is over, so that means of unequal parts add up to the mean of the whole."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from meshwise.spec.errors import UsageError


def split_weight(result: Any, samples: int, where: str) -> tuple[Tensor, Tensor | float | None]:
    """A loss and its weight from what a job's function returned; weight None when the batch's samples weigh it.

    A stand-in (samples 0) weighs nothing. Raises UsageError when the loss or its weight is not one number.
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
    if weight is None:
        return mean.reshape(()), None
    weight = weight if samples else weight * 0
    return zero_if_empty(mean.reshape(()), as_weight(weight, mean)), weight


def zero_if_empty(mean: Tensor, weight: Tensor) -> Tensor:
    """`mean`, and 0 where it is over nothing: such a mean is no number, which no weight of 0 takes out of a sum."""
    return torch.where(weight != 0, mean, torch.zeros_like(mean))


def as_weight(weight: Tensor | float, like: Tensor) -> Tensor:
    """`weight` as a detached float64 scalar on the device of `like` (float32 where the device has no float64)."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    if isinstance(weight, Tensor):
        return weight.detach().to(device=like.device, dtype=dtype).reshape(())
    return torch.tensor(float(weight), dtype=dtype, device=like.device)
