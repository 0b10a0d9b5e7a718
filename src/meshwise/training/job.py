"""The job: an ordinary training program as plain functions. Nothing in it knows about devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.spec.errors import UsageError

Weighted = Tensor | tuple[Tensor, Tensor | float]


@dataclass(frozen=True)
class Job:
    """A training program: what is trained on what, with which loss and optimizer.

    model: builds the model; called once on every rank, start values are those of rank 0.
    loss: `loss(model, batch)` gives a scalar mean over the samples of `batch`, or `(mean, weight)` where `weight`
        counts what the mean is over (a token mean returns its number of tokens). Gradients are the exact weighted mean
        over the global batch.
    optimizer: makes the optimizer from the parameters.
    data: gives the training set: a map-style dataset, or a tuple or dict of equally long tensors (sliced by batch). A
        dataset with `batch(indices)` is asked for whole batches; any other goes through torch's DataLoader.
    test: gives the test set, like `data`. Every sample counts once.
    metrics: `metrics(model, batch)` gives named means like `loss` does, for instance `{"accuracy": ...}`.
    scheduler: makes a scheduler from the optimizer; it ticks once an optimizer step.
    collate: joins samples to a batch, as DataLoader's `collate_fn`.
    batch_size: samples of the *global* batch, on any number of devices.
    clip_norm: the norm to which the gradient of the whole step is clipped.
    loader_workers: processes that a DataLoader reads with, on each rank.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Weighted]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: Callable[[], Any]
    test: Callable[[], Any] | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Weighted]] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 64
    epochs: int = 1
    seed: int = 0
    clip_norm: float | None = None
    loader_workers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("epochs", 1), ("seed", 0), ("loader_workers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"job '{self.name}': {name}={value!r} must be a whole number of at least {least}.")
        if self.seed >= 2**31:
            raise UsageError(f"job '{self.name}': seed={self.seed} is too large. Use a seed below 2**31.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(
                f"job '{self.name}': clip_norm={self.clip_norm!r} must be above 0, or None for no clipping."
            )
