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

    loader: its number, in the order of first use. number: of this pass over it. places: the user's lines that read it
    and that made it. samples: the indices of its data set; None if it has no indices. content: text of one sample, to
    tell data sets apart. batches: the indices of every batch of its sampler; given: which of them the script got.
    trained: whether a backward followed a batch. padded_away: whether `gather_for_metrics` removed repeated samples.
    over: whether the loop has ended. endless: whether its sampler may give more. counted: how many batches its loader
    has in one process that reads as the ranks do; 0 for its own number.
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

    places: the lines of the last forward, its backward, and the step. settings: numbers of each group, before the step.
    gradients: by parameter, before the step. parameters: after it. losses: of its backwards. scales: the final factor
    of each. ticks: scheduler steps since the last optimizer step. unreduced: why its gradients may not be those of all
    ranks. hooks: lines of hooks on the gradients. clips: lines that clip, and the norm before.
    unclipped: gradients before they were clipped. by_trainer: whether transformers' Trainer called its last backward.
    draws: whether random numbers were drawn between a batch and its backward. start: the sum of the parameters' norms
    before the step.
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
        """The sum of its losses."""
        return sum(self.losses)

    @property
    def before_clipping(self) -> Step:
        """The step as it was before its gradients were clipped."""
        return replace(self, gradients=self.gradients | self.unclipped)


@dataclass
class Record:
    """What one rank did. norms: kinds of batch norm that ran in training. horizon: the number of ticks until the
    schedule ends, and the lines that make and tick it. shown: lines that print, what they print, and whether it is from
    a training or inside an evaluation. rates: the learning rates where a line prints. ticks: since the last step.
    told: lines that give a schedule a metric, and it. length: steps of the whole training; 0: not known. schedules:
    lines that make one. refused: why none of it can be compared. left: losses after the last step.
    evaluated: of the statistics of batch norm that evaluations use, a number each time it is another."""

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
        """Those of all backwards."""
        return [*(loss for step in self.steps for loss in step.losses), *self.left]

    @property
    def microbatches(self) -> int:
        """How many a step has: more where an epoch's last batches made no step, fewer where its last step is short."""
        return statistics.mode([len(step.scales) for step in self.steps] or [1]) or 1


@dataclass(frozen=True)
class Follow:
    """What one process repeats: all ranks' reads, and rank 0's settings and parameters."""

    ranks: Sequence[Record]

    def unions(self, own: Pass) -> list[list[list[int]]] | None:
        """Return the batches of a pass, each as the samples of every rank; None if no rank made the pass. An evaluation
        that was not read whole reads what one process does, or each sample once. own: what one process would read."""
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
