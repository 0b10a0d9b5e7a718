"""What a check compares, and what one side of it did: plain data, CPU tensors, nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan, at_precision
from meshwise.training.keyed import Draw
from meshwise.training.order import BatchSlice, epoch_order, part

Named = dict[str, Tensor]
Divergence = dict[tuple[str, str], float]
"""(kind of a difference, name) -> how much ranks differ from each other in it, relative to its size."""


@dataclass(frozen=True)
class CheckSpec:
    """What is checked.

    plan: the plan of the other side; of a script that chooses its own, replicas on as many devices. steps: optimizer
    steps that both sides take. in_float64: whether both compute everything in float64; else in the plan's own
    precision, to see its rounding.
    """

    plan: Plan
    steps: int = 3
    in_float64: bool = True

    def applied(self, plan: Plan) -> Plan:
        """A plan in the precision of this check."""
        return at_precision(plan, "fp64") if self.in_float64 else plan

    @property
    def dtypes(self) -> Dtypes:
        """What both sides store and compute in."""
        return self.applied(self.plan).dtypes

    @property
    def ragged(self) -> int:
        """Samples of a ragged batch, which gives ranks unequal slices."""
        return 2 * self.plan.devices * self.plan.accumulate + 1


@dataclass(frozen=True)
class BatchRange:
    """The samples [start, stop) of an epoch's order: the global batch of one step."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Output:
    """What a module gave in one call, as sketches of it (see sketches.py), an entry a rank that had samples.

    sketches: layout -> sketches. `0` and `1`: a row for each sample, where that dim can hold the batch; `each`: a row
    for each position of each sample; `whole`: one row.
    """

    microbatch: int
    module: str
    kind: str
    number: int
    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    sketches: dict[str, tuple[Tensor, ...]]

    @property
    def key(self) -> tuple[int, str, int]:
        return self.microbatch, self.module, self.number


@dataclass
class StepTrace:
    """One optimizer step of a side, in the order in which things happen.

    samples: microbatch -> rank -> the indices that counted. draws: microbatch -> random draws. ready_order: parameters
    in the order in which their gradients were ready. clipped_gradients: as the optimizer saw them, where they are
    clipped. learning_rates: of each group in this step; scheduler: its numbers after it.
    microbatch_gradients: microbatch -> sketches of its part of each gradient, where a step has several, on one device.
    loss_has_weight: whether the loss gives a weight of its own. modified_between_backwards: (rank, microbatch, norm
    before, norm after, all by one factor) for gradients that changed between two backwards. rng_mismatch: whether a
    backward drew numbers that its forward did not. low_precision: parameters that some rank has in values of a lower
    precision, and which.
    """

    samples: list[list[list[int]]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    draws: list[list[Draw]] = field(default_factory=list)
    loss: float = 0.0
    gradients: Named = field(default_factory=dict)
    ready_order: list[str] = field(default_factory=list)
    clipped_gradients: Named = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    optimizer_state: dict[str, Named] = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    scheduler: dict[str, float] = field(default_factory=dict)
    rank_divergence: Divergence = field(default_factory=dict)
    microbatch_gradients: list[Named] = field(default_factory=list)
    loss_has_weight: bool = True
    modified_between_backwards: list[tuple[int, int, float, float, bool]] = field(default_factory=list)
    rng_mismatch: bool = False
    low_precision: dict[str, str] = field(default_factory=dict)


@dataclass
class Trace:
    """All that one side did.

    modules: name -> class. tied: groups of names that are one parameter. evaluated: indices of the test set that
    counted. rank_divergence: before the first step and in the evaluation. unkeyed: random operators that could not be
    keyed, so that ranks draw different numbers. random_modules: modules that draw, without those that contain them.
    recomputed_modules: modules that run again in the backward. evaluation_draws: random draws in the evaluation.
    metric_sums: sum and weight of each metric. single_sample_metrics: metric -> sample -> its mean and weight alone, of
    samples at the ends of batches. padding_ranks: first sample of an evaluated batch -> how many ranks had no sample of
    it.
    """

    modules: dict[str, str]
    tied: list[tuple[str, ...]]
    initial_parameters: Named
    initial_buffers: Named
    steps: list[StepTrace] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=list)
    unkeyed: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()
    rank_divergence: Divergence = field(default_factory=dict)
    random_modules: set[str] = field(default_factory=set)
    recomputed_modules: tuple[str, ...] = ()
    evaluation_draws: int = 0
    metric_sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    single_sample_metrics: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    padding_ranks: dict[int, int] = field(default_factory=dict)


def batch_ranges(samples: int, batch_size: int, spec: CheckSpec) -> list[BatchRange]:
    """The global batches of a check: whole ones, and a ragged one at the end."""
    ragged = min(spec.ragged, max(batch_size - 1, 1))
    ranges: list[BatchRange] = []
    epoch = start = 0
    while len(ranges) < spec.steps:
        wanted = ragged if len(ranges) == spec.steps - 1 and spec.steps > 1 else batch_size
        stop = min(start + wanted, samples)
        ranges.append(BatchRange(epoch, start, stop))
        epoch, start = (epoch + 1, 0) if stop == samples else (epoch, stop)
    return ranges


def microbatches(batch: BatchRange, order: Tensor, accumulate: int) -> list[BatchSlice]:
    """The microbatches of a step as one device takes them."""
    total = batch.stop - batch.start
    micro = min(accumulate, total)
    bounds = [part(batch.start, batch.stop, micro, k) for k in range(micro)]
    return [BatchSlice(order[first:last], last - first, total) for first, last in bounds]


def order_of(seed: int, batch: BatchRange, samples: int) -> Tensor:
    """The order of the epoch that a batch belongs to."""
    return epoch_order(seed, batch.epoch, samples)


def test_samples(count: int, batch_size: int) -> int:
    """How much of a test set is evaluated: two batches and one sample, which leaves ranks without any."""
    return min(count, 2 * batch_size + 1)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that nobody writes to: float64 where it is floating."""
    copy = tensor.detach().to(device="cpu", copy=True)
    return copy.to(torch.float64) if copy.is_floating_point() else copy


def by_tensor(state: Mapping[str, Named]) -> Named:
    """An optimizer's state as tensors named `PARAMETER KEY`."""
    return {f"{name} {key}": value for name, tensors in state.items() for key, value in tensors.items()}
