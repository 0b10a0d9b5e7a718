"""What a step, and a whole run, were on the ranks of the plan's side: of a job, and of a script."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from meshwise.equivalence.across_ranks import (
    low_precision_on_any,
    numbers_diverge,
    of_any_rank,
    tensors_diverge,
    to_rank_0,
)
from meshwise.equivalence.model_state import buffers_of, optimizer_state_of, parameters_of
from meshwise.equivalence.model_tracer import ModelTracer, merged
from meshwise.equivalence.trace import StepTrace, Trace, by_tensor
from meshwise.spec.world import World
from meshwise.training.keyed import Rows
from meshwise.training.order import BatchSlice
from meshwise.transfer.collectives import gather_objects


def slices_of_ranks(slices: Sequence[BatchSlice], world: World) -> tuple[list[list[list[int]]], list[Rows]]:
    """Which samples count on which rank, a list a microbatch; and this rank's rows of each microbatch. Collective."""
    ranks = gather_objects([(own.indices[: own.samples].tolist(), len(own.indices)) for own in slices])
    samples = [[own[k][0] if k < len(own) else [] for own in ranks] for k in range(len(slices))]
    rows = [
        Rows(sum(map(len, parts[: world.rank])), ranks[world.rank][k][1], sum(map(len, parts)), len(parts[world.rank]))
        for k, parts in enumerate(samples)
    ]
    return samples, rows


def collect_step(step: StepTrace, model: nn.Module, optimizer: Optimizer, *, divided: bool) -> None:
    """Complete `step`, of which each rank knows its own part, with what it has left behind. Collective.

    divided: each rank has the optimizer's state of some parameters only.
    """
    step.outputs = merged(to_rank_0(step.outputs))
    ranks = enumerate(gather_objects(step.modified_between_backwards))
    step.modified_between_backwards = [(rank, *found[1:]) for rank, each in ranks for found in each]
    step.rng_mismatch = any(gather_objects(step.rng_mismatch))
    step.parameters, step.buffers = parameters_of(model), buffers_of(model)
    state = optimizer_state_of(optimizer, model)
    step.rank_divergence |= {
        **tensors_diverge("gradients", step.gradients),
        **tensors_diverge("clipped gradients", step.clipped_gradients, divided=divided),
        **numbers_diverge("learning rate", {f"group {n}": rate for n, rate in enumerate(step.learning_rates)}),
        **tensors_diverge("optimizer state", by_tensor(state), divided=divided),
        **tensors_diverge("parameters", step.parameters),
        **tensors_diverge("buffers", step.buffers),
        **numbers_diverge("loss", {"loss": step.loss}),
    }
    step.low_precision = low_precision_on_any(step.parameters)
    step.optimizer_state, step.clipped_gradients = of_any_rank(state), of_any_rank(step.clipped_gradients)


def collect_run(trace: Trace, tracer: ModelTracer) -> None:
    """Complete `trace` with what the whole run drew. Collective."""
    trace.unkeyed = set().union(*gather_objects(tracer.unkeyed))
    trace.random_modules = set().union(*gather_objects(tracer.random_modules))
    trace.evaluation_draws = max(gather_objects(tracer.evaluation_draws))
