"""Define a job: an ordinary training program as plain functions.

A job knows nothing about devices.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.reductions import REDUCTIONS
from meshwise.training.tracking.trackers import Tracker, check_trackers

if TYPE_CHECKING:  # the options of a run refer to Job, and their help must not import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Weighted: TypeAlias = "Tensor | tuple[Tensor, Tensor | float]"
_MUST_BE_GIVEN: Any = ...


@dataclass(frozen=True)
class EpochEnd:
    """The facts about an epoch that has ended. A job's callbacks get them after each epoch, on every rank.

    epoch: the number of the epoch, counted from 1.
    epochs: the number of epochs of the job.
    step: the number of optimizer steps so far.
    loss: the loss of the last step, over all ranks.
    metrics: the metrics of the evaluation after this epoch. Empty if there was no evaluation.
    best: whether that evaluation is the best one so far.
    model, optimizer: the model and the optimizer in training. After each callback, the model is put into training mode.
    """

    epoch: int
    epochs: int
    step: int
    loss: float | None
    metrics: Mapping[str, float]
    best: bool
    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True)
class Job:
    """A training program: model, data, loss and optimizer.

    name: used in messages and for the run's folder. Default: the name of the variable that holds the job.
    model: a function that builds the model, called once on every rank. All ranks start with the values of rank 0.
    loss: `loss(model, batch)` returns a scalar, the mean over the samples of `batch`, or `(mean, weight)`. There,
        `weight` is the number of items in the mean, such as the number of tokens for a mean over tokens. Gradients
        belong to the exact weighted mean over the global batch.
    reduction: `sum` if the loss is a sum over the samples of `batch`. Gradients then belong to the sum over the
        global batch, and the test loss of a job without metrics is the mean per sample. By default, the loss is taken
        to be a mean, but a run on several devices is refused if meshwise finds that it is a sum. `mean` allows it.
    optimizer: a function that makes the optimizer from the parameters.
    data: the training set, or a function that returns the training set. It is a map-style dataset, or a tuple or dict
        of tensors of equal length, which are sliced into batches. A function is called on each rank. If the training
        set itself is given, a copy of it is sent to each rank. If the dataset has a method `batch(indices)`, this
        method returns whole batches. Otherwise, torch's DataLoader reads the dataset.
    test: the test set, in the same form as `data`. Every sample counts once.
    metrics: `metrics(model, batch)` returns a dict such as `{"accuracy": ...}`. Each value is a mean, in the same form
        as the result of `loss`.
    predict: `predict(model, batch)` returns one row for each sample of `batch`: a tensor, a list, or a dict or tuple of
        these. By default, the prediction is the model's output for the batch, or the `logits` in that output. The model
        is then called with the entries of a dict by name, or with the first entry of a tuple. See `mw.predict`.
    scheduler: a function that makes a learning rate scheduler from the optimizer. It steps once per optimizer step.
    collate: a function that joins samples into a batch, like the `collate_fn` of a DataLoader.
    batch_size: the number of samples in the *global* batch, on any number of devices.
    clip_norm: the norm to which the gradient of the whole step is clipped.
    loader_workers: the number of DataLoader worker processes on each rank.
    validate_every: the number of epochs between two evaluations, or the number of optimizer steps, such as
        `"500 steps"`, counted from the start of the run. There is also an evaluation after the last epoch.
    best: which evaluation is the best, such as `max accuracy` or `min loss`. Its weights are saved as best.safetensors.
    patience: training ends after this many evaluations in a row that were no better than the best one so far.
    callbacks: functions that are called with an `EpochEnd` on every rank, after each epoch and its evaluation.
    stage_cost: `stage_cost(name, block)` returns the cost of a block of the model, in any unit. A model is split into
        pipeline stages so that the most expensive stage is as cheap as possible. By default, the cost is the number of
        parameters.
    log: where losses and metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, or functions of your
        own, `track(values, step)`, called on rank 0. `--log` adds more. A tracker that fails does not end the training.
    """

    name: str = ""
    model: Callable[[], nn.Module] = _MUST_BE_GIVEN
    loss: Callable[[nn.Module, Any], Weighted] = _MUST_BE_GIVEN
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _MUST_BE_GIVEN
    data: Any = _MUST_BE_GIVEN
    test: Any = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Weighted]] | None = None
    predict: Callable[[nn.Module, Any], Any] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 64
    epochs: int = 1
    seed: int = 0
    clip_norm: float | None = None
    loader_workers: int = 0
    reduction: Literal["mean", "sum"] | None = None
    validate_every: int | str = 1
    best: str | None = None
    patience: int | None = None
    callbacks: Sequence[Callable[[EpochEnd], object]] = ()
    log: str | Tracker | Sequence[str | Tracker] = ()
    stage_cost: Callable[[str, nn.Module], float] | None = None

    def __post_init__(self) -> None:
        missing = [name for name in ("model", "loss", "optimizer", "data") if getattr(self, name) is _MUST_BE_GIVEN]
        if missing:
            raise UsageError(f"job '{self.name}' lacks {', '.join(missing)}. Write Job({missing[0]}=..., ...).")
        for name in ("data", "test"):
            given = getattr(self, name)
            if not isinstance(given, type) and hasattr(type(given), "__getitem__"):  # a data set, no function for one
                object.__setattr__(self, name, functools.partial(_same, given))
        if callable(self.callbacks):
            object.__setattr__(self, "callbacks", (self.callbacks,))
        counts = {"batch_size": 1, "epochs": 1, "seed": 0, "loader_workers": 0}
        for name, least in (counts | ({} if self.patience is None else {"patience": 1})).items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"job '{self.name}': {name}={value!r} must be a whole number of at least {least}.")
        if self.evaluates[0] < 1:
            raise UsageError(
                f"job '{self.name}': validate_every={self.validate_every!r} must be a whole number of at least 1: a "
                'number of epochs, or a number of steps such as "500 steps".'
            )
        if self.seed >= 2**31:
            raise UsageError(f"job '{self.name}': seed={self.seed} is too large. Use a seed below 2**31.")
        if self.best is not None:
            if not re.fullmatch(r"(max|min) \S.*", self.best) or self.test is None:
                raise UsageError(
                    f"job '{self.name}': best={self.best!r} must be a direction and a metric of the test set, such as "
                    "'max accuracy', and the job needs test=."
                )
        elif self.patience is not None:
            raise UsageError(f"job '{self.name}': patience={self.patience} needs best=. Add best='max accuracy'.")
        check_trackers([name for name in self.trackers if isinstance(name, str)])
        check_known(f"job '{self.name}': reduction", "mean" if self.reduction is None else self.reduction, REDUCTIONS)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(
                f"job '{self.name}': clip_norm={self.clip_norm!r} must be above 0, or None for no clipping."
            )

    @property
    def trackers(self) -> tuple[str | Tracker, ...]:
        """The job's loss and metric trackers, that is, the entries of its attribute `log`. A single tracker becomes a
        tuple with one entry."""
        return (self.log,) if isinstance(self.log, str) or callable(self.log) else tuple(self.log)

    @property
    def evaluates(self) -> tuple[int, str]:
        """The field `validate_every` as a count and a unit, such as `(500, "steps")`. The count is 0 if the field is
        invalid."""
        found = re.fullmatch(r"(\d+)(?:\s*(epoch|step)s?)?", str(self.validate_every))
        return (0, "epochs") if found is None else (int(found[1]), f"{found[2] or 'epoch'}s")

    def named(self, name: str = "") -> Job:
        """Return this job if it has a name. Otherwise return a copy that has a name.

        The new name is `name`. If `name` is empty, it is the name of the variable in `__main__` that holds the job. If
        there is no such variable, it is `job`.
        """
        if self.name:
            return self
        bound = (key for key, value in vars(sys.modules["__main__"]).items() if value is self and key[0] != "_")
        return replace(self, name=name or next(bound, "job"))


def _same(dataset: Any) -> Any:
    return dataset
