"""Where planted bugs go in: a name for each place of our code that they may replace, and where it lies today.

A bug is written against the name, and against `Training`, not against the functions of the training step: when those
move, they are named anew here and nowhere else.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.training.data.order import BatchSlice
from meshwise.transfer import collectives

SEAMS = {
    # the training step
    "microbatches of a step": "meshwise.checker.programs.train_step",
    "loss and weight": "meshwise.training.job.step.split_weight",
    "backward of a microbatch": "meshwise.training.engine.program.Program.reduced_backward",
    "what watches a backward": "meshwise.training.engine.engine.Engine.watched_backward",
    "weight of a microbatch": "meshwise.training.engine.weighing.StepWeights.scale",
    "sum of weights": "meshwise.training.engine.weighing.StepWeights.begin_sum",
    "update": "meshwise.training.job.step._update",
    "guard of steps": "meshwise.training.engine.program.Program.check_step",
    "guard of gathered weights": "meshwise.parallel.shard_units.StaysGathered._look_for_writes",
    "optimizer is bound": "meshwise.training.engine.program.Program.add_optimizer",
    # the data
    "slice of a rank": "meshwise.training.data.order.batch_slice",
    "slices of an evaluation": "meshwise.checker.programs.sequential_slices",
    "random numbers": "meshwise.training.data.keyed.KeyedDraws._uniform",
    "order of an epoch": "meshwise.checker.trace.epoch_order",
    "saved state is loaded": "meshwise.checker.programs.unpack",
    # the evaluation
    "evaluation": "meshwise.checker.programs.evaluate",
    "metrics of a batch": "meshwise.training.job.evaluate._measure",
    "metrics over ranks": "meshwise.training.job.evaluate._over_ranks",
    # techniques
    "techniques of plans": "meshwise.parallel.apply.TECHNIQUES",
    "model before it is divided": "meshwise.parallel.recompute.recompute_blocks",
    "batch norms are joined": "meshwise.parallel.batch_norm.join_batch_norms",
    "running statistics": "meshwise.parallel.batch_norm._track",
    "collectives of batch norms": "meshwise.parallel.batch_norm.collectives",
    "replicas are made": "meshwise.parallel.data.DataParallel.__init__",
    "backward of replicas": "meshwise.parallel.data.DataParallel.backward",
    "mean of a bucket": "meshwise.transfer.collectives.begin_mean",
    "sum of the only bucket": "meshwise.transfer.collectives.sum_now",
    "asynchronous sum": "meshwise.transfer.collectives.begin_sum",
    "shards are made": "meshwise.parallel.shard.Sharded.__init__",
    "backward of shards": "meshwise.parallel.shard.Sharded.backward",
    "fully_shard": "meshwise.parallel.shard.fully_shard",
    "reduce of shards": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
    "gradients of shards are reduced": "torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
    "gather of shards": "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather_copy_out",
    "buckets of zero1": "meshwise.parallel.zero1.buckets_of",
    "step of zero1 is over": "meshwise.parallel.zero1.DividedOptimizer._after",
    "collectives of zero1": "meshwise.parallel.zero1.collectives",
    "checkpoint": "meshwise.parallel.recompute.checkpoint",
    "second run of a block": "meshwise.parallel.recompute._again",
    "sending to the host": "meshwise.parallel.offload._send",
    # tensors in parts
    "crossing to and from parts": "meshwise.parallel.splits.crossing.through",
    "parts are put together": "meshwise.parallel.splits.axis.SplitPart.gathered",
    "sum over an axis": "meshwise.parallel.splits.axis.MeshAxis.all_reduce",
    "sums of a loss over parts": "meshwise.parallel.splits.losses.add_up",
    "log of the sum over a row": "meshwise.parallel.splits.losses._log_sum",
    "positions are divided": "meshwise.parallel.context.scatter",
    "keys go round": "meshwise.parallel.splits.attention._round",
    "scores of a block": "meshwise.parallel.splits.attention._scores",
    "blocks of attention": "meshwise.parallel.splits.attention._blocks",
    # pipelines
    "send that is begun": "meshwise.transfer.collectives.begin_send",
    "receive": "meshwise.transfer.collectives.receive",
    "gradients go to the stage before": "meshwise.parallel.passing.Passing.send_backward",
    "gradients of ties": "meshwise.parallel.holding.Holding.add_up",
    "clipping over stages": "meshwise.parallel.holding.Holding.clip",
    # torch
    "clipping": "torch.nn.utils.clip_grad_norm_",
    "norm that clipping takes": "torch.nn.utils.clip_grad._get_total_norm",
}
"""Name of a seam -> the function that is called there."""


@dataclass(frozen=True)
class Training:
    """What a bug may change of a training under a plan. step: optimizer steps that are made."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    step: int

    @property
    def rank(self) -> int:
        return collectives.get_rank()


def replaced(patch: Any, seam: str, value: Any) -> None:
    """Put `value` in the place of what lies at a seam."""
    patch.setattr(SEAMS[seam], value)
    if seam == "mean of a bucket":  # that of the only one is waited for at once, and divided before

        def only(tensor: Tensor, **of: Any) -> None:
            value(tensor.mul_(collectives.world_size()), **of).wait()

        patch.setattr(SEAMS["sum of the only bucket"], only)


def around(patch: Any, seam: str, change: Callable[..., Any]) -> None:
    """Call `change(real, *arguments)` where `real(*arguments)` was called."""
    real = pkgutil.resolve_name(SEAMS[seam])
    replaced(patch, seam, lambda *arguments, **more: change(real, *arguments, **more))


def _training(state: Any) -> Training:
    return Training(state.model, state.optimizer, state.scheduler, state.step)


def before_update(patch: Any, change: Callable[[Training], None]) -> None:
    """Call `change` before each update: gradients are there, and not clipped."""

    def update(real: Any, engine: Any, job: Any, state: Any) -> None:
        change(_training(state))
        real(engine, job, state)

    around(patch, "update", update)


def after_update(patch: Any, change: Callable[[Training], None]) -> None:
    """Call `change` after each update: the scheduler has ticked, gradients are gone."""

    def update(real: Any, engine: Any, job: Any, state: Any) -> None:
        real(engine, job, state)
        change(_training(state))

    around(patch, "update", update)


def loss_changed(patch: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    """Let `change(loss, last)` give the loss whose backward runs; last: of the step's last microbatch."""

    def backward(real: Any, engine: Any, loss: Tensor, last: bool, factor: Any) -> None:
        real(engine, change(loss, last), last, factor)

    around(patch, "backward of a microbatch", backward)


def after_microbatch(patch: Any, change: Callable[[Training, bool], None]) -> None:
    """Call `change(training, last)` after the backward of each microbatch."""

    training: list[Training] = []

    def train_step(real: Any, engine: Any, job: Any, state: Any, parts: Any) -> Any:
        training[:] = [_training(state)]
        return real(engine, job, state, parts)

    @contextlib.contextmanager
    def watched(real: Any, engine: Any, last: bool) -> Iterator[None]:
        with real(engine, last):
            yield
        change(training[0], last)  # outside of what is watched: between two backwards

    around(patch, "microbatches of a step", train_step)
    around(patch, "what watches a backward", watched)


def at_start(
    patch: Any,
    before: Callable[[nn.Module, Any], None] | None = None,
    after: Callable[[nn.Module, Any], None] | None = None,
) -> None:
    """Call `before(model, optimizer)`, or `after`, when the plan is applied and the optimizer is bound to it."""

    def bind(real: Any, program: Any, optimizer: Any) -> None:
        if before is not None:
            before(program.models[0], optimizer)
        real(program, optimizer)
        if after is not None:
            after(program.models[0], optimizer)

    around(patch, "optimizer is bound", bind)


def before_division(patch: Any, change: Callable[[Any], None]) -> None:
    """Change the model after its start values were sent and before the plan divides it."""

    def divide(real: Any, model: nn.Module, how: Any) -> Any:
        change(model)
        return real(model, how)

    known = pkgutil.resolve_name(SEAMS["techniques of plans"])  # under a plan without recompute too
    always = [(place, "" if place == "recompute.RECOMPUTE" else fields) for place, fields in known]
    replaced(patch, "techniques of plans", tuple(always))
    around(patch, "model before it is divided", divide)


def slices_changed(patch: Any, change: Callable[[BatchSlice, int], BatchSlice]) -> None:
    """Let `change(slice, rank)` give what a rank has of a microbatch."""
    around(patch, "slice of a rank", lambda real, *arguments: change(real(*arguments), arguments[-1].rank))


def trained_slices_changed(patch: Any, change: Callable[[BatchSlice], BatchSlice]) -> None:
    """Let `change(slice)` give what the step believes of the samples that it has."""
    around(patch, "weight of a microbatch", lambda real, *given: real(*given[:-1], change(given[-1])))


def sum_of_weights_changed(patch: Any, change: Callable[[list[Tensor]], Tensor]) -> None:
    """Let `change(weights)` give what gradients are divided by, where only the loss knows its weight."""
    around(
        patch,
        "sum of weights",
        lambda real, weights: lambda: weights.unit / change([weight for _, weight in weights.losses]),
    )


def metrics_changed(patch: Any, change: Callable[[dict[str, Any], BatchSlice], dict[str, Any]]) -> None:
    """Let `change(metric -> (mean, weight), slice)` give the metrics of a batch."""
    around(patch, "metrics of a batch", lambda real, *given: change(real(*given), given[-2]))


def measured_slices_changed(patch: Any, change: Callable[[BatchSlice], BatchSlice]) -> None:
    """Let `change(slice)` give what an evaluation believes of the samples that it has."""
    around(
        patch,
        "metrics of a batch",
        lambda real, job, model, part, batch: real(job, model, change(part), batch),
    )


def around_measuring(patch: Any, change: Callable[[nn.Module], Callable[[], None]]) -> None:
    """Call `change(model)` before a batch is evaluated, and what it gave afterwards."""

    def measure(real: Any, job: Any, model: nn.Module, part: BatchSlice, batch: Any) -> Any:
        restore = change(model)
        result = real(job, model, part, batch)
        restore()
        return result

    around(patch, "metrics of a batch", measure)


# --- bugs that several tests plant


def after_backward(change: Callable[[dict[str, nn.Parameter]], None]) -> Callable[[Any], None]:
    """Change the gradients when they are reduced."""

    def backward(real: Any, self: Any, loss: Tensor, *, reduce: bool, **more: Any) -> Any:
        value = real(self, loss, reduce=reduce, **more)
        if reduce:
            change(dict(self._named))
        return value

    return lambda patch: around(patch, "backward of replicas", backward)


def mean_of_rank_means(patch: Any) -> None:
    """Each rank divides by its own number of tokens."""
    sum_of_weights_changed(patch, lambda weights: torch.stack(weights).sum().clamp(min=1))


def tokens_weigh_by_samples(patch: Any) -> None:
    """The weight that the loss gives is thrown away."""
    around(patch, "loss and weight", lambda real, *given, **named: (real(*given, **named)[0], None))
