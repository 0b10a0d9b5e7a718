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
    """One pass of a script over a DataLoader.

    loader: the number of the loader, in the order of first use.
    number: how many passes over this loader came before, e.g. 0 in the first epoch.
    places: the source line of the script that reads the loader, then the lines that made the loader and its sampler.
    samples: the indices of the samples in the data set. None if the data set has no indices.
    batches: the sample indices of every batch that the sampler gives, also of batches that the script did not get.
    shuffles: whether the indices are not in ascending order.
    content: the first sample of the data set as text, to notice that ranks have different data sets.
    given: the positions in `batches` of the batches that the script got.
    trained: whether a backward pass followed a batch.
    padded_away: whether the script called `gather_for_metrics`, which removes repeated samples.
    over: whether the loop has ended.
    endless: whether the sampler may give more batches than `batches`.
    counted: the value of len(loader), if one process reads the batches of the ranks. 0 if len(loader) is not changed.
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
        """The sample indices of all batches that the sampler gives, in order."""
        return [index for batch in self.batches for index in batch]


@dataclass
class Step:
    """One step of an optimizer.

    optimizer: the number of the optimizer, in the order of first use.
    places: the source lines of the last forward pass, its backward pass, and the step.
    settings: the numbers in each parameter group before the step, such as the learning rate, by name.
    gradients: the gradients before the step, by the name of the parameter.
    parameters: the parameters after the step, by name.
    losses: the losses of the backward passes.
    scales: for each backward pass, the factor by which the script has multiplied the loss.
    ticks: the number of scheduler steps since the last optimizer step.
    unreduced: a reason to suspect that the gradients are not summed over all ranks. Empty if there is none.
    hooks: the source lines that made the hooks on the gradients.
    clips: the source lines that clip gradients, each with the norm before clipping.
    unclipped: the gradients before the script clipped them. Empty if it clipped none.
    by_trainer: whether transformers' Trainer called the last backward pass.
    draws: whether random numbers were drawn between a batch and its backward pass.
    start: the sum of the parameters' norms before the step.
    """

    optimizer: int = 0
    places: tuple[str, str, str] = ("", "", "")
    settings: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    ticks: int = 0
    unreduced: str = ""
    hooks: tuple[str, ...] = ()
    clips: list[tuple[str, float]] = field(default_factory=list)
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
    """What was recorded in one run of a script, on one rank or in one process.

    passes: the passes over loaders.
    steps: the optimizer steps.
    shown: (source line, text, flag) for each call of print. The flag is False for a text that was printed after the end
        of an evaluation and before the next loop.
    norms: the classes of the batch norms that ran in training, e.g. `BatchNorm2d`.
    horizon: the number of scheduler steps until the schedule ends. None if it is unknown.
    length: the number of optimizer steps in the whole training. 0 if it is unknown.
    ticked_at: the source line that steps the scheduler, and the source line that makes it.
    ticks: the number of scheduler steps since the last optimizer step.
    plateau_metrics: (source line, metric) for each metric that the script passed to a ReduceLROnPlateau.
    rates: all learning rates that were in use when the script printed.
    schedules: the source lines that make a scheduler.
    wrapped: whether the script made a DistributedDataParallel.
    accelerate: whether the script imported accelerate.
    refused: why the run cannot be compared. Empty if it can.
    left: the losses of the backward passes after the last optimizer step.
    evaluated: the L2 norm of each new running mean that a batch norm used in an evaluation.
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
    plateau_metrics: list[tuple[str, float]] = field(default_factory=list)
    rates: set[float] = field(default_factory=set)
    schedules: list[str] = field(default_factory=list)
    wrapped: bool = False
    accelerate: bool = False
    refused: str = ""
    left: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The losses of all backward passes."""
        return [*(loss for step in self.steps for loss in step.losses), *self.left]

    @property
    def microbatches(self) -> int:
        """The most frequent number of backward passes in a step. A step at the end of an epoch may have fewer. The
        first step of an epoch may have more, if the epoch before ended with backward passes but without a step."""
        return statistics.mode([len(step.scales) for step in self.steps] or [1]) or 1


@dataclass(frozen=True)
class Follow:
    """What a run of one process has to repeat: the samples read by all ranks, and the settings and parameters of rank
    0."""

    ranks: Sequence[Record]

    def unions(self, own: Pass) -> list[list[list[int]]] | None:
        """Return the batches that one process reads in place of its own, to read what all ranks have read. Each batch
        has one list of sample indices for each rank, e.g. [[0, 1], [2, 3]] for two ranks.

        Return None if no rank made this pass. Return an empty list if the data set has no sample indices. In an
        evaluation, return each sample only once, even if several ranks have read it.

        own: the pass of one process. Its field `counted` is set if the batches of the ranks are returned.
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
