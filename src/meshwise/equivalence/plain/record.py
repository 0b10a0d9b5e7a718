"""Hold what one rank of a plain script has read and computed.

Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass
class Pass:
    """One pass over a DataLoader.

    loader: the number of the loader, in the order of first use.
    number: how many passes over this loader were before.
    places: the source line of the script that reads the loader, then the lines that made the loader and its sampler.
    samples: the indices of the samples in the data set. None if the data set has no indices.
    batches: the indices of every batch of its sampler.
    shuffles: whether the indices are not in ascending order.
    content: the text of one sample, to tell data sets apart.
    given: which of the batches the script got.
    trained: whether a backward pass followed a batch.
    padded_away: whether `gather_for_metrics` removed repeated samples.
    over: whether the loop has ended.
    endless: whether its sampler may give more batches.
    counted: the length that the loader reports in one process that repeats the reads of the ranks. 0 stands for the
        loader's own length.
    """

    loader: int
    number: int
    places: tuple[str, ...]
    samples: frozenset[int] | None
    batches: list[list[int]]
    shuffles: bool
    content: str
    given: list[int] = field(default_factory=list)
    trained: bool = False
    padded_away: bool = False
    over: bool = False
    endless: bool = False
    counted: int = 0

    @property
    def read(self) -> list[int]:
        """The samples of the whole pass."""
        return [index for batch in self.batches for index in batch]


@dataclass
class Step:
    """One step of an optimizer.

    optimizer: the number of the optimizer, in the order of first use.
    places: the source lines of the last forward pass, its backward pass, and the step.
    settings: the numbers of each parameter group, before the step.
    gradients: the gradients by parameter, before the step.
    parameters: the parameters after the step.
    losses: the losses of the backward passes.
    scales: for each backward pass, the factor by which the script has multiplied the loss.
    ticks: scheduler steps since the last optimizer step.
    unreduced: a reason to suspect that the gradients are not summed over all ranks. Empty if there is none.
    hooks: the source lines of hooks on the gradients.
    clips: the source lines that clip gradients, each with the norm before clipping.
    unclipped: the gradients before they were clipped.
    by_trainer: whether transformers' Trainer called the last backward pass.
    draws: whether random numbers were drawn between a batch and its backward pass.
    start: the sum of the parameters' norms before the step.
    """

    optimizer: int
    places: tuple[str, str, str]
    settings: list[dict[str, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    ticks: int = 0
    unreduced: str = ""
    hooks: tuple[str, ...] = ()
    clips: tuple[tuple[str, float], ...] = ()
    unclipped: dict[str, Tensor] = field(default_factory=dict)
    by_trainer: bool = False
    draws: bool = False
    start: float = 0.0

    @property
    def loss(self) -> float:
        """The sum of the step's losses."""
        return sum(self.losses)

    @property
    def before_clipping(self) -> Step:
        """The step as it was before its gradients were clipped."""
        return replace(self, gradients=self.gradients | self.unclipped)


@dataclass
class Record:
    """What one rank did.

    passes, steps: the passes over loaders, and the optimizer steps.
    shown: (source line, printed text, flag) for each call of print. The flag is False after the end of an evaluation,
        and True at other times.
    norms: the kinds of batch norm that ran in training.
    horizon: the number of scheduler steps until the schedule ends. None if it is unknown.
    length: the optimizer steps of the whole training. 0 if it is unknown.
    ticked_at: the source line that steps the scheduler, and the line that makes the scheduler.
    ticks: scheduler steps since the last optimizer step.
    told: the source lines that pass a metric to a scheduler, each with the metric.
    rates: the learning rates at the moments when a line prints.
    schedules: the source lines that make a scheduler.
    wrapped: whether the script made a DistributedDataParallel.
    accelerate: whether the script imported accelerate.
    refused: why the run cannot be compared. Empty if it can.
    left: the losses after the last optimizer step.
    evaluated: norms of the running means that batch norms use in evaluations, one each time it changes.
    """

    rank: int
    passes: list[Pass] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    shown: list[tuple[str, str, bool]] = field(default_factory=list)
    norms: tuple[str, ...] = ()
    horizon: int | None = None
    length: int = 0
    ticked_at: tuple[str, ...] = ()
    ticks: int = 0
    told: list[tuple[str, float]] = field(default_factory=list)
    rates: set[float] = field(default_factory=set)
    schedules: list[str] = field(default_factory=list)
    wrapped: bool = False
    accelerate: bool = False
    refused: str = ""
    left: tuple[float, ...] = ()
    evaluated: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The losses of all backward passes."""
        return [*(loss for step in self.steps for loss in step.losses), *self.left]

    @property
    def microbatches(self) -> int:
        """The usual number of backward passes in a step. A step may have more if the last batches of an epoch made no
        step, and the last step of an epoch may have fewer."""
        return statistics.mode([len(step.scales) for step in self.steps] or [1]) or 1


@dataclass(frozen=True)
class Follow:
    """What a run of one process has to repeat: the samples read by all ranks, and the settings and parameters of rank
    0."""

    ranks: Sequence[Record]

    def unions(self, own: Pass) -> list[list[list[int]]] | None:
        """Return the batches of a pass, each as the samples of every rank. Return None if no rank made the pass, and an
        empty list if its samples have no indices.

        If every rank read a whole evaluation, the batches are those that one process would read. If the evaluation was
        cut short, each sample is in only one batch.

        own: the pass that one process would make.
        """
        passes = [p for record in self.ranks for p in record.passes if (p.loader, p.number) == (own.loader, own.number)]
        if not passes:
            return None
        if own.samples is None:
            return []  # it goes its own way
        if not any(p.trained for p in passes) and all(len(p.given) == len(p.batches) for p in passes):
            return [[batch] for batch in own.batches]
        own.counted = len(passes[0].batches)
        rows = [[p.batches[n] for n in p.given] for p in passes]
        found = [[row[n] for row in rows if n < len(row)] for n in range(max(map(len, rows), default=0))]
        if any(p.trained for p in passes):
            return found
        seen, once = set[int](), list[list[list[int]]]()
        for parts in found:
            fresh = [[i for i in part if not (i in seen or seen.add(i))] for part in parts]  # type: ignore[func-returns-value]
            if any(fresh):
                once.append([part for part in fresh if part])
        return once
