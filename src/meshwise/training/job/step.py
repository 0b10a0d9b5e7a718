"""Compute a job's step: forwards and backwards of microbatches, then the optimizer.

Microbatches run one after another, or in the order of a pipeline's stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.passing import Pass
from meshwise.parallel.pipeline import Pipeline
from meshwise.parallel.schedule import Action
from meshwise.parallel.step_hooks import needs_closure
from meshwise.reports.recorder import current
from meshwise.reports.spans import stage_name
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.loss_scale import found_infinite
from meshwise.torch_compat.sharding import local_of
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.keyed import KeyedDraws
from meshwise.training.engine.engine import IN_LOSS, Engine, Microbatch
from meshwise.training.engine.seeds import seed_draws
from meshwise.training.engine.weighing import Losses, StepWeights, split_weight, stacked, total_of
from meshwise.training.job.job import Job
from meshwise.training.job.not_finite import NotFinite
from meshwise.training.recovery.state import RunState
from meshwise.transfer import collectives

NOTHING = contextlib.nullcontext()


def compute(engine: Engine, job: Job, state: RunState, parts: Sequence[Microbatch]) -> Losses:
    """Compute the gradient of the mean loss over the global batch, and leave it in `.grad`. Return this rank's losses.

    parts: this rank's microbatches of the global batch.

    Returns the loss and the loss weight of each microbatch, still on the device.
    """
    pipeline = engine.program.pipeline
    # Stage 0 draws the same random numbers as one device.
    stage = () if pipeline is None or pipeline.pipe.rank == 0 else (pipeline.pipe.rank,)
    seed_draws(engine.world, state.seed, state.step, *stage)
    engine.program.begin_backward()
    engine.draw_key = state.seed, state.step
    microbatches = Microbatches(engine, job, state, parts)
    losses = microbatches.in_turn() if pipeline is None else microbatches.as_stages(pipeline)
    if engine.program.backwards >= engine.events.due:
        engine.events.tell()
    if engine.watcher is not None:
        total, weighed = collectives.all_reduce(total_of(losses)).unbind()
        engine.watcher.loss_known(total / weighed, float(state.scaler.scale(torch.ones_like(total))))
    return losses


class Microbatches:
    """The microbatches of one step. `in_turn` runs one microbatch after another, and `as_stages` runs them in a
    pipeline. The gradients of the step are then in `.grad`."""

    def __init__(self, engine: Engine, job: Job, state: RunState, parts: Sequence[Microbatch]) -> None:
        self._engine, self._job, self._state, self._parts, self._recorder = engine, job, state, parts, current()
        self._weights = StepWeights(engine.world.size, engine.program.coupled_gradients)
        self._weighed = False  # whether the loss function returns a weight

    def in_turn(self) -> Losses:
        """Run forward and backward of one microbatch after another. Return the losses and loss weights."""
        for number in range(len(self._parts)):
            draws = self._begin(number)
            with self._recorder.span("forward"):
                if draws is None and not self._engine.narrow:
                    loss = self._scaled(number, self._found(number))
                else:
                    with self._engine.computing(), draws.forward() if draws else NOTHING:
                        loss = self._scaled(number, self._found(number))
            self._backward(draws, loss, last=number == len(self._parts) - 1)
        return self._weights.losses

    def as_stages(self, pipeline: Pipeline) -> Losses:
        """Run forwards and backwards of all microbatches in the order of this rank's pipeline schedule."""
        actions = pipeline.begin([shapes_of(batch) for batch, _ in self._parts])
        last = len(actions) - 1  # every schedule ends with a backward
        opened: dict[tuple[int, int], tuple[Pass, Tensor | None, KeyedDraws | None]] = {}
        for place, action in enumerate(actions):
            where = action.stage, action.microbatch
            if action.forward:
                opened[where] = self._stage_forward(pipeline, action)
                continue
            if place == last:
                self._share_losses(pipeline)
            now, loss, draws = opened.pop(where)
            self._engine.events.send("in_stage", *where)
            name = stage_name(*where)
            pipeline.back(now, loss, partial(self._backward, draws, last=place == last, name=name))
        reduction = self._engine.program.reduction
        if reduction is not None and reduction.unreduced:
            reduction.reduce_now()
        pipeline.finish()
        return self._weights.losses

    def _stage_forward(self, pipeline: Pipeline, action: Action) -> tuple[Pass, Tensor | None, KeyedDraws | None]:
        number = action.microbatch
        self._engine.events.send("in_stage", action.stage, number)
        draws = self._begin(number)
        name, exact = stage_name(action.stage, number), draws.forward() if draws else NOTHING
        with self._recorder.span("forward", name), self._engine.computing(), exact:
            now, found = pipeline.run(action, lambda: self._found(number))
            loss = self._scaled(number, found) if pipeline.is_last(action) else None
        self._engine.events.send("forward_ends")
        return now, loss, draws

    def _begin(self, number: int) -> KeyedDraws | None:
        engine, part = self._engine, self._parts[number][1]
        engine.part = part
        if engine.watcher is not None:
            engine.watcher.batch_given(part, self._parts[number][0])
        key = self._state.seed, self._state.step, number
        return None if engine.draws is None else engine.draws.of_microbatch(key, part)

    def _found(self, number: int) -> Any:
        IN_LOSS.append(self._engine)
        try:
            batch = self._parts[number][0]
            cast = batch if self._engine.stored is None else self._engine.cast(batch)
            return self._engine.program.plain(self._job.loss(self._state.model, cast))
        finally:
            IN_LOSS.pop()

    def _scaled(self, number: int, found: Any) -> Tensor:
        """Return the loss of a microbatch, scaled for the backward, so that the gradients of all microbatches add up to
        the gradient of the global batch."""
        engine, job, part = self._engine, self._job, self._parts[number][1]
        where = f"the loss of job '{job.name}'"
        for hear in engine.events.backward_begins:
            hear(found, part, None, job.reduction, where)
        summed = part.total if job.reduction == "sum" else None
        mean, weight = split_weight(found, part, where, summed=summed)
        self._weighed = weight is not None
        reduction = engine.program.reduction
        shared = reduction is not None and reduction.shared_terms  # loss terms that depend on parameters alone
        self._weights.coupled |= shared or engine.program.coupled_gradients
        return self._state.scaler.scale(self._weights.scale(mean, weight, part))

    def _backward(self, draws: KeyedDraws | None, scalar: Tensor, *, last: bool, name: str = "") -> None:
        alone = draws is None and self._engine.watcher is None
        with self._recorder.span("backward", name) if alone else self._watched(draws, last, name):
            factor = self._weights.begin_sum() if last and self._weighed else None
            self._engine.program.reduced_backward(scalar, last, factor)

    @contextlib.contextmanager
    def _watched(self, draws: KeyedDraws | None, last: bool, name: str) -> Iterator[None]:
        exact = draws.backward() if draws else NOTHING
        with self._engine.watched_backward(last), self._recorder.span("backward", name), exact:
            yield

    def _share_losses(self, pipeline: Pipeline) -> None:
        """Send the last stage's losses and loss weights to the other stages. Collective over the pipeline."""
        weights, device = self._weights, self._engine.program.device
        wide = torch.float32 if device.startswith("mps") else torch.float64
        table = torch.zeros((len(self._parts) + 1, 2), dtype=wide, device=device)
        if pipeline.pipe.rank == pipeline.last_rank:
            table[:-1] = torch.stack([column.to(wide) for column in stacked(weights.losses)], 1)
            table[-1, 0] = 1 if weights.unit is None else weights.unit
            table[-1, 1] = self._weighed
        collectives.broadcast(table, pipeline.last_rank, pipeline.pipe.group, of="the loss")
        if pipeline.pipe.rank != pipeline.last_rank:
            weights.losses = [(mean, weight) for mean, weight in (row.unbind() for row in table[:-1])]
            self._weighed = not rehearsing() and bool(table[-1, 1])
            weights.unit = table[-1, 0] if self._weighed else None


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors in a batch."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(batch))


def train_step(
    engine: Engine,
    job: Job,
    state: RunState,
    parts: Sequence[Microbatch],
    not_finite: NotFinite | None = None,
) -> Losses:
    """Make one optimizer step on this rank's microbatches. Return the losses and loss weights of the microbatches, as
    tensors on the device.

    not_finite: skips the update if a value is not finite. None if values are not checked.

    An optimizer such as LBFGS computes the loss several times, each time with the same random draws. The losses of the
    first time are returned, and `not_finite` is not used.
    """
    recorder = current()
    recorder.samples += parts[0][1].total
    if needs_closure(state.optimizer):
        return _step_with_closure(engine, job, state, parts)
    if not_finite is not None:
        not_finite.step_begins()
    losses = compute(engine, job, state, parts)
    with recorder.span("optimizer"):
        if not_finite is None or not not_finite.skips(state.step + 1, losses):
            _update(engine, job, state)
        elif not_finite.back:
            _clear(state)
        else:
            _end_step(state)
    return losses


def _update(engine: Engine, job: Job, state: RunState) -> None:
    if job.clip_norm is not None or engine.program.pipeline is not None:
        _clip(engine, job, state)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    _end_step(state)


def _step_with_closure(engine: Engine, job: Job, state: RunState, parts: Sequence[Microbatch]) -> Losses:
    found: list[Losses] = []

    def closure() -> Tensor:
        state.model.zero_grad()
        found.append(compute(engine, job, state, parts))
        _clip(engine, job, state)
        total, weight = collectives.all_reduce(total_of(found[-1]), of="the loss").unbind()
        return total / weight

    with current().span("optimizer"):
        state.optimizer.step(closure)  # type: ignore[arg-type]
        _end_step(state)
    return found[0]


def _clip(engine: Engine, job: Job, state: RunState) -> None:
    pipeline = engine.program.pipeline
    if pipeline is not None and state.scaler.is_enabled():  # either all stages take the step, or none does
        state.scaler.scale(torch.zeros((), device=engine.program.device))  # the first call initializes the scaler
        state.scaler.unscale_(state.optimizer)
        for found in found_infinite(state.scaler, state.optimizer):
            collectives.all_reduce(local_of(found), "max", pipeline.pipe.group, of="the loss scaler's decision")
    if job.clip_norm is not None and pipeline is not None:
        pipeline.holding.clip(job.clip_norm)
    elif job.clip_norm is not None:  # exact under shard: the norm of DTensors is the norm of whole tensors
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), job.clip_norm)


def _clear(state: RunState) -> None:
    state.optimizer.zero_grad(set_to_none=True)
    if not state.holds_all:  # also clear gradients of other parameters, since the clip norm counts them
        state.model.zero_grad(set_to_none=True)


def _end_step(state: RunState) -> None:
    _clear(state)
    if state.scheduler is not None:
        state.scheduler.step()
    state.step += 1
