"""Set up a job on a rank: data, engine, first state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.deferred import constructed
from meshwise.parallel.mesh import divide_work
from meshwise.parallel.step_hooks import held_parameters, needs_closure
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.torch_compat.loss_scale import Scaler
from meshwise.training.data.keyed import ExactDraws
from meshwise.training.data.order import BatchSlice
from meshwise.training.data.source import LoaderSettings, Reader, count_samples, read_slices, reader
from meshwise.training.engine.engine import Engine, Microbatch
from meshwise.training.engine.seeds import seed_all
from meshwise.training.guards.registry import attach
from meshwise.training.job.job import Job
from meshwise.training.recovery.state import RunState
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import RankContext

NARROW_WEIGHTS = "safetensors has no complex128: weights.safetensors stores complex64, saved states store complex128."


def make_engine(
    session: RankContext, plan: Plan, notify: Callable[[str], None] = lambda text: None, *, exact_random: bool = False
) -> Engine:
    """Make the engine that runs a job under `plan`. notify: prints a note on the plan for the user."""
    draws = ExactDraws() if exact_random else None
    return attach(Engine(divide_work(plan, session.world), session.gate, notify, draws=draws))


def begun(job: Job, plan: Plan, engine: Engine) -> RunState:
    """Build the model and the optimizer of a job under `plan`. Return the run's state before its first step.
    Collective.

    Raises UsageError if the optimizer needs a closure and the plan scales the loss (float16).
    """
    seed_all(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided or plan.pipeline > 1 else (job.model(), "")
    if plan.devices == 1:  # on several devices, the plan places the model
        model.to(engine.world.device)
    engine.program.stage_cost = job.stage_cost
    engine.add_models([model], plan)
    if note:
        engine.notify(note)
    optimizer = job.optimizer(model.parameters())
    if plan.dtypes.scaled and needs_closure(optimizer):
        raise UsageError(
            f"job '{job.name}': {type(optimizer).__name__} computes the loss several times in a step, but "
            f"precision={plan.precision!r} scales it only once. Use precision='bf16' or 'fp32', or another optimizer."
        )
    engine.add_optimizer(optimizer)
    if any(tensor.dtype == torch.complex128 for tensor in model.state_dict().values() if isinstance(tensor, Tensor)):
        engine.notify(NARROW_WEIGHTS)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    all_held = not plan.parameters_divided and {*model.parameters()} <= {*held_parameters(optimizer)}
    return RunState(model, optimizer, scheduler, loss_scaler(engine.world.device, plan), job.seed, holds_all=all_held)


def loss_scaler(device: str, plan: Plan) -> torch.amp.GradScaler:
    """Return a loss scaler for the device. If the plan does not compute in float16, the scaler is disabled."""
    return Scaler(device.split(":")[0], enabled=plan.dtypes.scaled)


@dataclass(frozen=True)
class Data:
    """A data set of a job, ready to be read in batches."""

    samples: int
    read: Reader


def open_data(job: Job, data: Any, what: str, engine: Engine | None = None) -> Data:
    """Open a data set of a job for reading.

    what: the name of the data set in error messages.
    engine: if given, it checks that all ranks have the same data.
    """
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed, several=True)
    samples = count_samples(data, f"the {what} of job '{job.name}'")
    if engine is not None:
        engine.events.send("data_given", data, samples)
    return Data(samples, reader(data, settings))


def read_parts(data: Data, slices: Iterable[BatchSlice], epoch: int, device: str) -> Iterator[Microbatch]:
    """Yield the microbatches of `slices`, on the device. The next microbatches are loaded in the meantime."""
    pairs = read_slices(data.read, slices, epoch)
    return pairs if device == "cpu" else prefetch(pairs, device)
