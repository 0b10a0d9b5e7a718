"""The plan's side: the real `apply`, the real training step and the real evaluation, watched. Runs on every rank.

What should be alike on every rank (a gathered gradient, a buffer, a learning rate) is compared over the ranks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.equivalence.across_ranks import cannot_train, numbers_diverge, start_diverges
from meshwise.equivalence.collect import collect_run, collect_step, slices_of_ranks
from meshwise.equivalence.model_state import gradients_of, learning_rates_of
from meshwise.equivalence.model_tracer import ModelTracer
from meshwise.equivalence.one_device import opened, trace_of
from meshwise.equivalence.trace import BatchRange, CheckSpec, StepTrace, Trace, batch_ranges, order_of, test_samples
from meshwise.spec.plan import Plan, at_precision
from meshwise.spec.world import World
from meshwise.training.engine import Engine
from meshwise.training.evaluate import evaluate
from meshwise.training.job import Job
from meshwise.training.keyed import Draw
from meshwise.training.loop import begun, make_engine, train_step
from meshwise.training.order import BatchSlice, epoch_slices, sequential_slices
from meshwise.training.weighing import as_weight
from meshwise.transfer.collectives import gather_objects
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import join

Draws = Sequence[Sequence[Sequence[Draw]]]
"""What one device drew: step -> microbatch -> draws."""


class _Watched:
    """The engine's watcher: after the backward that reduces, `seen` is called."""

    folder = Path()

    def __init__(self, watch: ModelTracer, seen: Callable[[], None]) -> None:
        self._watch, self._seen = watch, seen

    @contextlib.contextmanager
    def backward(self, reduce: bool) -> Iterator[None]:
        with self._watch.backward():
            yield
        if reduce:
            self._seen()

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        return plan

    def batch_limit(self, batch_size: int) -> int | None:
        return None

    def _nothing(self, *_: Any) -> None:
        pass

    loop_begins = batch_asked = batch_given = loop_ends = loss_known = step_begins = step_ends = summed = _nothing


def under_plan(job: Job, spec: CheckSpec, draws: Draws) -> Trace | None:
    """Train `job` under the plan of `spec`, and evaluate it. Collective; rank 0 gets what all saw, the others None.

    draws: the random draws of one device, so that this side makes the same.
    """
    session = join()
    engine = make_engine(session)
    try:
        return _under_plan(job, spec, draws, engine, session.world)
    finally:
        engine.close()


def _under_plan(job: Job, spec: CheckSpec, draws: Draws, engine: Engine, world: World) -> Trace | None:
    plan = at_precision(spec.plan, spec.precision)
    state = begun(job, plan, engine)
    model = state.model
    watch = ModelTracer(model, job.seed, upcast=spec.upcast)
    side = trace_of(model)
    side.notes = tuple(engine.notes)
    side.rank_divergence = start_diverges(side)
    if any(gather_objects(cannot_train(side.rank_divergence))):
        return side if world.rank == 0 else None
    step = StepTrace()

    def gradients_are_there() -> None:
        step.gradients, step.ready_order = gradients_of(model), list(dict.fromkeys(watch.ready))

    def optimizer_steps(*_: Any) -> None:
        step.learning_rates = learning_rates_of(state.optimizer)
        if job.clip_norm is not None:
            step.clipped_gradients = gradients_of(model)

    state.optimizer.register_step_pre_hook(optimizer_steps)
    engine.watch(_Watched(watch, gradients_are_there))
    divided = plan.state_divided and not plan.parameters_divided

    def traced_loss(model: Any, batch: Any) -> Any:
        with watch.forward():
            return job.loss(model, batch)

    traced = replace(job, loss=traced_loss)
    samples, read = opened(job, job.data(), "training set")
    model.train()
    for number, cut in enumerate(batch_ranges(samples, job.batch_size, spec)):
        step = StepTrace()
        shares = _shares(job, cut, samples, world, spec)
        step.samples, rows = slices_of_ranks(shares, world)
        watch.begin(number, rows, draws[number] if number < len(draws) else [])
        parts = list(prefetch(zip(read((s.indices for s in shares), cut.epoch), shares, strict=True), world.device))
        step.loss = _mean(train_step(engine, traced, state, parts))
        collect_step(step, watch, model, state.optimizer, state.scheduler, divided=divided)
        if world.rank == 0:
            side.steps.append(step)
    _evaluate(job, model, engine, watch, side)
    collect_run(side, watch)
    return side if world.rank == 0 else None


def _shares(job: Job, cut: BatchRange, samples: int, world: World, spec: CheckSpec) -> list[BatchSlice]:
    order = order_of(job.seed, cut, samples)[: cut.stop]
    return next(iter(epoch_slices(order, cut.stop - cut.start, world, spec.plan.accumulate, cut.start)))


def _mean(losses: Sequence[tuple[Tensor, Tensor | float]]) -> float:
    """The loss of the step, as the log of a run adds it up."""
    weights = [as_weight(weight, loss).cpu() for loss, weight in losses]
    totals = [loss.detach().double().cpu() * weight for (loss, _), weight in zip(losses, weights, strict=True)]
    ranks = gather_objects((float(torch.stack(totals).sum()), float(torch.stack(weights).sum())))
    return float(sum(total for total, _ in ranks) / sum(weight for _, weight in ranks))


def _evaluate(job: Job, model: nn.Module, engine: Engine, watch: ModelTracer, side: Trace) -> None:
    if job.test is None:
        return
    samples, read = opened(job, job.test(), "test set")
    shares = sequential_slices(test_samples(samples, job.batch_size), job.batch_size, engine.world)
    counted, rows = slices_of_ranks(shares, engine.world)
    batches = prefetch(zip(read((s.indices for s in shares), 0), shares, strict=True), engine.world.device)
    metrics = None if job.metrics is None else watch.keyed(job.metrics, rows)
    measured = replace(job, loss=watch.keyed(job.loss, rows), metrics=metrics)
    side.evaluation = evaluate(engine, measured, model, batches)
    side.rank_divergence |= numbers_diverge("evaluation", side.evaluation)
    side.padding_ranks = {max(parts, key=len)[0]: parts.count([]) for parts in counted if any(parts)}
    side.evaluated = [index for parts in counted for part in parts for index in part]
