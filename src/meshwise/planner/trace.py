"""Trace a job's real step on fake tensors, as `Work`.

The step runs in a fake process group.

The engine, the parallelism code and PyTorch's own FSDP2 are those of a real run. Their operators and collectives are
recorded. No device memory is allocated and nothing is computed. One rank of each kind is traced. In a pipeline, this is
one rank of each stage, since ranks that differ only on other mesh axes do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwise.parallel.mesh import divide_work, forget_meshes
from meshwise.parallel.pipeline import Pipeline
from meshwise.parallel.schedule import Action
from meshwise.parallel.splits.tensor import one_stage_on
from meshwise.planner.fakes.cuda import by_its_name
from meshwise.planner.fakes.world import fake_world, resizing, start_values_unread
from meshwise.planner.record import Record
from meshwise.planner.work import MAIN, Mark, Work
from meshwise.reports.recorder import make_current
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.user_code import name_line
from meshwise.spec.world import World
from meshwise.torch_compat import fake, fake_device
from meshwise.torch_compat.collective_calls import waiting
from meshwise.torch_compat.dtensor_operators import strategies_remembered
from meshwise.torch_compat.fake import NEEDS_VALUES, FakeTensors
from meshwise.torch_compat.fake_values import fake_batch, fake_without_values
from meshwise.torch_compat.loss_scale import always_steps
from meshwise.torch_compat.sharding import local_of
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.order import epoch_order, epoch_slices
from meshwise.training.data.source import read_slices
from meshwise.training.engine.engine import Engine, Microbatch
from meshwise.training.engine.events import When
from meshwise.training.guards.registry import attach
from meshwise.training.job.job import Job
from meshwise.training.job.run import begun, open_data
from meshwise.training.job.step import train_step
from meshwise.transfer import stages
from meshwise.workers.gate import StepGate

THIRD = 2
"""The place of the third stage among those that are traced."""
STEPS = 2
"""How many steps are traced: the first, which creates the optimizer's state and the buckets, and a usual later step."""


Extent = Literal["whole", "brief", "launches"]
"""What to trace of a step: all of it; without microbatches that repeat (see `Work.left_out`) and without the memory
of stages that need no more than another; or the launches alone."""


@dataclass(frozen=True)
class Trace:
    """What one rank does in its first step (`first`), and what it does in each later step (`step`)."""

    first: Work
    step: Work
    reads_values: bool = False
    launches_alone: bool = False
    more: Work | None = None


def trace(
    job: Job,
    plan: Plan,
    kind: str = "gpu",
    speeds: Sequence[Hashable] = (),
    marked: bool = False,
    more: bool = False,
    third: bool | None = None,  # if only FEW_STAGES stages are traced: whether to trace the third (see shrink.py)
) -> list[Trace]:
    """Trace what the ranks of a plan do in a step of a job."""
    mail: stages.Mail = {}
    found, ranks = [], kinds_of_ranks(plan, speeds)
    try:
        for at, rank in enumerate(ranks):
            if third is False and at == THIRD:
                stages.pass_on(mail, (ranks[at - 1], rank, ranks[at + 1]), one_stage_on)
            else:
                found.append(_trace_rank(job, plan, kind, rank, mail, marked, more and not (third and at == THIRD)))
        return found
    except Exception as error:  # a program may raise anything
        raise refused(f"job '{job.name}'", error) from error


def kinds_of_ranks(plan: Plan, speeds: Sequence[Hashable]) -> list[int]:
    """Return one rank of each kind, in ascending order."""
    within, apart = plan.within_samples, plan.within_samples // plan.pipeline
    found: dict[Any, list[range]] = {}
    for replica in range(plan.replicas):
        places: dict[Any, range] = {}  # the ranks of all stages, by their speeds
        for place in range(apart):
            ranks = range(replica * within + place, (replica + 1) * within, apart)
            places.setdefault(tuple(speeds[rank] for rank in ranks) if speeds else (), ranks)
        found.setdefault((plan.shares[replica : replica + 1], tuple(places)), list(places.values()))
    return sorted(rank for ranks in found.values() for own in ranks for rank in own)


def refused(what: str, error: Exception) -> MeshwiseError:
    """Return the error to raise for a program that cannot be traced on fake tensors, made from the exception that the
    program raised."""
    if isinstance(error, MeshwiseError):
        return error
    told = UsageError(_why_not(what, error)).with_traceback(error.__traceback__)
    name_line(told)
    return told


def _why_not(what: str, error: Exception) -> str:
    first = by_its_name(str(error)).partition("\n")[0].partition(". This could be because")[0]
    if "_pack_padded_sequence" in first:
        return (
            f"{what} calls pack_padded_sequence. A rehearsal does not know the lengths of the sequences, so it cannot "
            "trace this. Pass the padded batch to the recurrent layer: this takes the same time and memory, or more."
        )
    if isinstance(error, NEEDS_VALUES):
        return (
            f"{what} is rehearsed on tensors without values, and this line needs a value ({first}). Only constants, "
            "integers of a batch, and tensors of at most 65,536 elements computed from both have values. Weights and "
            "activations have no values: decide by shapes or settings, or compute the value outside of the model with "
            "numpy or math."
        )
    if isinstance(error, KeyError) and (name := error.args[0]) in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        return (
            f"{what} reads os.environ['{name}'], which a rehearsal and `python {what}` do not set. Write "
            f"os.environ.get('{name}', {int(name == 'WORLD_SIZE')})."
        )
    if "on the same device" in first or "two different devices" in first:  # the message depends on the version of torch
        return (
            f"{what}: this line computes with tensors on two devices. mw.distribute moves models to the GPU, and its "
            "loaders move batches to the GPU. Move other tensors too: tensor.to(next(model.parameters()).device)."
        )
    return f"{what} cannot be rehearsed on tensors without values: {type(error).__name__}: {first}"


def _trace_rank(job: Job, plan: Plan, kind: str, rank: int, mail: stages.Mail, marked: bool, more: bool) -> Trace:
    with rehearsal(kind, rank, plan.devices, mail) as (record, mode):
        world = World(rank=rank, size=plan.devices, device=record.device)
        notes: list[str] = []
        engine = attach(Engine(divide_work(plan, world), StepGate(), notes.append))
        engine.carried.rehearses = True
        try:
            batches = _batches(job, plan.accumulate, engine.world)
            if more:
                longer = replace(job, batch_size=job.batch_size // plan.accumulate * (plan.accumulate + 1))
                batches += _batches(longer, plan.accumulate + 1, engine.world)[:1]
            with mode:
                works = list(_steps(job, plan, engine, record, batches, marked))
            divided = any(isinstance(p, DTensor) for model in engine.program.models for p in model.parameters())
        finally:
            engine.close()
    first, *later = (Work(rank, plan.devices, kind, held, events, tuple(notes), divided) for held, events in works)
    return Trace(first, later[0], record.reads_values, more=later[1] if more else None)


@contextmanager
def rehearsal(kind: str, rank: int, ranks: int, mail: stages.Mail) -> Iterator[tuple[Record, FakeTensors]]:
    """Within the context, make this process a rank of a simulated run."""
    with ExitStack() as stack:
        device = stack.enter_context(fake_device.fake_device(MAIN)) if kind != "cpu" else "cpu"
        stack.enter_context(fake_world(rank, ranks))
        stack.enter_context(stages.kept(mail))
        stack.callback(forget_meshes)
        record = Record(device)
        stack.enter_context(resizing(record.resized))
        stack.enter_context(waiting(record.waits))
        stack.enter_context(always_steps())
        stack.enter_context(start_values_unread())
        stack.enter_context(fake_without_values())
        stack.enter_context(fake.plain_for_optimizers())
        stack.enter_context(strategies_remembered())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # fixes the order of operators
        stack.callback(make_current, make_current(record.places))
        state = torch.get_rng_state()
        stack.callback(torch.set_rng_state, state)
        mode = FakeTensors(record.on_operator, stands_for_real=True)
        yield record, mode


def _batches(job: Job, count: int, world: World) -> list[list[Microbatch]]:
    """Return the `count` microbatches of each of the first steps, with real tensors from the data set."""
    data = open_data(job, job.data(), "training set")
    order = epoch_order(job.seed, 0, data.samples)
    steps = list(itertools.islice(epoch_slices(order, job.batch_size, world, count), STEPS))
    return [list(read_slices(data.read, step, 0)) for step in (steps * STEPS)[:STEPS]]  # a lone step is used twice


def _steps(
    job: Job, plan: Plan, engine: Engine, record: Record, batches: Sequence[list[Microbatch]], marked: bool
) -> Iterator[tuple[Any, Any]]:
    state = begun(job, plan, engine)
    record.tell(map(local_of, state.model.parameters()), "parameters")
    record.tell(map(local_of, state.model.buffers()), "buffers")

    def step_begins(_: Any) -> None:
        record.backward_ends()
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        record.tell(map(local_of, gradients), "gradients")  # even if they lie in an all-reduce's buffer

    at_steps = SimpleNamespace(step_begins=step_begins)
    engine.events.listen(at_steps, When.WATCH)
    record.cut()
    numbers: dict[int, int] = {}

    def mark(piece: str, number: int = -1) -> None:
        if marked:
            mine: Any = Mark(piece, number)  # `Any`, since `Event` excludes marks
            record.events.append(mine)

    if engine.program.pipeline is not None:
        _mark_actions(engine.program.pipeline, mark)
    record.places.follow(state.model, lambda: numbers.get(id(engine.part), -1))
    parts: list[Microbatch] = []
    ahead: Any = None  # on a GPU, the next microbatch is copied while the current one is used
    for number, given in enumerate(batches):
        held, _ = record.cut()  # includes the previous batch, which is freed when this one is read
        first = [ahead] if ahead is not None else []
        moved = list(first)
        for batch, _ in given[len(first) :]:
            mark("input", len(moved))
            moved.append(fake_batch(batch, engine.world.device))
        mark("rest")
        if record.device != "cpu":
            ahead = fake_batch(batches[number - 1][0][0], engine.world.device)
        parts = [(batch, part) for batch, (_, part) in zip(moved, given, strict=True)]
        record.tell(tensors_in([moved, ahead]), "input")
        numbers.update((id(part), number) for number, (_, part) in enumerate(parts))
        del first, moved
        with fake_without_values():
            train_step(engine, job, state, parts)
        record.tell(state_of(state.optimizer), "optimizer")
        yield tuple(record.with_categories(held)), record.cut()[1]
    engine.events.leave(at_steps)


def _mark_actions(pipeline: Pipeline, mark: Callable[..., None]) -> None:
    """Mark where each action of a step begins, and where the last one ends."""

    class Marking(tuple[Action, ...]):
        def __iter__(self) -> Iterator[Action]:
            for action in super().__iter__():
                mark("forward" if action.forward else "backward", action.microbatch)
                yield action
            mark("rest")

    begin = pipeline.begin
    pipeline.begin = lambda keys: Marking(begin(keys))  # type: ignore[method-assign]


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state. For a DTensor, this is the rank's local shard."""
    return [local_of(t) for t in tensors_in(list(optimizer.state.values()))]
