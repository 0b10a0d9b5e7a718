"""The plan's side: the real `apply`, the real training step and the real evaluation, watched. Runs on every rank.

What is whole on each rank (a gathered gradient, a buffer) is compared over the ranks too, by its print: rank 0 alone
would not show what another rank got wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwise.equivalence.gathered import to_rank_0
from meshwise.equivalence.one_device import begun_side, opened
from meshwise.equivalence.seen import Ask, Cut, Named, Side, Step, cuts_of, order_of, test_samples
from meshwise.equivalence.watch import (
    Watch,
    buffers_of,
    gradients_of,
    merged,
    optimizer_state_of,
    parameters_of,
    prints_of,
    rates_of,
    scheduler_numbers,
)
from meshwise.parallel.apply import Applied
from meshwise.recovery.state import RunState
from meshwise.spec.plan import at_precision
from meshwise.spec.world import World
from meshwise.timeline.record import current
from meshwise.training.evaluate import evaluate
from meshwise.training.job import Job
from meshwise.training.keyed import Draw, Rows
from meshwise.training.loop import begun
from meshwise.training.order import Share, sequential_shares, steps_of_epoch
from meshwise.training.step import StepContext, train_step
from meshwise.training.weighing import as_weight
from meshwise.transfer.collectives import gather_objects
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import join

Draws = Sequence[Sequence[Sequence[Draw]]]
"""What one device drew: step -> microbatch -> draws."""


class _Watched:
    """An `Applied` whose backward is watched: after the one that reduces, `seen` is called."""

    def __init__(self, applied: Applied, watch: Watch, seen: Callable[[], None]) -> None:
        self._applied, self._watch, self._seen = applied, watch, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._applied, name)

    def backward(self, loss: Tensor, *, reduce: bool = True, **rest: Any) -> Tensor | None:
        with self._watch.backward():
            value = self._applied.backward(loss, reduce=reduce, **rest)
        if reduce:
            self._seen()
        return value


def under_plan(job: Job, ask: Ask, draws: Draws) -> Side | None:
    """Train `job` under the plan of `ask`, and evaluate it. Collective; rank 0 gets what all saw, the others None.

    draws: the random draws of one device, so that this side makes the same.
    """
    world = join().world
    plan = at_precision(ask.plan, ask.precision)
    applied, state = begun(job, plan, world)
    watch = Watch(applied.model, job.seed, lift=ask.lifted)
    side = begun_side(applied.model)
    side.notes = applied.notes
    side.apart = {**ranks_apart("parameter", side.initial), **ranks_apart("buffer", side.initial_buffers)}
    step = Step()

    def gradients_are_there() -> None:
        step.gradients, step.ready = gradients_of(applied.model), list(dict.fromkeys(watch.ready))

    def optimizer_steps(*_: Any) -> None:
        step.clipped = gradients_of(applied.model)

    if job.clip_norm is not None:
        state.optimizer.register_step_pre_hook(optimizer_steps)
    metrics = None if job.metrics is None else watch.lifted(job.metrics)
    lifted_job = replace(job, loss=watch.loss(job.loss), metrics=metrics)
    watched: Any = _Watched(applied, watch, gradients_are_there)
    context = StepContext(lifted_job, watched, state, world, current())
    samples, read = opened(job, job.data(), "training set")
    applied.model.train()
    for number, cut in enumerate(cuts_of(samples, job.batch_size, ask)):
        step = Step(rates=rates_of(state.optimizer))
        shares = _shares(job, cut, samples, world, ask)
        step.samples, rows = _agreed(shares, world)
        watch.begin(number, rows, draws[number] if number < len(draws) else [])
        parts = list(prefetch(zip(read((s.indices for s in shares), cut.epoch), shares, strict=True), world.device))
        step.loss = _mean(train_step(context, parts))
        step.draws, step.outputs = watch.draws, merged(to_rank_0(watch.outputs))
        _after(step, state)
        if world.rank == 0:
            side.steps.append(step)
    _evaluate(replace(lifted_job, loss=watch.lifted(job.loss)), context, side)
    side.unkeyed = set().union(*gather_objects(watch.unkeyed))
    return side if world.rank == 0 else None


def _shares(job: Job, cut: Cut, samples: int, world: World, ask: Ask) -> list[Share]:
    order = order_of(job.seed, cut, samples)[: cut.stop]
    return next(iter(steps_of_epoch(order, cut.stop - cut.start, world, ask.plan.accumulate, cut.start)))


def _agreed(shares: Sequence[Share], world: World) -> tuple[list[list[list[int]]], list[Rows]]:
    """Which samples count on which rank, a list a microbatch; and this rank's rows of each microbatch."""
    ranks = gather_objects([(share.indices[: share.samples].tolist(), len(share.indices)) for share in shares])
    samples = [[ranks[r][k][0] for r in range(world.size)] for k in range(len(shares))]
    rows = [
        Rows(sum(map(len, parts[: world.rank])), ranks[world.rank][k][1], sum(map(len, parts)), len(parts[world.rank]))
        for k, parts in enumerate(samples)
    ]
    return samples, rows


def _mean(losses: Sequence[tuple[Tensor, Tensor | float]]) -> float:
    """The loss of the step, as the journal of a run adds it up."""
    weights = [as_weight(weight, loss).cpu() for loss, weight in losses]
    totals = [loss.detach().double().cpu() * weight for (loss, _), weight in zip(losses, weights, strict=True)]
    ranks = gather_objects((float(torch.stack(totals).sum()), float(torch.stack(weights).sum())))
    return float(sum(total for total, _ in ranks) / sum(weight for _, weight in ranks))


def _after(step: Step, state: RunState) -> None:
    """What the step has left behind."""
    model = state.model
    step.parameters, step.buffers = parameters_of(model), buffers_of(model)
    step.optimizer = of_any_rank(optimizer_state_of(state.optimizer, model))
    step.clipped = of_any_rank(step.clipped)
    step.scheduler = scheduler_numbers(state.scheduler)
    step.apart = {
        **ranks_apart("gradient", step.gradients),
        **ranks_apart("parameter", step.parameters),
        **ranks_apart("buffer", step.buffers),
    }


def of_any_rank(named: dict[str, Any]) -> dict[str, Any]:
    """What any rank has, by name, from the first that has it: a divided optimizer keeps its state on one rank."""
    names = gather_objects(list(named))
    earlier = {name for others in names[: join().world.rank] for name in others}
    parts = to_rank_0({name: value for name, value in named.items() if name not in earlier})
    return {name: value for part in reversed(parts) for name, value in part.items()}


def ranks_apart(what: str, named: Named) -> dict[str, float]:
    """How far ranks are from rank 0 in each tensor, relative to its size there; those that agree are left out."""
    ranks = to_rank_0({name: prints_of(value.double(), 1)["whole"] for name, value in named.items()})
    found = {}
    for name in {name for prints in ranks for name in prints}:
        first = ranks[0].get(name)
        others = [prints.get(name) for prints in ranks]
        if first is None or any(other is None for other in others):
            found[f"{what} {name}"] = float("inf")
            continue
        most = max(float((other - first).norm()) for other in others if other is not None)
        if most > 0:
            found[f"{what} {name}"] = most / max(float(first.norm()), torch.finfo(torch.float64).tiny)
    return found


def _evaluate(job: Job, context: StepContext, side: Side) -> None:
    if job.test is None:
        return
    samples, read = opened(job, job.test(), "test set")
    shares = sequential_shares(test_samples(samples, job.batch_size), job.batch_size, context.world)
    batches = prefetch(zip(read((s.indices for s in shares), 0), shares, strict=True), context.world.device)
    side.evaluation = evaluate(replace(context, job=job), batches)
    counted = gather_objects([share.indices[: share.samples].tolist() for share in shares])
    side.evaluated = [index for parts in zip(*counted, strict=True) for part in parts for index in part]
