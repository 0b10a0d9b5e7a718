"""Bugs planted in our own functions on the plan's side are found, each with its module and its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.equivalence import under_plan
from meshwise.parallel import apply as applying
from meshwise.parallel import zero1
from meshwise.spec.plan import Plan
from meshwise.training import evaluate, keyed, loop, order, step
from meshwise.transfer import collectives
from tests.equivalence.jobs_to_check import checked

Plant = Callable[[Any], Any]
REPLICAS = Plan(data=2)


def summed(patch: Any) -> None:
    real = collectives.begin_mean
    patch.setattr(collectives, "begin_mean", lambda tensor: real(tensor.mul_(collectives.world_size())))


def divided_twice(patch: Any) -> None:
    real = collectives.begin_mean
    patch.setattr(collectives, "begin_mean", lambda tensor: real(tensor.div_(collectives.world_size())))


def one_left_out(patch: Any) -> None:
    real = applying.DataParallel
    patch.setattr(
        applying, "DataParallel", lambda named, **more: real([(n, p) for n, p in named if n != "2.weight"], **more)
    )


def weighted_by_ranks(patch: Any) -> None:
    """As many do it: the mean of the ranks' means."""
    real = under_plan.train_step

    def train_step(run: Any, parts: Any) -> Any:
        parts = list(parts)
        return real(run, [(b, replace(s, samples=s.total / run.world.size / len(parts))) for b, s in parts])

    patch.setattr(under_plan, "train_step", train_step)


def weights_of_one_rank(patch: Any) -> None:
    """The mean over what each rank counts, averaged over the ranks."""

    class Done:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def wait(self) -> Any:
            return self.tensor * collectives.world_size()

    patch.setattr(collectives, "begin_sum", Done)


def after_begun(change: Callable[[Any, Any], None]) -> Plant:
    def plant(patch: Any) -> None:
        real = under_plan.begun

        def begun(*arguments: Any) -> Any:
            applied, state = real(*arguments)
            change(applied, state)
            return applied, state

        patch.setattr(under_plan, "begun", begun)

    return plant


def optimizer_of_copies(applied: Any, state: Any) -> None:
    for group in state.optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def optimizer_lacks_one(applied: Any, state: Any) -> None:
    for group in state.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not applied.model[2].weight]


def untied(applied: Any, state: Any) -> None:
    applied.model.right.weight = nn.Parameter(applied.model.right.weight.detach().clone())


def tied_to_another(applied: Any, state: Any) -> None:
    applied.model[4].bias = nn.Parameter(applied.model[4].bias.detach().clone())
    applied.model[2].weight = applied.model[2].weight
    applied.model[2].bias = applied.model[0].bias


def one_gradient_larger(applied: Any, state: Any) -> None:
    applied.model[2].bias.register_hook(lambda gradient: gradient * 1.5)


def sharper(applied: Any, state: Any) -> None:
    applied.model[1].register_forward_hook(lambda module, inputs, output: output * 1.0000001)


def after_update(change: Callable[[Any], None]) -> Plant:
    def plant(patch: Any) -> None:
        real = step._update

        def update(run: Any) -> None:
            real(run)
            change(run)

        patch.setattr(step, "_update", update)

    return plant


def tick_again(run: Any) -> None:
    run.state.scheduler.step()


def round_parameters(run: Any) -> None:
    for p in run.state.model.parameters():
        p.data.copy_(p.data.bfloat16())


def count_again(run: Any) -> None:
    run.state.model.seen += 1


def count_by_rank(run: Any) -> None:
    run.state.model.seen += run.world.rank


def halve_moments(run: Any) -> None:
    for state in run.state.optimizer.state.values():
        state["exp_avg_sq"].mul_(0.5)


def clipped_wider(patch: Any) -> None:
    real = torch.nn.utils.clip_grad_norm_
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: real(parameters, 2 * norm))


def stand_ins_are_shared_out(patch: Any) -> None:
    """Every rank gets equally many samples in an evaluation; the last ones are padded with the last sample."""
    real = under_plan.sequential_shares

    def padded(*arguments: Any) -> Any:
        return [replace(share, samples=max(share.samples, 1)) for share in real(*arguments)]

    patch.setattr(under_plan, "sequential_shares", padded)


def stand_ins_weigh(patch: Any) -> None:
    real = evaluate.as_weight
    patch.setattr(evaluate, "as_weight", lambda weight, like: real(max(float(weight), 1.0), like))


def repeated_rows(patch: Any) -> None:
    """The second rank begins a sample early."""
    real = order.share_of

    def share_of(all: Any, start: int, stop: int, total: int, world: Any) -> Any:
        share = real(all, start, stop, total, world)
        return replace(share, indices=all[start : start + len(share.indices)]) if world.rank else share

    patch.setattr(order, "share_of", share_of)


def turned_around(patch: Any) -> None:
    real = order.share_of
    patch.setattr(order, "share_of", lambda *a: (lambda s: replace(s, indices=s.indices.flip(0)))(real(*a)))


def draws_of_their_own(patch: Any) -> None:
    def uniform(self: Any, name: str, shape: Any, device: Any) -> Any:
        generator = torch.Generator().manual_seed(1 + collectives.own_rank())
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    patch.setattr(keyed.KeyedDraws, "_uniform", uniform)


def starts_of_their_own(patch: Any) -> None:
    real = loop.apply

    def apply(model: nn.Module, plan: Any, world: Any, **more: Any) -> Any:
        applied = real(model, plan, world, **more)
        for p in model.parameters():
            p.data.mul_(1 + world.rank)
        return applied

    patch.setattr(loop, "apply", apply)


def nothing_is_sent(patch: Any) -> None:
    patch.setattr(zero1, "_buckets", lambda parameters: [])


def batch_norms_alone(patch: Any) -> None:
    patch.setattr(applying, "join_batch_norms", lambda *arguments: [])


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
        after_begun(optimizer_of_copies), "plain", "optimizer state", "0", "optimizer bound to old parameters"
    ),
    "the optimizer lacks one": Planted(
        after_begun(optimizer_lacks_one), "plain", "optimizer state", "2", "optimizer bound to old parameters"
    ),
    "the scheduler ticks twice": Planted(after_update(tick_again), "plain", "scheduler", "", "scheduler ticks twice"),
    "parameters are kept in bfloat16": Planted(
        after_update(round_parameters), "plain", "parameters", "0", "master weights"
    ),
    "the optimizer's state alone": Planted(
        after_update(halve_moments), "plain", "optimizer state", "0", "optimizer step"
    ),
    "a buffer on one side": Planted(after_update(count_again), "counting", "buffers", "", "buffer"),
    "a buffer that ranks differ in": Planted(after_update(count_by_rank), "counting", "buffers", "", "buffer"),
    "clipped to another norm": Planted(clipped_wider, "plain", "clipped gradients", "", "clip norm"),
    "a padded sample is evaluated": Planted(
        stand_ins_are_shared_out, "plain", "evaluation", "", "padded or repeated sample", 3
    ),
    "a stand-in weighs in a metric": Planted(
        stand_ins_weigh, "plain", "evaluation", "", "padded or repeated sample", 3
    ),
    "a sample is trained on twice": Planted(repeated_rows, "plain", "sample order", "", "padded or repeated sample"),
    "another order": Planted(turned_around, "plain", "sample order", "", "data order"),
    "a tied weight comes apart": Planted(after_begun(untied), "tied", "tied weights", "left", "tied weight"),
    "a weight is tied to another": Planted(after_begun(tied_to_another), "plain", "tied weights", "0", "tied weight"),
    "a gradient is too large": Planted(after_begun(one_gradient_larger), "plain", "gradients", "2", "backward"),
    "a module is sharper": Planted(after_begun(sharper), "plain", "module outputs", "1", "module"),
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
