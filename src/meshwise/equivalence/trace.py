"""Define what a check compares, and the trace of one side.

The sides are one device and the plan. A trace is plain data and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshwise.data.keyed import Draw
from meshwise.data.order import BatchSlice, epoch_order
from meshwise.equivalence.exchanges import Exchanges
from meshwise.equivalence.loss_numbers import Numbers
from meshwise.equivalence.pairs import Pairs
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan, at_precision

Named = dict[str, Tensor]
Divergence = dict[tuple[str, str], float]
"""Maps (kind of a value, name of the value) to how much ranks differ in it, relative to its size."""
Noise = Mapping[str, tuple[Tensor, Tensor]]
"""Maps a parameter to (mask, values): the mask marks elements with only rounding noise as gradient (noise.py)."""
Draws = Mapping[int, Sequence[Draw]]
"""Maps the number of a forward pass, from 0, to the random draws in it."""


@dataclass(frozen=True)
class CheckSpec:
    """The settings of a check.

    plan: the plan to compare with one device. If a script chooses its own plan, this is a data-parallel plan with one
        replica for each device.
    steps: how many optimizer steps both sides make.
    in_float64: whether both sides compute everything in float64. Otherwise they use the plan's own precision, to see
        its rounding.
    perturb: whether to delay the plan's ranks at random, and to keep exchanged values NaN until awaited
        (compat/perturbed.py).
    noise: parameter elements that one device takes over from the plan.
    """

    plan: Plan
    steps: int = 3
    in_float64: bool = True
    perturb: bool = False
    noise: Sequence[Noise] = ()

    def applied(self, plan: Plan) -> Plan:
        """Return `plan` in the precision of this check."""
        return at_precision(plan, "fp64") if self.in_float64 else plan

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes in which one device and the plan both store values and compute."""
        return self.applied(self.plan).dtypes

    @property
    def ragged(self) -> int:
        """The number of samples in a ragged batch, which the ranks cannot divide evenly."""
        return 2 * self.plan.devices * self.plan.accumulate + 1


@dataclass(frozen=True)
class Output:
    """A module's output in one call on one rank, as random projections (see sketches.py).

    number: the number of this output among all outputs of the module in this microbatch, from 0.
    rows: how many samples the rank has.
    sketches: the projections by layout. `0` and `1` have a row for each sample, if that dimension can hold the batch.
        `each` has a row for each position of each sample, `whole` is one row.
    gradient: projections of the gradient that reached the output in the first backward pass. Empty in later backward
        passes.
    """

    microbatch: int
    module: str
    kind: str
    number: int
    shape: tuple[int, ...]
    rows: int
    sketches: dict[str, Tensor]
    gradient: dict[str, Tensor] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, int]:
        return self.microbatch, self.module, self.number


@dataclass(frozen=True)
class Contents:
    """A rank's part of a microbatch, as the program got it.

    place: the user's source line that reads the batch.
    source: the data set.
    draws: the name of the data set's random generator.
    collate: the user's function that makes a batch of samples.
    fields: the tensors with one row for each sample, by their name in the batch. For each of them, the shape of a row
        and random projections of the rows are kept.
    """

    microbatch: int
    place: str
    source: str
    draws: str
    collate: str
    fields: dict[str, tuple[tuple[int, ...], Tensor]]


@dataclass
class StepTrace:
    """The trace of one optimizer step on one side of a check.

    samples: microbatch -> rank -> the indices of the samples that counted.
    outputs, contents: the module outputs and the batches of all ranks that have samples, in rank order.
    peers: for each set of ranks with the same samples, the outputs of each rank. Empty if no ranks share samples.
    alike: the global ranks of rank 0 and of the ranks with the same samples as rank 0.
    ready_order: parameters in the order in which their gradients became ready in the last backward pass.
    clipped_gradients: the gradients that the optimizer got, if they are clipped.
    learning_rates: the learning rate of each parameter group in this step.
    optimizer_state: `PARAMETER KEY` -> tensor, after the step.
    scheduler: the numbers in the scheduler's state after the step.
    own_gradients: rank and microbatch -> the gradients of that rank's loss alone under the plan, before any exchange
        (see `sketches.pieces`).
    own_boxes: rank and parameter -> the range of nonzero elements of the gradient in each dimension.
    modified_between_backwards: (rank, microbatch, norm before, norm after, whether all changed by one factor) for
        gradients that were changed between two backward passes.
    standing: microbatch -> the norm of the gradients that the next backward pass adds to.
    rng_mismatch: whether a backward pass drew random numbers that its forward pass did not draw.
    low_precision: the parameters that a lower precision represents exactly on some rank, each with this precision.
    pairs: operators on rank 0 that may combine samples (see pairs.py).
    numbers: the scalars that the loss of the first microbatch is computed from (see loss_numbers.py), for each rank
        with samples.
    evaluating: modules in evaluation mode in a forward pass of the step.
    nan_while_open: sentences on values that became NaN while a collective was in flight, if collectives are perturbed.
    changed_behind: parameters and buffers that changed between the optimizer's step and the next batch.
    loaded: whether a model loaded a state dict between the optimizer's step and the next batch.
    """

    samples: list[list[list[int]]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    peers: list[list[list[Output]]] = field(default_factory=list)
    alike: tuple[int, ...] = ()
    contents: list[Contents] = field(default_factory=list)
    loss: float = 0.0
    gradients: Named = field(default_factory=dict)
    ready_order: list[str] = field(default_factory=list)
    clipped_gradients: Named = field(default_factory=dict)
    learning_rates: dict[str, float] = field(default_factory=dict)
    optimizer_state: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    scheduler: dict[str, float] = field(default_factory=dict)
    rank_divergence: Divergence = field(default_factory=dict)
    own_gradients: dict[tuple[int, int], Named] = field(default_factory=dict)
    own_boxes: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)
    modified_between_backwards: list[tuple[int, int, float, float, bool]] = field(default_factory=list)
    standing: dict[int, float] = field(default_factory=dict)
    rng_mismatch: bool = False
    low_precision: dict[str, str] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=dict)
    numbers: list[Numbers] = field(default_factory=list)
    evaluating: set[str] = field(default_factory=set)
    nan_while_open: list[str] = field(default_factory=list)
    changed_behind: set[str] = field(default_factory=set)
    loaded: bool = False


@dataclass
class Trace:
    """The trace of one side of a check.

    modules: name -> class.
    places: name of a module -> the source line of its forward, if the user wrote it.
    tied: groups of names that share one parameter.
    draws: the random draws of all forward passes.
    evaluated: the indices of the test samples that counted in the evaluation.
    rank_divergence: how ranks differ before the first step and in the evaluation.
    unkeyed: random operators that could not be keyed, so that ranks draw different numbers.
    drawn_alike: random draws that are different on each rank in this check, but equal on all ranks in an ordinary run.
    numpy_draws: whether a forward pass drew from NumPy's global generator.
    random_modules: modules that draw random numbers themselves.
    recomputed_modules: modules that run again in the backward pass.
    evaluation_draws: the number of random draws in the evaluation.
    metric_sums: metric -> its sum over samples, and the sum of the weights.
    single_sample_metrics: metric -> sample -> mean and weight of that sample alone, for samples at the ends of batches.
    padding_ranks: the first sample of an evaluated batch -> how many ranks had no sample of that batch.
    races: faulty exchanges between ranks or streams, if they were perturbed.
    shown: (source line, text) for each text that the script printed or logged.
    exchanges, exchanges_backward: collectives that the program itself calls on rank 0 (see exchanges.py).
    counted_again: sentences on loops that every rank reads as a whole, so that mw.sum counts them once per rank.
    resumed: the state after each resume of a job.
    hints: sentences on mistakes that also affect the run on one device (see hints.py).
    """

    modules: dict[str, str]
    tied: list[tuple[str, ...]]
    initial_parameters: Named
    initial_buffers: Named
    steps: list[StepTrace] = field(default_factory=list)
    draws: dict[int, Sequence[Draw]] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=list)
    unkeyed: set[str] = field(default_factory=set)
    drawn_alike: set[str] = field(default_factory=set)
    numpy_draws: bool = False
    notes: tuple[str, ...] = ()
    counted_again: list[str] = field(default_factory=list)
    shown: list[tuple[str, str]] = field(default_factory=list)
    rank_divergence: Divergence = field(default_factory=dict)
    random_modules: set[str] = field(default_factory=set)
    recomputed_modules: tuple[str, ...] = ()
    evaluation_draws: int = 0
    metric_sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    single_sample_metrics: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    padding_ranks: dict[int, int] = field(default_factory=dict)
    exchanges: Exchanges = field(default_factory=dict)
    exchanges_backward: Exchanges = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    resumed: list[StepTrace] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The samples that each step of a check reads. The last step reads a ragged batch from the start of a new epoch.
    All other steps read full batches."""

    seed: int
    samples: int
    batch_size: int
    spec: CheckSpec

    def of_step(self, step: int, epoch: int, index: int) -> tuple[int, int, Tensor]:
        """Return (epoch, position, indices) for step `step`, counted from 0: the sample indices that the step reads,
        and the epoch and the position in this epoch after the step.

        epoch, index: the epoch and the position before the step.
        """
        last = 0 < step == self.spec.steps - 1
        if index >= self.samples or (last and index):
            epoch, index = epoch + 1, 0
        size = min(self.spec.ragged, max(self.batch_size - 1, 1)) if last else self.batch_size
        batch = epoch_order(self.seed, epoch, self.samples)[index : index + size]
        return epoch, index + len(batch), batch

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and the sample indices of each step."""
        epoch = index = 0
        for step in range(self.spec.steps):
            epoch, index, batch = self.of_step(step, epoch, index)
            yield epoch, batch


def microbatches(batch: Tensor, accumulate: int) -> list[BatchSlice]:
    """Return the microbatches into which one device splits a batch."""
    parts = batch.tensor_split(min(accumulate, len(batch)))
    return [BatchSlice(part, len(part), len(batch)) for part in parts]


def test_samples(count: int, batch_size: int) -> int:
    """Return how many test samples are evaluated: at most two batches and one more sample, so that some ranks get no
    sample of the last batch."""
    return min(count, 2 * batch_size + 1)
