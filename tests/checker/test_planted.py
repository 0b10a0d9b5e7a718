"""Bugs planted in our own functions on the plan's side are found, each with its module and its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.spec.plan import Plan
from meshwise.transfer import collectives
from tests.checker.jobs_to_check import checked
from tests.checker.seams import (
    Training,
    after_update,
    around,
    at_start,
    metrics_changed,
    replaced,
    slices_changed,
    trained_slices_changed,
)

Plant = Callable[[Any], Any]
REPLICAS = Plan(data=2)


def summed(patch: Any) -> None:
    around(patch, "mean of a bucket", lambda real, tensor, **of: real(tensor.mul_(collectives.world_size())))


def divided_twice(patch: Any) -> None:
    around(patch, "mean of a bucket", lambda real, tensor, **of: real(tensor.div_(collectives.world_size())))


def one_left_out(patch: Any) -> None:
    def init(real: Any, self: Any, named: Any, **more: Any) -> None:
        real(self, [(name, p) for name, p in named if name != "2.weight"], **more)

    around(patch, "replicas are made", init)


def weighted_by_ranks(patch: Any) -> None:
    """As many do it: the mean of the ranks' means."""
    ranks = collectives.world_size()
    trained_slices_changed(patch, lambda share: replace(share, samples=share.total / ranks))


def weights_of_one_rank(patch: Any) -> None:
    """The mean over what each rank counts, averaged over the ranks."""
    replaced(
        patch, "asynchronous sum", lambda tensor, **of: SimpleNamespace(wait=lambda: tensor * collectives.world_size())
    )


def after_start(change: Callable[[Any, Any], None]) -> Plant:
    return lambda patch: at_start(patch, after=change)


def unguarded(change: Callable[[Any, Any], None]) -> Plant:
    """A step that the engine itself would refuse: the check finds it too."""

    def plant(patch: Any) -> None:
        replaced(patch, "guard of steps", lambda *arguments: True)
        at_start(patch, after=change)

    return plant


def optimizer_of_copies(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def optimizer_lacks_one(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not model[2].weight]


def untied(model: Any, optimizer: Any) -> None:
    model.right.weight = nn.Parameter(model.right.weight.detach().clone())


def tied_to_another(model: Any, optimizer: Any) -> None:
    model[4].bias = nn.Parameter(model[4].bias.detach().clone())
    model[2].weight = model[2].weight
    model[2].bias = model[0].bias


def one_gradient_larger(model: Any, optimizer: Any) -> None:
    model[2].bias.register_hook(lambda gradient: gradient * 1.5)


def sharper(model: Any, optimizer: Any) -> None:
    model[1].register_forward_hook(lambda module, inputs, output: output * 1.0000001)


def behind_update(change: Callable[[Training], None]) -> Plant:
    return lambda patch: after_update(patch, change)


def tick_again(training: Training) -> None:
    training.scheduler.step()


def round_parameters(training: Training) -> None:
    for p in training.model.parameters():
        p.data.copy_(p.data.bfloat16())


def count_again(training: Any) -> None:
    training.model.seen += 1


def count_by_rank(training: Any) -> None:
    training.model.seen += training.rank


def halve_moments(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg_sq"].mul_(0.5)


def clipped_wider(patch: Any) -> None:
    around(patch, "clipping", lambda real, parameters, norm: real(parameters, 2 * norm))


def padding_is_shared_out(patch: Any) -> None:
    """Every rank gets equally many samples in an evaluation; the last ones are padded with the last sample."""

    def padded(real: Any, *arguments: Any) -> Any:
        return [replace(share, samples=max(share.samples, 1)) for share in real(*arguments)]

    around(patch, "slices of an evaluation", padded)


def padding_weighs(patch: Any) -> None:
    metrics_changed(patch, lambda metrics, share: {n: (mean, w.clamp(min=1.0)) for n, (mean, w) in metrics.items()})


def repeated_rows(patch: Any) -> None:
    """The second rank begins a sample early."""

    def rows(real: Any, samples: Any, start: int, stop: int, total: int, world: Any) -> Any:
        share = real(samples, start, stop, total, world)
        return replace(share, indices=samples[start : start + len(share.indices)]) if world.rank else share

    around(patch, "slice of a rank", rows)


def turned_around(patch: Any) -> None:
    slices_changed(patch, lambda share, rank: replace(share, indices=share.indices.flip(0)))


def draws_of_their_own(patch: Any) -> None:
    def uniform(self: Any, name: str, shape: Any, device: Any, call: int) -> Any:
        generator = torch.Generator().manual_seed(1 + collectives.get_rank())
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    replaced(patch, "random numbers", uniform)


def starts_of_their_own(patch: Any) -> None:
    def scale(model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            p.data.mul_(1 + collectives.get_rank())

    at_start(patch, before=scale)


def nothing_is_sent(patch: Any) -> None:
    replaced(patch, "buckets of zero1", lambda *arguments: [])


def batch_norms_alone(patch: Any) -> None:
    replaced(patch, "batch norms are joined", lambda *arguments: [])


@dataclass(frozen=True)
class Planted:
    """A bug, the job that it is planted in, and what must be found."""

    plant: Plant
    job: str
    kind: str
    module: str
    cause: str
    step: int = 1
    plan: Plan = REPLICAS


BUGS = {
    "gradients are summed": Planted(summed, "plain", "gradients", "4", "doubled reduction"),
    "gradients are divided twice": Planted(divided_twice, "plain", "gradients", "4", "doubled reduction"),
    "a parameter is not reduced": Planted(one_left_out, "plain", "gradients", "2", "missing reduction"),
    "ranks weigh the same": Planted(weighted_by_ranks, "plain", "loss", "", "loss weighting", 3),
    "each rank weighs by itself": Planted(weights_of_one_rank, "weighed", "gradients", "4", "loss weighting"),
    "the optimizer has copies": Planted(
        unguarded(optimizer_of_copies), "plain", "optimizer state", "0", "optimizer bound to old parameters"
    ),
    "the optimizer lacks one": Planted(
        after_start(optimizer_lacks_one), "plain", "optimizer state", "2", "optimizer bound to old parameters"
    ),
    "the scheduler ticks twice": Planted(behind_update(tick_again), "plain", "scheduler", "", "scheduler ticks twice"),
    "parameters are kept in bfloat16": Planted(
        behind_update(round_parameters), "plain", "parameters", "0", "master weights"
    ),
    "the optimizer's state alone": Planted(
        behind_update(halve_moments), "plain", "optimizer state", "0", "optimizer step"
    ),
    "a buffer on one side": Planted(behind_update(count_again), "counting", "buffers", "", "buffer"),
    "a buffer that ranks differ in": Planted(behind_update(count_by_rank), "counting", "buffers", "", "buffer"),
    "clipped to another norm": Planted(clipped_wider, "plain", "clipped gradients", "", "clip norm"),
    "a padded sample is evaluated": Planted(
        padding_is_shared_out, "plain", "evaluation", "", "padded or repeated sample", 3
    ),
    "a padding sample weighs in a metric": Planted(padding_weighs, "plain", "evaluation", "", "evaluation", 3),
    "a sample is trained on twice": Planted(repeated_rows, "plain", "sample order", "", "padded or repeated sample"),
    "another order": Planted(turned_around, "plain", "sample order", "", "data order"),
    "a tied weight comes apart": Planted(after_start(untied), "tied", "tied weights", "left", "tied weight"),
    "a weight is tied to another": Planted(after_start(tied_to_another), "plain", "tied weights", "0", "tied weight"),
    "a gradient is too large": Planted(after_start(one_gradient_larger), "plain", "gradients", "2", "backward"),
    "a module is sharper": Planted(after_start(sharper), "plain", "module outputs", "1", "module"),
    "dropout is not keyed": Planted(draws_of_their_own, "dropped", "module outputs", "drop", "dropout masks"),
    "batch norm of each rank's share": Planted(
        batch_norms_alone, "normed", "module outputs", "1", "batch-norm statistics"
    ),
    "zero1 sends nothing": Planted(
        nothing_is_sent, "plain", "parameters", "0", "optimizer step", plan=Plan(data=2, zero1=True)
    ),
    "ranks start apart": Planted(starts_of_their_own, "plain", "initial parameters", "0", "start values"),
}


@pytest.mark.parametrize("bug", [pytest.param(b, marks=[pytest.mark.slow] * (n % 2)) for n, b in enumerate(BUGS)])
def test_a_planted_bug_is_found(bug: str, pool: Any) -> None:
    planted = BUGS[bug]
    proof = checked(pool, planted.job, planted.plan, plant=planted.plant)
    first = proof.comparison.first
    assert not proof.equal and first is not None and proof.cause is not None
    assert (first.kind, proof.module, proof.cause.name, first.step if first.step else 1) == (
        planted.kind,
        planted.module,
        planted.cause,
        planted.step,
    ), (first, proof.cause)


def test_what_was_planted_is_gone(pool: Any) -> None:
    """Workers are kept: a patch that stayed would be found in the next check."""
    assert checked(pool, "plain", Plan(data=2)).equal
