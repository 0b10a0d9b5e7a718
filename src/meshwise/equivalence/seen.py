"""What a check asks for, and what one side of it saw: plain data, CPU tensors, nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan, at_precision
from meshwise.training.keyed import Draw
from meshwise.training.order import BatchSlice, epoch_order, part

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Ask:
    """What is checked.

    plan: the plan of the other side. steps: optimizer steps that both sides take. precision: `fp64` lifts both sides;
    another one of the plan's words computes in it, to see its rounding.
    """

    plan: Plan
    steps: int = 3
    precision: str = "fp64"

    @property
    def lifted(self) -> bool:
        return self.precision == "fp64"

    @property
    def dtypes(self) -> Dtypes:
        """What both sides store and compute in."""
        return at_precision(self.plan, self.precision).dtypes


@dataclass(frozen=True)
class Cut:
    """The samples [start, stop) of an epoch's order: the global batch of one step."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Output:
    """What a module gave in one call, as prints of it (see watch.py), an entry a rank that had samples.

    prints: layout -> prints. `0` and `1`: a row for each sample, where that dim can hold the batch; `each`: a row for
    each position of each sample; `whole`: one row.
    """

    microbatch: int
    module: str
    kind: str
    number: int
    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    prints: dict[str, tuple[Tensor, ...]]

    @property
    def key(self) -> tuple[int, str, int]:
        return self.microbatch, self.module, self.number


@dataclass
class Step:
    """One optimizer step of a side, in the order in which things happen.

    samples: microbatch -> rank -> the indices that counted. draws: microbatch -> random draws. ready: parameters in the
    order in which their gradients were ready. clipped: gradients as the optimizer saw them, where they are clipped.
    rates: learning rate of each group in this step; scheduler: its numbers after it.
    apart: `gradient NAME`, `parameter NAME`, `learning rate NAME` and so on -> how far ranks are apart in it, relative
    to its size. parts: microbatch -> prints of its part of each gradient, where a step has several, on one device.
    weighed: whether the loss gives a weight of its own. touched: (rank, microbatch, norm before, norm after, all by one
    factor) for gradients that changed between two backwards. redrawn: whether a backward drew numbers that its forward
    did not. coarse: parameters that some rank holds in values of a
    lower precision, and which.
    """

    samples: list[list[list[int]]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    draws: list[list[Draw]] = field(default_factory=list)
    loss: float = 0.0
    gradients: Named = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)
    clipped: Named = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    optimizer: dict[str, Named] = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    scheduler: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    parts: list[Named] = field(default_factory=list)
    weighed: bool = True
    touched: list[tuple[int, int, float, float, bool]] = field(default_factory=list)
    redrawn: bool = False
    coarse: dict[str, str] = field(default_factory=dict)


@dataclass
class Side:
    """All that one side saw.

    modules: name -> class. tied: groups of names that are one parameter. evaluated: indices of the test set that
    counted. apart: how far ranks are apart at the start, as in `Step`. unkeyed: random operators that
    could not be keyed, so that ranks draw on their own. drawing: modules that draw, without those that they hold.
    recomputed: modules that run again in the backward. evaluation_draws: random draws while it evaluates. sums: sum and
    weight of each metric. alone: metric -> sample -> its mean and weight alone, of samples at the ends of batches.
    stand_ins: first sample of an evaluated batch -> how many ranks had no sample of it.
    """

    modules: dict[str, str]
    tied: list[tuple[str, ...]]
    initial: Named
    initial_buffers: Named
    steps: list[Step] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=list)
    unkeyed: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()
    apart: dict[str, float] = field(default_factory=dict)
    drawing: set[str] = field(default_factory=set)
    recomputed: tuple[str, ...] = ()
    evaluation_draws: int = 0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    alone: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    stand_ins: dict[int, int] = field(default_factory=dict)


def cuts_of(samples: int, batch_size: int, ask: Ask) -> list[Cut]:
    """The global batches of a check: whole ones, and a ragged one at the end, which gives ranks unequal shares."""
    ragged = min(2 * ask.plan.devices * ask.plan.accumulate + 1, max(batch_size - 1, 1))
    cuts: list[Cut] = []
    epoch = start = 0
    while len(cuts) < ask.steps:
        wanted = ragged if len(cuts) == ask.steps - 1 and ask.steps > 1 else batch_size
        stop = min(start + wanted, samples)
        cuts.append(Cut(epoch, start, stop))
        epoch, start = (epoch + 1, 0) if stop == samples else (epoch, stop)
    return cuts


def microbatches(cut: Cut, order: Tensor, accumulate: int) -> list[BatchSlice]:
    """The microbatches of a step as one device takes them."""
    total = cut.stop - cut.start
    micro = min(accumulate, total)
    bounds = [part(cut.start, cut.stop, micro, k) for k in range(micro)]
    return [BatchSlice(order[first:last], last - first, total) for first, last in bounds]


def order_of(seed: int, cut: Cut, samples: int) -> Tensor:
    """The order of the epoch that a cut belongs to."""
    return epoch_order(seed, cut.epoch, samples)


def test_samples(samples: int, batch_size: int) -> int:
    """How much of a test set is evaluated: two batches and one sample, which leaves ranks without any."""
    return min(samples, 2 * batch_size + 1)


def plain(tensor: Tensor) -> Tensor:
    """A copy on the CPU that nobody writes to: float64 where it is floating."""
    copy = tensor.detach().to(device="cpu", copy=True)
    return copy.to(torch.float64) if copy.is_floating_point() else copy
