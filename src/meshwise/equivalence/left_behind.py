"""What a step, and a whole run, have left behind on the ranks of the plan's side: of a job, and of a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwise.equivalence.gathered import to_rank_0
from meshwise.equivalence.over_ranks import by_tensor, coarse_on_any, numbers_apart, of_any_rank, tensors_apart
from meshwise.equivalence.seen import Side, Step
from meshwise.equivalence.watch import (
    Watch,
    buffers_of,
    merged,
    optimizer_state_of,
    parameters_of,
    scheduler_numbers,
)
from meshwise.spec.world import World
from meshwise.training.keyed import Rows
from meshwise.training.order import BatchSlice
from meshwise.transfer.collectives import gather_objects


def agreed(shares: Sequence[BatchSlice], world: World) -> tuple[list[list[list[int]]], list[Rows]]:
    """Which samples count on which rank, a list a microbatch; and this rank's rows of each microbatch. Collective."""
    ranks = gather_objects([(share.indices[: share.samples].tolist(), len(share.indices)) for share in shares])
    samples = [[own[k][0] if k < len(own) else [] for own in ranks] for k in range(len(shares))]
    rows = [
        Rows(sum(map(len, parts[: world.rank])), ranks[world.rank][k][1], sum(map(len, parts)), len(parts[world.rank]))
        for k, parts in enumerate(samples)
    ]
    return samples, rows


def look_back(
    step: Step, watch: Watch, model: nn.Module, optimizer: Optimizer, scheduler: Any = None, *, divided: bool
) -> None:
    """Complete `step`, which the optimizer has just made. Collective.

    divided: each rank has the optimizer's state of some parameters alone.
    """
    step.draws, step.outputs = watch.draws, merged(to_rank_0(watch.outputs))
    step.touched = [(r, *found) for r, each in enumerate(gather_objects(watch.touched)) for found in each]
    step.redrawn = any(gather_objects(watch.redrawn))
    step.parameters, step.buffers = parameters_of(model), buffers_of(model)
    step.scheduler = scheduler_numbers(scheduler)
    own = optimizer_state_of(optimizer, model)
    step.apart = {
        **tensors_apart("gradient", step.gradients),
        **tensors_apart("clipped gradient", step.clipped, divided=divided),
        **numbers_apart("learning rate", {f"group {n}": rate for n, rate in enumerate(step.rates)}),
        **tensors_apart("optimizer state", by_tensor(own), divided=divided),
        **tensors_apart("parameter", step.parameters),
        **tensors_apart("buffer", step.buffers),
        **numbers_apart("scheduler", step.scheduler),
    }
    step.coarse = coarse_on_any(step.parameters)
    step.optimizer, step.clipped = of_any_rank(own), of_any_rank(step.clipped)


def conclude(side: Side, watch: Watch) -> None:
    """Complete `side` with what the whole run drew. Collective."""
    side.unkeyed = set().union(*gather_objects(watch.unkeyed))
    side.drawing = set().union(*gather_objects(watch.drawing))
    side.evaluation_draws = max(gather_objects(watch.evaluation_draws))
