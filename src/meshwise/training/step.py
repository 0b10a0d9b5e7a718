"""One optimizer step: forward and backward of every microbatch, one reduction, one update.

The gradient is the exact weighted mean over the global batch. With weights that the sampler knows (samples), each
microbatch's loss is scaled before its backward and nothing is communicated for it. With weights that only the loss
knows (tokens), their sum is reduced while the backward runs and divides the gradients before they are averaged.
The step never reads a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.apply import Applied
from meshwise.parallel.precision import cast_batch, computing
from meshwise.recovery.state import RunState
from meshwise.spec.world import World
from meshwise.timeline.recorder import Recorder
from meshwise.training.draws import seed_draws
from meshwise.training.exact import StepDraws
from meshwise.training.job import Job
from meshwise.training.order import BatchSlice
from meshwise.training.weighing import as_weight, split_weight
from meshwise.transfer import collectives

Part = tuple[Any, BatchSlice]
Losses = list[tuple[Tensor, Tensor | float]]
"""A loss and its weight for each microbatch of a step."""


@dataclass(frozen=True)
class StepContext:
    """What every step of a run needs."""

    job: Job
    applied: Applied
    state: RunState
    world: World
    recorder: Recorder
    draws: StepDraws = field(default_factory=StepDraws)


def train_step(run: StepContext, parts: Sequence[Part]) -> Losses:
    """Take one optimizer step on this rank's microbatches. Returns their losses and weights, still on the device."""
    seed_draws(run.state.seed, run.state.step, run.world)
    losses: Losses = []
    first: Tensor | None = None
    for number, (batch, share) in enumerate(parts):
        run.state.counts = share.samples > 0
        run.draws.begin((run.state.seed, run.state.step, number), share)
        with run.recorder.span("forward"), computing(run.world.device, run.applied.plan.dtypes), run.draws.forward():
            result = run.job.loss(run.applied.model, cast_batch(batch, run.applied.plan.dtypes))
            mean, weight = split_weight(result, share.samples, f"the loss of job '{run.job.name}'")
        last = number == len(parts) - 1
        with run.recorder.span("backward"), run.draws.backward():
            if weight is None:
                losses.append((mean.detach(), float(share.samples)))
                scale = share.samples * run.world.size / share.total
                _backward(run, mean if scale == 1 else mean * scale, last, None)
            else:
                weight = as_weight(weight, mean)
                losses.append((mean.detach(), weight))
                if first is None:
                    first = torch.ones_like(weight) if run.applied.meets else weight.clamp(min=1)
                factor = _common_factor(run.world, losses, first) if last else None
                _backward(run, mean * (weight / first).to(mean.dtype), last, factor)
    with run.recorder.span("optimizer"):
        _update(run)
    return losses


def _common_factor(world: World, losses: Losses, first: Tensor) -> Callable[[], Tensor]:
    """Begin to sum the weights over the ranks; the result turns gradients in units of `first` into the global mean."""
    wait = collectives.begin_sum(torch.stack([torch.as_tensor(weight) for _, weight in losses]).sum()).wait
    return lambda: first * world.size / wait()


def _backward(run: StepContext, loss: Tensor, last: bool, factor: Callable[[], Tensor] | None) -> None:
    run.applied.backward(run.state.scaler.scale(loss), reduce=last, factor=factor, whole=True)


def _update(run: StepContext) -> None:
    state = run.state
    if run.job.clip_norm is not None:
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), run.job.clip_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.model.zero_grad(set_to_none=True)  # of what it does not hold too: the clip norm and the mean are of one step
    if state.scheduler is not None:
        state.scheduler.step()
    state.step += 1
