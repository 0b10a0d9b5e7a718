"""Define what a check compares, and the trace of one side.

The sides are one device and the plan. A trace is plain data and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshwise.data.keyed import Draw
from meshwise.data.order import BatchSlice, epoch_order
from meshwise.equivalence.coupled_operators import Coupled
from meshwise.equivalence.exchanges import Exchanges
from meshwise.equivalence.loss_numbers import Numbers
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import at_precision

Named = dict[str, Tensor]
Divergence = dict[tuple[str, str], float]
"""Maps (kind of a value, name of the value) to how much ranks differ in it, relative to its size."""
Noise = Mapping[str, tuple[Tensor, Tensor]]
"""Parameter -> (mask of the elements whose gradient is rounding noise, the parameter under the plan). See noise.py."""
Draws = Mapping[int, Sequence[Draw]]
"""Maps the number of a forward pass, from 0, to the random draws in it."""


@dataclass(frozen=True)
class CheckSpec:
    """The settings of a check, which runs a program on one device and under a plan.

    plan: the plan to compare with one device. If a script chooses its own plan, this is a data-parallel plan with one
        replica for each device.
    steps: how many optimizer steps each run makes.
    in_float64: whether the runs compute everything in float64. Otherwise they use the plan's own precision, to see its
        rounding.
    perturb: whether to look for races. The ranks are then delayed at random. A buffer that a collective writes holds
        NaN until the program has waited for the collective (compat/perturbed.py).
    noise: for each step, the parameter elements whose gradient is only rounding noise. After the step, the run on one
        device overwrites them with the plan's values. Empty in a first run.
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
        """The dtypes that the check uses for storage and computation, on one device as well as under the plan."""
        return self.applied(self.plan).dtypes

    @property
    def ragged(self) -> int:
        """The number of samples in a ragged batch, which the ranks cannot divide evenly."""
        return 2 * self.plan.devices * self.plan.accumulate + 1


@dataclass(frozen=True)
class Output:
    """A module's output in one call on one rank, as random projections (see sketches.py).

    microbatch: the number of the microbatch in the step, from 0.
    module: the name of the module.
    kind: the class of the module.
    number: the number of this output among all outputs of the module in this microbatch, from 0.
    shape: the shape of the output.
    rows: how many samples the rank has.
    sketches: the random projections, by the names that `sketches` lists, such as `0` or `whole`.
    gradient: the random projections of the gradient with respect to the output. Recorded in the first backward pass of
        a run, and empty in later backward passes.
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

    microbatch: the number of the microbatch in the step, from 0.
    place: the user's source line that reads the batch.
    source: the class of the data set, with the source line that reads a sample.
    draws: the name of the data set's random generator. Empty if it has none.
    collate: the name of the user's function that makes a batch of samples. Empty for the default function.
    fields: name of a tensor in the batch -> (shape of a row, random projection of each row). Only tensors with one row
        for each sample are included.
    """

    microbatch: int
    place: str
    source: str
    draws: str
    collate: str
    fields: dict[str, tuple[tuple[int, ...], Tensor]]


@dataclass
class StepTrace:
    """What was recorded in one optimizer step, either on one device or under the plan.

    samples: for each microbatch and each rank, the indices of the samples that the rank read, without padding.
    outputs: the module outputs of all ranks that have samples, in rank order.
    peers: the module outputs of every rank, where ranks with the same samples form a group. Empty if no ranks share
        samples.
    alike: the ranks that have the same samples as rank 0, including rank 0.
    contents: the batches of all ranks that have samples, in rank order.
    ready_order: the parameters, in the order in which the last backward pass completed their gradients.
    clipped_gradients: the gradients that the optimizer got. Empty if a job does not clip gradients.
    learning_rates: the learning rate of each parameter group in this step.
    optimizer_state: `PARAMETER KEY` -> tensor, after the step.
    scheduler: the numbers in the scheduler's state after the step.
    own_gradients: (rank, microbatch) -> the gradients of this rank's own loss by parameter, before any collective.
        Recorded only under the plan, as short vectors (see `sketches.pieces`).
    own_boxes: (rank, parameter) -> the range of indices in each dimension where the rank's own gradient is not zero.
        Shows which parameters a program divides by hand. Recorded only for programs that call collectives themselves.
    modified_between_backwards: (rank, microbatch, norm before, norm after, whether all gradients changed by the same
        factor). An entry says that the program changed gradients after the backward pass of this microbatch.
    standing: microbatch -> the norm of all gradients, just before the backward pass of the next microbatch.
    rng_mismatch: whether a backward pass drew random numbers that its forward pass did not draw.
    low_precision: parameter -> `float16` or `bfloat16`, if all values of the parameter on some rank fit into this dtype
        without rounding.
    coupled: operators on rank 0 that may combine samples (see coupled_operators.py).
    numbers: for each rank with samples, the sums and means from which the program computes the loss of the first
        microbatch (see loss_numbers.py).
    evaluating: the modules that were in evaluation mode in a forward pass of the step.
    nan_while_open: sentences on operators that returned NaN while a collective had not ended. Empty if the check does
        not look for races.
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
    coupled: Coupled = field(default_factory=dict)
    numbers: list[Numbers] = field(default_factory=list)
    evaluating: set[str] = field(default_factory=set)
    nan_while_open: list[str] = field(default_factory=list)
    changed_behind: set[str] = field(default_factory=set)
    loaded: bool = False


@dataclass
class Trace:
    """What was recorded in one run of a check, either on one device or under the plan.

    modules: the name of each module -> its class.
    tied: groups of names that share one parameter.
    draws: the random draws of each forward pass.
    evaluated: the indices of the test samples that were evaluated, without padding.
    unkeyed: random operators that draw other numbers on each rank, because data/keyed.py cannot compute the numbers.
    shown: (source line, text) for each text that the script printed or logged.
    rank_divergence: how much ranks differ in values before the first step and in the evaluation.
    random_modules: modules that draw random numbers themselves.
    exchanges: the collectives that the program itself calls in forward passes on rank 0 (see exchanges.py).
    exchanges_backward: the collectives that the program itself calls in backward passes on rank 0.
    races: sentences on values that were used too early, before a collective or a stream was done with them. Empty if
        the check does not look for races.
    resumed: the state after each resume of a job.
    hints: warnings about likely mistakes that also affect the run on one device (see hints.py).
    places: the name of a module -> the source line of its forward, if the user wrote it.
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
    notes: tuple[str, ...] = ()
    shown: list[tuple[str, str]] = field(default_factory=list)
    rank_divergence: Divergence = field(default_factory=dict)
    random_modules: set[str] = field(default_factory=set)
    exchanges: Exchanges = field(default_factory=dict)
    exchanges_backward: Exchanges = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    resumed: list[StepTrace] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The samples that each step of a job reads in a check. Iterate to get (epoch, sample indices) for each step. In a
    check of several steps, the last step starts a new epoch with a small batch that the ranks cannot divide evenly. All
    other batches have the job's size, unless they are cut short by the end of an epoch."""

    seed: int
    samples: int
    batch_size: int
    spec: CheckSpec

    def of_step(self, step: int, epoch: int, index: int) -> tuple[int, int, Tensor]:
        """Return (epoch, position, indices) for a step. `indices` are the samples that the step reads. `epoch` and
        `position` say where in the data the next step goes on.

        step: the number of the step, from 0.
        epoch, index: the epoch and the position in this epoch before the step.
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


@dataclass
class ProgramTrace:
    """The recorded run of a program in a check.

    plan: the plan of the program's models. None if no model was given to `mw.distribute`.
    trace: all that was recorded in the steps of the run. None if the program read no batches.
    backwards: how many backward passes ran.
    """

    plan: Plan | None = None
    trace: Trace | None = None
    backwards: int = 0


def trace_to_compare(found: ProgramTrace, script: str) -> Trace:
    """Return the trace in `found`. Raise UsageError if the script made no steps, so that a check has nothing to
    compare. The message says what to write in the script."""
    if found.plan is None:
        raise UsageError(
            f"{script}: mw.distribute was given no model, so there is nothing to check. Write "
            "model, optimizer, loader = mw.distribute(model, optimizer, loader) before the loop."
        )
    if found.trace is None:
        raise UsageError(
            f"{script}: no loop ran over a distributed loader. Give the DataLoader to mw.distribute too, and loop over "
            "what it returns. Without a loader, call x = mw.split(x) in each step, or mw.split(x, whole=True) for what "
            "has no rows."
        )
    if found.backwards == 0:
        text = (
            f"{script}: not judged. loss.backward() was never called (with view='rank': mw.backward(loss)). After "
            "torch.autograd.grad, let an optimizer make the step."
        )
        raise UsageError("\n".join([text, *found.trace.hints]))  # what the source shows is known all the same
    if not found.trace.steps:
        raise UsageError(
            f"{script}: no optimizer of the model made a step after {found.backwards} backwards. Give the "
            "optimizer the parameters of the distributed model, and call optimizer.step()."
        )
    return found.trace
