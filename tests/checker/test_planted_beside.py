"""Bugs beside those that rules of causes were made from: a rule must hold for its neighbours, and not for others.

Written down before the first run, as in test_planted_by_others.py. `check` says the same of each family, or rightly
something else where the likeness is outward only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.data.order import BatchSlice
from meshwise.transfer import collectives
from tests.checker.jobs_to_check import checked
from tests.checker.seams import (
    Training,
    after_backward,
    after_microbatch,
    after_update,
    around,
    around_measuring,
    at_start,
    before_division,
    before_update,
    loss_changed,
    mean_of_rank_means,
    metrics_changed,
    replaced,
)
from tests.checker.test_planted_by_others import (
    DATA,
    GRADIENTS,
    SHARD,
    Bug,
    every_rank_reads_the_same,
    once_sharded,
    other_masks_the_second_time,
    padding_counts_in_evaluation,
    said_as_a_person_would,
)
from tests.pool import CaseFailed

PADDED = "padded or repeated sample"


def last_sample_dropped(patch: Any) -> None:
    """`drop_last`: a batch that ranks do not share evenly loses its rest."""

    def batch_slice(real: Any, samples: Tensor, start: int, stop: int, total: int, world: World) -> BatchSlice:
        even = (stop - start) // world.size * world.size
        share: BatchSlice = real(samples, start, start + even, even, world)
        return share

    around(patch, "slice of a rank", batch_slice)


def all_ranks_read_all(patch: Any) -> None:
    """Gradients are right all the same."""
    replaced(patch, "slice of a rank", lambda o, a, b, total, world: BatchSlice(o[a:b], b - a, total * world.size))


def one_sample_on_both_ranks(patch: Any) -> None:
    def batch_slice(real: Any, samples: Tensor, start: int, stop: int, total: int, world: World) -> BatchSlice:
        share: BatchSlice = real(samples, start, stop, total, world)
        if world.rank:
            return share
        last = int((samples == share.indices[-1]).nonzero()) + 1
        return replace(share, indices=torch.cat([share.indices, samples[last : last + 1]]), samples=share.samples + 1)

    around(patch, "slice of a rank", batch_slice)


def ranks_change_places(patch: Any) -> None:
    def batch_slice(real: Any, *given: Any) -> Any:
        world = given[-1]
        return real(*given[:-1], World(world.size - 1 - world.rank, world.size))

    around(patch, "slice of a rank", batch_slice)


# --- one rank alone


def on_rank_1(when: int, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Change the training of rank 1 after the step `when`."""

    def changed(training: Training) -> None:
        if training.step == when and training.rank == 1:
            change(training)

    return lambda patch: after_update(patch, changed)


def first_group(training: Any) -> dict[str, Any]:
    group: dict[str, Any] = training.optimizer.param_groups[0]
    return group


def rank_1_clips_wider(patch: Any) -> None:
    around(patch, "clipping", lambda real, ps, norm: real(ps, norm * (1 + collectives.get_rank())))


def untied_on_rank_1(patch: Any) -> None:
    def change(model: Any) -> None:
        if collectives.get_rank() == 1:
            model.right.weight = nn.Parameter(model.left.weight.detach().clone())

    before_division(patch, change)


def another_activation_on_rank_1(patch: Any) -> None:
    def change(model: Any) -> None:
        if collectives.get_rank() == 1:
            model[1] = nn.Hardtanh()

    before_division(patch, change)


def metrics_of_rank_1_are_moved(patch: Any) -> None:
    def over_ranks(real: Any, engine: Any, sums: Any) -> dict[str, float]:
        return {name: value + 1e-6 * collectives.get_rank() for name, value in real(engine, sums).items()}

    around(patch, "metrics over ranks", over_ranks)


# --- evaluation


def measured(change: Callable[[Any, BatchSlice], Any]) -> Callable[[Any], None]:
    """Change the metrics of a batch: `change(metrics, slice)`."""
    return lambda patch: metrics_changed(patch, change)


def last_batch_is_not_counted(measured: Any, share: BatchSlice) -> Any:
    return {n: (mean, weight * (share.total == 8)) for n, (mean, weight) in measured.items()}


def ranks_add_means_up(measured: Any, share: BatchSlice) -> Any:
    return {n: (mean * collectives.world_size(), weight) for n, (mean, weight) in measured.items()}


def average_of_rank_averages(patch: Any) -> None:
    def over_ranks(engine: Any, sums: Any) -> dict[str, float]:
        table = torch.stack([total / weight for total, weight in sums.values()])
        collectives.all_reduce(table)
        return {name: float(value) / 2 for name, value in zip(sums, table, strict=True)}

    replaced(patch, "metrics over ranks", over_ranks)


def batch_norms_stay_in_training(patch: Any) -> None:
    patch.setattr(nn.BatchNorm1d, "train", lambda self, mode=True: self)


def evaluated_with_old_parameters(patch: Any) -> None:
    def forget(model: Any) -> Callable[[], None]:
        last = model[4].bias
        kept = last.detach().clone()
        last.detach().zero_()
        return lambda: last.detach().copy_(kept)

    around_measuring(patch, forget)


# --- gradients that are lacking


def weight_is_frozen(patch: Any) -> None:
    before_division(patch, lambda model: model.net[2].weight.requires_grad_(False))


def first_layer_is_frozen(patch: Any) -> None:
    before_division(patch, lambda model: model.net[0].requires_grad_(False))


def tower_is_cut(patch: Any) -> None:
    """What one tower gives to its last layer has no graph."""

    def change(model: Any) -> None:
        last = model.things.layers[len(model.things.layers) - 1]
        last.register_forward_pre_hook(lambda module, inputs: tuple(t.detach() for t in inputs))

    before_division(patch, change)


def block_is_never_reduced(patch: Any) -> None:
    """`set_requires_gradient_sync(False)` is left on for one block."""
    kept: list[Any] = []
    once_sharded(patch, lambda model: kept.append(model.users.layers[1]))

    def sync(real: Any, self: Any, needed: bool, **more: Any) -> None:
        real(self, needed, **more)
        for block in kept:
            real(block, False)

    around(patch, "gradients of shards are reduced", sync)


def lost_on_rank_1(named: Any) -> None:
    if collectives.get_rank() == 1:
        named["net.2.weight"].grad = None


def zero_instead(named: Any) -> None:
    named["net.2.weight"].grad.zero_()


def reduced_in_half(named: Any) -> None:
    """Not by a cast of torch: those become float64 in a backward."""
    for p in named.values():
        values = p.grad.numpy()
        values[...] = values.astype(np.float16)


def noise_is_added(named: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in named.values():
        p.grad.mul_(1 + 1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


# --- factors and microbatches


def loss_times(factor: Callable[[int, int], float]) -> Callable[[Any], None]:
    """Multiply the loss of a microbatch by `factor(number, of how many)`."""

    def plant(patch: Any) -> None:
        number = [0]

        def scaled(loss: Tensor, last: bool) -> Tensor:
            result = loss * factor(number[0], last)
            number[0] = 0 if last else number[0] + 1
            return result

        loss_changed(patch, scaled)

    return plant


def between(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Change the gradients behind each microbatch but the last."""

    def changed(training: Training, last: bool) -> None:
        if not last:
            change(training.model)

    return lambda patch: after_microbatch(patch, changed)


def block_is_summed(patch: Any) -> None:
    once_sharded(patch, lambda model: model.things.layers[0].set_gradient_divide_factor(1.0))


# --- recomputed blocks


def second_input_is_moved(patch: Any) -> None:
    """What a block runs again with is not what it ran with at first."""

    def moved(run: Any, *tensors: Tensor, **more: Any) -> Any:
        calls = [0]

        def twice(*given: Tensor) -> Any:
            calls[0] += 1
            return run(*[t + 1e-4 * (calls[0] > 1) for t in given])

        return checkpoint(twice, *tensors, **more)

    replaced(patch, "checkpoint", moved)


def attention_gives_another_gradient(patch: Any) -> None:
    def change(model: Any) -> None:
        model.attend.linear1.weight.register_hook(lambda gradient: gradient * 1.5)

    before_division(patch, change)


# --- precision


def rounded(dtype: torch.dtype, what: str) -> Callable[[Any], None]:
    def round_down(training: Training) -> None:
        with torch.no_grad():
            for p in training.model.parameters():
                value = p if what == "parameters" else training.optimizer.state[p][what]
                value.copy_(value.to(dtype))

    return lambda patch: after_update(patch, round_down)


def parameters_are_moved(patch: Any) -> None:
    def move(training: Training) -> None:
        with torch.no_grad():
            for p in training.model.parameters():
                p.mul_(1.0001)

    after_update(patch, move)


# --- learning rates


def ticks_before_the_step(patch: Any) -> None:
    def tick(training: Training) -> None:
        training.scheduler.step()
        does_not_tick(training)

    before_update(patch, tick)
    after_update(patch, ticks_again)


def does_not_tick(training: Training) -> None:
    training.scheduler.step = lambda: None


def ticks_again(training: Training) -> None:
    del training.scheduler.step


def never_ticks(patch: Any) -> None:
    before_update(patch, does_not_tick)
    after_update(patch, ticks_again)


def rate(change: Callable[[float, int], float]) -> Callable[[Any], None]:
    def changed(model: Any, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = change(group["lr"], collectives.world_size())

    return lambda patch: at_start(patch, before=changed)


def ticks_each_microbatch_of_three(patch: Any) -> None:
    after_microbatch(patch, lambda training, last: training.scheduler.step())


TWICE, THRICE = Plan(data=2, accumulate=2), Plan(data=2, accumulate=3)
STATE, RATE, CLIPPED = "optimizer state", "learning rate", "clipped gradients"
RATES = ("scheduler", "scheduler ticks twice")


def bug(name: str, plant: Any, job: str, plan: Plan, kind: Any, cause: Any, module: Any = None) -> Bug:
    def planted(patch: Any) -> None:
        plant(patch)

    planted.__name__ = name
    return Bug(planted, job, plan, kind, module, cause, slow=True)


ORDER, EVALUATED = "sample order", "evaluation"
BUGS = [
    bug("last_sample_dropped", last_sample_dropped, "plain", Plan(data=3), ORDER, PADDED),
    bug("all_ranks_read_all", all_ranks_read_all, "normed", DATA, ORDER, PADDED),
    bug("all_ranks_read_all_with_dropout", all_ranks_read_all, "dropped", DATA, ORDER, PADDED),
    bug("one_sample_on_both_ranks", one_sample_on_both_ranks, "normed", DATA, ORDER, PADDED),
    bug("ranks_change_places", ranks_change_places, "plain", DATA, ORDER, "data order"),
    bug("the_same_with_dropout", every_rank_reads_the_same, "dropped", DATA, ORDER, PADDED),
    bug("the_same_in_shards", every_rank_reads_the_same, "two-tower", Plan(shard=2, accumulate=2), ORDER, PADDED),
    bug("the_same_of_unequal_lengths", every_rank_reads_the_same, "gpt", DATA, ORDER, PADDED),
    # one rank alone
    bug("rate_of_rank_1", on_rank_1(1, lambda run: first_group(run).update(lr=0.1)), "counting", DATA, RATE,
        RATE),
    bug("ticks_on_rank_1", on_rank_1(3, lambda run: run.scheduler.step()), "plain", DATA, "scheduler", RATES),
    bug("rank_1_clips_wider", rank_1_clips_wider, "plain", DATA, CLIPPED, "clip norm"),
    bug("untied_on_rank_1", untied_on_rank_1, "tied", DATA, "tied weights", "tied weight", ("left", "right")),
    bug("another_activation_on_rank_1", another_activation_on_rank_1, "plain", DATA, "modules", "module", "1"),
    bug("state_lost_on_rank_1", on_rank_1(3, lambda run: run.optimizer.state.clear()), "counting", DATA, STATE,
        ("optimizer step", "optimizer bound to old parameters")),
    bug("metrics_of_rank_1_are_moved", metrics_of_rank_1_are_moved, "plain", DATA, EVALUATED, "evaluation"),
    # evaluation
    bug("last_batch_is_not_counted", measured(last_batch_is_not_counted), "plain", DATA, EVALUATED, "evaluation"),
    bug("ranks_add_means_up", measured(ranks_add_means_up), "plain", DATA, EVALUATED, "evaluation"),
    bug("average_of_rank_averages", average_of_rank_averages, "plain", DATA, EVALUATED, "evaluation"),
    bug("padding_of_three", padding_counts_in_evaluation, "plain", Plan(data=3), EVALUATED, "evaluation"),
    bug("evaluated_with_old_parameters", evaluated_with_old_parameters, "plain", DATA, EVALUATED, "evaluation"),
    # lacking, wrong in one place
    bug("weight_is_frozen", weight_is_frozen, "counting", DATA, GRADIENTS, "backward", "net.2"),
    bug("first_layer_is_frozen", first_layer_is_frozen, "counting", SHARD, GRADIENTS, "backward", "net.0"),
    bug("tower_is_cut", tower_is_cut, "two-tower", SHARD, GRADIENTS, "backward", "things.layers"),
    bug("block_is_never_reduced", block_is_never_reduced, "two-tower", SHARD, GRADIENTS, "missing reduction",
        "users.layers.1"),
    bug("lost_on_rank_1", after_backward(lost_on_rank_1), "counting", DATA, GRADIENTS, "missing reduction", "net.2"),
    bug("zero_instead", after_backward(zero_instead), "counting", DATA, GRADIENTS, "backward", "net.2"),
    bug("noise_is_added", after_backward(noise_is_added), "counting", Plan(data=4), GRADIENTS, "backward"),
    bug("reduced_in_half", after_backward(reduced_in_half), "counting", DATA, GRADIENTS, "lower precision"),
    # factors and microbatches
    bug("loss_times_1_7", loss_times(lambda k, last: 1.7), "counting", DATA, GRADIENTS, "loss weighting"),
    bug("microbatches_are_summed", loss_times(lambda k, last: 3.0), "counting", THRICE, GRADIENTS, "loss weighting"),
    bug("first_alone", loss_times(lambda k, last: float(k == 0)), "counting", TWICE, GRADIENTS, "missing reduction"),
    bug("first_twice", loss_times(lambda k, last: 2.0 - (k > 0)), "plain", TWICE, GRADIENTS, "loss weighting"),
    bug("half_of_the_first", loss_times(lambda k, last: 0.5 + k / 2), "counting", TWICE, GRADIENTS, "loss weighting"),
    bug("thrown_away", between(lambda model: model.zero_grad(set_to_none=False)), "counting", TWICE, GRADIENTS,
        "missing reduction"),
    bug("clipped_by_value", between(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)), "counting",
        THRICE, GRADIENTS, "clip norm"),
    bug("clipped_each_of_three", between(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)), "counting",
        THRICE, GRADIENTS, "clip norm"),
    bug("block_is_summed", block_is_summed, "two-tower", SHARD, GRADIENTS, "doubled reduction", "things.layers.0"),
    # recomputed
    bug("other_masks_in_shards", other_masks_the_second_time, "dropped", Plan(shard=2, recompute=("attend",)),
        GRADIENTS, "dropout masks", "attend"),
    bug("other_masks_of_an_lstm", other_masks_the_second_time, "dropped", Plan(data=2, recompute=("read",)),
        GRADIENTS, "dropout masks", "read"),
    bug("second_input_is_moved", second_input_is_moved, "two-tower", Plan(data=2, recompute=("users.layers.1",)),
        GRADIENTS, "backward", "users.layers.1"),
    bug("second_input_of_dropout", second_input_is_moved, "dropped", Plan(data=2, recompute=("attend",)),
        GRADIENTS, "backward", "attend"),
    bug("other_masks_everywhere", other_masks_the_second_time, "dropped", Plan(data=2, accumulate=2, recompute="full"),
        GRADIENTS, "dropout masks"),
    bug("attention_gives_another", attention_gives_another_gradient, "dropped", DATA, GRADIENTS, "backward", "attend"),
    bug("weights_of_ranks_recomputed", mean_of_rank_means, "weighed", Plan(data=2, recompute="full"), GRADIENTS,
        "loss weighting"),
    # precision
    bug("weights_in_half", rounded(torch.float16, "parameters"), "counting", DATA, "parameters", "master weights"),
    bug("weights_in_float32", rounded(torch.float32, "parameters"), "counting", DATA, "parameters", "master weights"),
    bug("moments_in_bfloat16", rounded(torch.bfloat16, "exp_avg"), "counting", DATA, STATE, "master weights"),
    bug("parameters_are_moved", parameters_are_moved, "counting", DATA, "parameters", "optimizer step"),
    # learning rates
    bug("ticks_before_the_step", ticks_before_the_step, "plain", DATA, RATE, RATES),
    bug("never_ticks", never_ticks, "plain", DATA, ("scheduler", RATE), "scheduler"),
    bug("rate_over_ranks", rate(lambda lr, size: lr / size), "counting", DATA, RATE, "learning rate times devices"),
    bug("rate_of_the_default", rate(lambda lr, size: 0.001), "counting", DATA, RATE, "learning rate"),
    bug("ticks_each_of_three", ticks_each_microbatch_of_three, "plain", THRICE, RATE, "scheduler ticks twice"),
]  # fmt: skip


def cases() -> list[Any]:
    ordered = sorted(BUGS, key=lambda bug: (bug.job, bug.plan.devices))  # one device runs once for all of a job
    return [pytest.param(bug, id=bug.plant.__name__) for bug in ordered]


@pytest.mark.slow  # `make test` has the bugs of test_planted.py
@pytest.mark.parametrize("bug", cases())
def test_its_neighbours_are_said_as_rightly(bug: Bug, pool: Any) -> None:
    said_as_a_person_would(bug, pool)


@pytest.mark.slow
def test_batch_norms_that_stay_in_training_end_the_check_at_one_row(pool: Any) -> None:
    """The last batch of an evaluation has one row, whose statistics torch refuses."""
    with pytest.raises(CaseFailed, match="Expected more than 1 value per channel when training"):
        checked(pool, "normed", DATA, plant=batch_norms_stay_in_training)
