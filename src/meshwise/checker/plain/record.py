"""Hold what one rank of a plain script has read and computed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from meshwise.checker.loss_numbers import Key, Numbers


@dataclass
class Pass:
    """One pass of a script over a DataLoader."""

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
    def is_peek(self) -> bool:
        """Whether the program only looked at the first batch, as by `next(iter(loader))`."""
        return not self.trained and not self.over and len(self.given) == 1

    @property
    def read(self) -> list[int]:
        """The sample indices of all batches that the sampler gives, in order."""
        return [index for batch in self.batches for index in batch]


@dataclass
class Step:
    """One step of an optimizer.

    starts: sketches of its parameters before the step.
    state: sketches of all models' parameters and buffers, as of the first forward after the previous step.
    exchanges: the lines that gathered or reduced tensors among ranks since the last step, before a backward.
    own: for each backward, sketches of the gradients of this process's own loss, before the program's hooks and any
        reduction.
    numbers, of_loss: for each backward, all scalars since the last one, and those of them that its loss is made of.
    rows, batches: for each backward, the number of samples in the newest batch, and the numbers of its loader, of the
        pass over it, and of the batch.
    """

    optimizer: int = 0
    places: tuple[str, str, str] = ("", "", "")
    settings: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    starts: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    own: list[dict[str, Tensor]] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    of_loss: list[list[Key]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    batches: list[tuple[int, int, int] | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    ticks: int = 0
    unreduced: str = ""
    hooks: tuple[str, ...] = ()
    reduced_at: tuple[str, ...] = ()
    exchanges: list[str] = field(default_factory=list)
    clips: list[tuple[str, float]] = field(default_factory=list)
    unclipped: dict[str, Tensor] = field(default_factory=dict)
    by_trainer: bool = False
    draws: bool = False

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
    """What was recorded in one run of a script, on one rank or in one process. lost: where it lost another rank."""

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
    lost: str = ""
    left: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The losses of all backward passes."""
        return [*(loss for step in self.steps for loss in step.losses), *self.left]

    @property
    def microbatches(self) -> int:
        """The most frequent number of backward passes in a step."""
        return statistics.mode([len(step.scales) for step in self.steps] or [1]) or 1


@dataclass(frozen=True)
class Follow:
    """What a run of one process has to repeat: the samples read by all ranks, and the settings and parameters of rank
    0."""

    ranks: Sequence[Record]

    def unions(self, own: Pass) -> list[list[list[int]]] | None:
        """Return the batches for one process to read, each as the ranks' parts. None if no rank made this pass."""
        passes = [p for record in self.ranks for p in record.passes if (p.loader, p.number) == (own.loader, own.number)]
        if not passes:
            return None
        if own.samples is None:
            return []  # an empty list lets the process read its own batches
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
