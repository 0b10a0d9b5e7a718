"""One optimizer step of a job. Tested in tests/training/test_plans_in_a_loop.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwise.compat.loss_scale import found_infinite
from meshwise.compat.sharding import local_of
from meshwise.parallel.step_hooks import needs_closure
from meshwise.recovery.state import RunState
from meshwise.timeline.recorder import current
from meshwise.training.agreed import STEPS_OF_A_JOB
from meshwise.training.engine import Engine, Part
from meshwise.training.job import Job
from meshwise.training.left_out import LeftOut
from meshwise.training.microbatches import LossOfJob, compute
from meshwise.training.model_stream import seed_draws
from meshwise.training.not_finite import SkippedSteps
from meshwise.training.weighing import Losses, total_of
from meshwise.transfer.collectives import all_reduce


def train_step(
    engine: Engine,
    job: Job,
    state: RunState,
    parts: Sequence[Part],
    skipped: SkippedSteps | LeftOut | None = None,
    known: Callable[[Losses], None] | None = None,
) -> Losses:
    """One optimizer step on this rank's microbatches. Returns their losses and weights, still on the device.

    skipped: skips the update where a gradient is not finite, and counts the step or not. known: is given the losses
    before the update.

    An optimizer that needs a closure (LBFGS) runs the loss as often as it likes, each time with the same draws; the
    losses are then those before the step.
    """
    current().samples += parts[0][1].total
    if job.collate is not None and engine.program.backwards < STEPS_OF_A_JOB:
        engine.carried.compare_batches(parts, f"job '{job.name}'")
    if needs_closure(state.optimizer):
        return _step_with_closure(engine, job, state, parts)
    if skipped is not None:
        skipped.step_begins()
    losses = _compute(engine, job, state, parts)
    if known is not None:
        known(losses)
    with current().span("optimizer"):
        if skipped is None or not skipped.skips(state.step + 1, losses):
            _update(engine, job, state)
        elif skipped.is_step:
            _end_step(state)
        else:
            _clear(state)
    return losses


def _update(engine: Engine, job: Job, state: RunState) -> None:
    if job.clip_norm is not None or engine.program.pipeline is not None:
        _clip(engine, job, state)
    state.before_change()
    state.whole = False
    state.scaler.step(state.optimizer)
    state.scaler.update()
    _end_step(state)


def _step_with_closure(engine: Engine, job: Job, state: RunState, parts: Sequence[Part]) -> Losses:
    found: list[Losses] = []

    def closure() -> Tensor:
        state.model.zero_grad()
        found.append(_compute(engine, job, state, parts))
        _clip(engine, job, state)
        total, weight = all_reduce(total_of(found[-1]), of="the loss").unbind()
        return total / weight

    with current().span("optimizer"):
        state.before_change()
        state.whole = False
        state.optimizer.step(closure)  # type: ignore[arg-type]
        _end_step(state)
    return found[0]


def _compute(engine: Engine, job: Job, state: RunState, parts: Sequence[Part]) -> Losses:
    pipeline = engine.program.pipeline
    stage = (
        () if pipeline is None or pipeline.pipe.rank == 0 else (pipeline.pipe.rank,)
    )  # of the first as of one device
    seed_draws(engine.world, state.seed, state.step, *stage)
    loss = LossOfJob(
        lambda batch: job.loss(state.model, batch),
        where=f"the loss of job '{job.name}'",
        key=(state.seed, state.step),
        scale=state.scaler.scale,
        reduction=job.reduction,
    )
    return compute(engine, loss, parts)


def _clip(engine: Engine, job: Job, state: RunState) -> None:
    pipeline = engine.program.pipeline
    if pipeline is not None and state.scaler.is_enabled():  # all stages step, or none does
        state.scaler.scale(torch.zeros((), device=engine.program.device))  # it begins with what it scales first
        state.scaler.unscale_(state.optimizer)
        for found in found_infinite(state.scaler, state.optimizer):
            all_reduce(local_of(found), "max", pipeline.pipe.group, of="the loss scaler's decision")
    if job.clip_norm is not None and pipeline is not None:
        pipeline.holding.clip(job.clip_norm)
    elif job.clip_norm is not None:  # gradient clipping: exact under shard, since DTensors give the norm of the whole
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), job.clip_norm)


def _clear(state: RunState) -> None:
    state.optimizer.zero_grad(set_to_none=True)
    state.model.zero_grad(set_to_none=True)  # of what it does not hold too: the clip norm and the mean are of one step


def _end_step(state: RunState) -> None:
    _clear(state)
    if state.scheduler is not None:
        state.scheduler.step()
    state.step += 1
    state.whole = True
