"""Define what a check compares, and the trace of one side.

The sides are one device and the plan. A trace is plain data and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshwise.checker.exchanges import Exchanges
from meshwise.checker.loss_numbers import Numbers
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import at_precision
from meshwise.training.data.keyed import Draw
from meshwise.training.data.order import BatchSlice, epoch_order
from meshwise.training.job.job import Job

Named = dict[str, Tensor]
Divergence = dict[tuple[str, str], float]
"""Maps (kind of a value, name of the value) to how much ranks differ in it, relative to its size."""
Noise = Mapping[str, tuple[Tensor, Tensor]]
"""Parameter -> (mask of the elements whose gradient is rounding noise, the parameter under the plan). See noise.py."""
Draws = Mapping[int, Sequence[Draw]]
"""Maps the number of a forward pass, from 0, to the random draws in it."""


LEFT = "not looked at: a batch of {count} samples, to which the check cuts the last one. The program fails on it: {why}"


@dataclass(frozen=True)
class CheckSpec:
    """The settings of a check, which runs a program on one device and under a plan."""

    plan: Plan
    steps: int = 3
    in_float64: bool = True
    perturb: bool = False
    noise: Sequence[Noise] = ()
    cut: bool = True

    def applied(self, plan: Plan) -> Plan:
        """Return `plan` in the precision of this check."""
        return at_precision(plan, "fp64") if self.in_float64 else plan

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes that the check uses for storage and computation, on one device as well as under the plan."""
        return self.applied(self.plan).dtypes

    def steps_of(self, job: Job) -> int:
        """Return the number of steps of a job: two of a second epoch, if it has one, and the others of the first."""
        return self.steps + (min(self.steps, job.epochs) > 1)

    @property
    def ragged(self) -> int:
        """The number of samples in a ragged batch, which the ranks cannot divide evenly. 0 if no batch is cut to it."""
        return self.cut * (2 * self.plan.devices * self.plan.accumulate + 1)


OUTSIDE = "outside of the model"


@dataclass(frozen=True)
class Output:
    """A module's output in one call on one rank, as random projections (see sketches.py)."""

    microbatch: int
    module: str
    kind: str
    number: int
    shape: tuple[int, ...]
    rows: int
    sketches: dict[str, Tensor]
    inputs: tuple[Output, ...] = ()
    """What the call was given, each with the module (or OUTSIDE) whose forward was running where it was first seen."""

    @property
    def key(self) -> tuple[int, str, int]:
        return self.microbatch, self.module, self.number


@dataclass(frozen=True)
class Reading:
    """Where batches come from: the data set, its random generator and its collate function; or mw.split."""

    source: str = ""
    draws: str = ""
    collate: str = ""
    split: bool = False


@dataclass(frozen=True)
class Contents:
    """A rank's part of a microbatch, as the program got it."""

    microbatch: int
    place: str
    reading: Reading
    fields: dict[str, tuple[tuple[int, ...], Tensor]]


@dataclass
class StepTrace:
    """What was recorded in one optimizer step, either on one device or under the plan."""

    samples: list[list[list[int]]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
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
    modified_between_backwards: list[tuple[int, int, float, float, bool]] = field(default_factory=list)
    standing: dict[int, float] = field(default_factory=dict)
    rng_mismatch: bool = False
    drawn_alike: set[tuple[str, int]] = field(default_factory=set)
    low_precision: dict[str, str] = field(default_factory=dict)
    numbers: list[Numbers] = field(default_factory=list)
    evaluating: set[str] = field(default_factory=set)
    nan_while_open: list[str] = field(default_factory=list)
    changed_behind: set[str] = field(default_factory=set)
    loaded: bool = False


@dataclass
class Trace:
    """What was recorded in one run of a check, either on one device or under the plan."""

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
    resumed: list[tuple[int, StepTrace]] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The samples that each step of a job reads in a check. In a check of several steps, step number `spec.steps`
    starts a new epoch with a small batch that the ranks cannot divide evenly. All other batches have the job's size,
    unless they are cut short by the end of an epoch."""

    seed: int
    samples: int
    batch_size: int
    spec: CheckSpec

    def of_step(self, step: int, epoch: int, index: int) -> tuple[int, int, Tensor]:
        """Return (epoch, position after the step, sample indices) of a step that begins at `epoch` and `index`."""
        begins = 0 < step == self.spec.steps - 1
        if index >= self.samples or (begins and index):
            epoch, index = epoch + 1, 0
        size = min(self.spec.ragged, max(self.batch_size - 1, 1)) if begins and self.spec.cut else self.batch_size
        batch = epoch_order(self.seed, epoch, self.samples)[index : index + size]
        return epoch, index + len(batch), batch

    def of(self, steps: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and the sample indices of each step."""
        epoch = index = 0
        for step in range(steps):
            epoch, index, batch = self.of_step(step, epoch, index)
            yield epoch, batch


def microbatches(batch: Tensor, accumulate: int) -> list[BatchSlice]:
    """Return the microbatches into which one device splits a batch."""
    parts = batch.tensor_split(min(accumulate, len(batch)))
    return [BatchSlice(part, len(part), len(batch)) for part in parts]


def test_samples(count: int, batch_size: int, spec: CheckSpec) -> int:
    """Return how many test samples are evaluated: at most two batches and one more sample, so that some ranks get no
    sample of the last batch."""
    return min(count, 2 * batch_size + spec.cut)


@dataclass
class ProgramTrace:
    """The recorded run of a program in a check."""

    plan: Plan | None = None
    trace: Trace | None = None
    backwards: int = 0


def trace_to_compare(found: ProgramTrace, script: str) -> Trace:
    """Return the trace in `found`. Raise UsageError if there is nothing to compare."""
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
        raise UsageError("\n".join([text, *found.trace.hints]))
    if not found.trace.steps:
        raise UsageError(
            f"{script}: no optimizer of the model made a step after {found.backwards} backwards. Give the "
            "optimizer the parameters of the distributed model, and call optimizer.step()."
        )
    return found.trace
