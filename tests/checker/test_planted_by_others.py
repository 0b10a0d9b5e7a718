"""Bugs that were planted by somebody who has not read how `check` works, each as it happens in code for several GPUs.

Kind, module and cause are what a person would say; they were written down before the first run. Two were wrong and are
mended: the kind of `norm_of_own_shard`, and the cause of `learning_rate_times_ranks`. In the first run two were not
found, two made `check` fail, and eleven had another cause than is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.data.order import BatchSlice
from meshwise.transfer import collectives
from tests.checker.jobs_to_check import checked
from tests.checker.seams import (
    after_microbatch,
    after_update,
    around,
    around_measuring,
    at_start,
    before_division,
    measured_slices_changed,
    metrics_changed,
    replaced,
)

# --- data parallel


def last_microbatch_stays_local(patch: Any) -> None:
    """`no_sync` around the last microbatch instead of those before it."""

    def backward(real: Any, self: Any, loss: Tensor, *, reduce: bool, **more: Any) -> Any:
        return real(self, loss, reduce=not reduce, **more)

    around(patch, "backward of replicas", backward)


def every_rank_reads_the_same(patch: Any) -> None:
    """No distributed sampler."""
    around(patch, "slice of a rank", lambda real, *given: real(*given[:-1], World(0, given[-1].size)))


def padded_to_equal_shares(patch: Any) -> None:
    """As DistributedSampler does: a short share is filled up with the first sample, which counts twice."""

    def batch_slice(samples: Tensor, start: int, stop: int, total: int, world: World) -> BatchSlice:
        each = -(-(stop - start) // world.size)
        padded = torch.cat([samples[start:stop], samples[start : start + each * world.size - (stop - start)]])
        return BatchSlice(padded[world.rank * each : (world.rank + 1) * each], each, each * world.size)

    replaced(patch, "slice of a rank", batch_slice)


def one_sample_for_another(patch: Any) -> None:
    """The first sample of a batch is read again in the place of its last."""

    def batch_slice(real: Any, samples: Tensor, start: int, stop: int, *rest: Any) -> BatchSlice:
        repeated = samples.clone()
        repeated[stop - 1] = samples[start]
        share: BatchSlice = real(repeated, start, stop, *rest)
        return share

    around(patch, "slice of a rank", batch_slice)


def order_moved_by_one(patch: Any) -> None:
    """Batches are counted from the second sample."""
    around(patch, "slice of a rank", lambda real, samples, *rest: real(samples.roll(-1), *rest))


# --- shard


def once_sharded(patch: Any, change: Callable[[Any], None]) -> None:
    """Change the model right after it was sharded."""

    def init(real: Any, self: Any, setup: Any) -> None:
        real(self, setup)
        change(setup.model)

    around(patch, "shards are made", init)


def block_not_added_over_replicas(patch: Any) -> None:
    """One block of data x shard is reduced within its replica alone."""
    block: list[Any] = []
    once_sharded(patch, lambda model: block.append(model.things.layers[1]))

    def foreach_reduce(real: Any, parts: Any, gradients: Any, *rest: Any) -> Any:
        given = list(rest)
        if parts[0]._module_info.module is block[0]:
            given[7] = None  # the group of the all-reduce
        return real(parts, gradients, *given)

    around(patch, "reduce of shards", foreach_reduce)


def block_divided_twice(patch: Any) -> None:
    """The divide factor of one block is set to shard x shard."""
    once_sharded(patch, lambda model: model.users.layers[0].set_gradient_divide_factor(4.0))


def parameter_left_out_of_the_shards(patch: Any) -> None:
    """`ignored_params` for one that is trained: it stays whole, and nobody reduces it."""

    def fully_shard(real: Any, module: nn.Module, **more: Any) -> Any:
        left_out = {*(more.pop("ignored_params", None) or ()), module.get_parameter("net.2.weight")}
        return real(module, ignored_params=left_out, **more)

    around(patch, "fully_shard", fully_shard)


def block_stays_gathered(patch: Any) -> None:
    """`set_reshard_after_backward(False)` is left on: the next forward takes the weights from before the step."""
    replaced(patch, "guard of steps", lambda *arguments: True)  # which refuses the step: the check finds it too
    replaced(patch, "guard of gathered weights", lambda *arguments, **more: None)
    once_sharded(patch, lambda model: model.users.layers[1].set_reshard_after_backward(False, recurse=False))


def gathered_in_the_wrong_order(patch: Any) -> None:
    """The parts of one block are right on each rank, and are put together in another order of ranks."""
    block: list[Any] = []
    replaced(patch, "guard of gathered weights", lambda *arguments, **more: None)
    once_sharded(patch, lambda model: block.append(model.things.layers[0]))

    def copy_out(real: Any, result: Any, parts: Any, group: Any) -> None:
        real(result, parts, group)
        for part in parts if parts[0]._module_info.module is block[0] else ():
            for gathered in part.all_gather_outputs:
                of_rank = gathered.data.view(group.size(), -1)
                of_rank.copy_(of_rank.flip(0).clone())

    around(patch, "gather of shards", copy_out)


def moments_of_the_other_shard(patch: Any) -> None:
    """After the last step rank 1 holds the moments of other rows than those of its weights."""

    def roll(training: Any) -> None:
        if training.step == 3 and training.rank == 1:
            moments = training.optimizer.state[training.model.net[0].weight]["exp_avg"].to_local()
            moments.copy_(moments.roll(1, 0))

    after_update(patch, roll)


def shards_of_each_other(patch: Any) -> None:
    """Each rank loads the other's part of one parameter."""

    def load(model: Any, optimizer: Any) -> None:
        part = model.net[2].weight.to_local()
        with torch.no_grad():
            part.copy_(collectives.all_gather(part.detach().contiguous())[1 - collectives.get_rank()])

    at_start(patch, before=load)


# --- zero1


def not_sent(patch: Any, shape: tuple[int, ...]) -> None:
    """The owner steps the parameter of this shape, and the others keep the old one."""
    around(patch, "buckets of zero1", lambda real, held, *most: real([p for p in held if p.shape != shape], *most))


def not_sent_by_rank_1(patch: Any) -> None:
    not_sent(patch, (8, 6))


def moments_of_each_other(patch: Any) -> None:
    """After the last step the first moments of two parameters of one shape change places."""

    def after(real: Any, self: Any, optimizer: Any, *rest: Any) -> None:
        real(self, optimizer, *rest)
        square = [entry for p, entry in optimizer.state.items() if p.shape == (66, 66)]
        if square[0]["step"] == 3:
            square[0]["exp_avg"], square[1]["exp_avg"] = square[1]["exp_avg"], square[0]["exp_avg"]

    around(patch, "step of zero1 is over", after)


def sent_in_bfloat16(patch: Any) -> None:
    """Owners send what they stepped in bfloat16; it is what the others go on with."""

    def broadcast(flat: Tensor, owner: int, **of: Any) -> Tensor:
        return collectives.broadcast(flat.copy_(flat.bfloat16()), owner)

    replaced(patch, "collectives of zero1", SimpleNamespace(broadcast=broadcast))


# --- recompute and offload


def other_masks_the_second_time(patch: Any) -> None:
    """The second run of a block draws anew."""
    replaced(patch, "checkpoint", functools.partial(checkpoint, preserve_rng_state=False))


def statistics_moved_by_both_runs(patch: Any) -> None:
    """The second run of a batch norm moves its running statistics again, which it does when it runs to its end."""
    replaced(patch, "checkpoint", functools.partial(checkpoint, early_stop=False))
    around(patch, "second run of a block", lambda real, kind, inner, written: real(kind, inner, []))


def input_detached(patch: Any) -> None:
    """A block that runs again gets an input without its graph, and what lies before it no gradient."""

    def cut(run: Any, *tensors: Tensor, **more: Any) -> Any:
        return checkpoint(run, *[t.detach() for t in tensors], **more)

    replaced(patch, "checkpoint", cut)


def buffer_written_too_early(patch: Any) -> None:
    """A host buffer is used for the next tensor of its shape while it still waits to be read."""
    held: list[Any] = [None]

    def send(real: Any, tensor: Tensor, number: int) -> Any:
        waiting = real(tensor, number)
        if number == 2:
            held[0] = waiting  # the input of the second layer of the first tower
        if number == 3:
            held[0].copy = waiting.copy
        return waiting

    around(patch, "sending to the host", send)


# --- batch norm


def biased_running_variance(patch: Any) -> None:
    around(
        patch, "running statistics", lambda real, to, mean, var, count, rate: real(to, mean, var, count * 1e18, rate)
    )


def padding_counts_in_statistics(patch: Any) -> None:
    """A rank without samples repeats one, and the batch norm counts it."""
    around(patch, "batch norms are joined", lambda real, model, samples: real(model))


def backward_of_statistics_is_local(patch: Any) -> None:
    """The backward of a batch norm over all ranks uses the sums of its own samples."""
    alone = SimpleNamespace(all_gather=collectives.all_gather, all_reduce=lambda tensor, **of: tensor)
    replaced(patch, "collectives of batch norms", alone)


def buffer_of_rank_1(patch: Any) -> None:
    """A buffer is not sent to the other ranks: one of them has counted on its own. Nothing is computed from it."""

    def count(model: Any, inputs: Any) -> None:
        if model.training and collectives.get_rank() == 1:
            model.seen.add_(1)

    before_division(patch, lambda model: model.register_forward_pre_hook(count))


# --- weights of losses


def microbatches_weigh_alike(patch: Any) -> None:
    """The loss is divided by the number of microbatches, of which the last is smaller."""

    def batch_slice(real: Any, samples: Tensor, start: int, stop: int, *rest: Any) -> BatchSlice:
        return replace(real(samples, start, stop, *rest), total=3 * (stop - start))

    around(patch, "slice of a rank", batch_slice)


# --- clipping, optimizer, scheduler


def norm_of_own_shard(patch: Any) -> None:
    """Each rank clips by the norm of the parts that it holds."""
    around(patch, "norm that clipping takes", lambda real, grads, *rest: real([g.to_local() for g in grads], *rest))


def no_weight_decay(patch: Any) -> None:
    """Groups are lost when the optimizer is bound: its default for weight decay is."""

    def lose(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.0

    at_start(patch, before=lose)


def learning_rate_times_ranks(patch: Any) -> None:
    """The rule of linear scaling, although the batch is the same."""

    def scale(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= collectives.world_size()

    at_start(patch, before=scale)


def ticks_each_microbatch(patch: Any) -> None:
    after_microbatch(patch, lambda training, last: None if last else training.scheduler.step())


def ticks_after_the_last_step(patch: Any) -> None:
    """One tick too many when all steps are done: no parameter knows of it."""
    after_update(patch, lambda training: training.scheduler.step() if training.step == 3 else None)


def moments_of_rank_1(patch: Any) -> None:
    """After the last step a replica's optimizer has other state than the first one's, whose state is saved."""

    def double(training: Any) -> None:
        if training.step == 3 and training.rank == 1:
            training.optimizer.state[training.model.net[0].weight]["exp_avg"].mul_(2)

    after_update(patch, double)


# --- evaluation: the training is right


def average_of_batch_averages(patch: Any) -> None:
    metrics_changed(patch, lambda metrics, share: {n: (mean, (w > 0).to(w)) for n, (mean, w) in metrics.items()})


def padding_counts_in_evaluation(patch: Any) -> None:
    """The sample that fills up the last batch is counted."""
    measured_slices_changed(patch, lambda share: replace(share, samples=max(share.samples, 1)))


def ranks_evaluate_apart(patch: Any) -> None:
    """Only rank 0 gets the metrics of all; the other goes by its own, and may stop or keep another model."""

    def over_ranks(real: Any, engine: Any, sums: Any) -> dict[str, float]:
        result: dict[str, float] = real(engine, sums)
        own = {name: float(total / weight) for name, (total, weight) in sums.items()}
        return own if collectives.get_rank() == 1 else result

    around(patch, "metrics over ranks", over_ranks)


def dropout_in_the_evaluation(patch: Any) -> None:
    """`model.eval()` does not reach what drops."""
    patch.setattr(nn.Module, "eval", lambda self: self)


def evaluated_with_the_first_buffers(patch: Any) -> None:
    """The copy that is evaluated got the parameters of the training, and not its running statistics."""

    def forget(model: Any) -> Callable[[], None]:
        kept = [(b, b.clone()) for b in model[1].buffers()]
        model[1].reset_running_stats()
        return lambda: [buffer.copy_(value) for buffer, value in kept]

    around_measuring(patch, forget)


# --- tied weights


def tied_gradient_of_one_place(patch: Any) -> None:
    """Of the two places where a weight is used, one adds nothing to its gradient."""

    def change(model: Any) -> None:
        model.right.forward = lambda x: F.linear(x, model.right.weight.detach())

    before_division(patch, change)


def untied_and_kept_alike(patch: Any) -> None:
    """The tie is gone; both copies get the sum of their gradients and stay equal. Only memory and norms know of it."""

    def change(model: Any) -> None:
        model.right.weight = nn.Parameter(model.left.weight.detach().clone())

    before_division(patch, change)

    def backward(real: Any, self: Any, loss: Tensor, **more: Any) -> Any:
        value, named = real(self, loss, **more), dict(self._named)
        both = named["left.weight"], named["right.weight"]
        total = both[0].grad + both[1].grad
        for p in both:
            p.grad.copy_(total)
        return value

    around(patch, "backward of replicas", backward)


@dataclass(frozen=True)
class Bug:
    """A plant, where, and what a person would say of it. Several words: each is fair. module None: it is everywhere."""

    plant: Callable[[Any], None]
    job: str
    plan: Plan
    kind: str | tuple[str, ...]
    module: str | tuple[str, ...] | None
    cause: str | tuple[str, ...]
    slow: bool = False


DATA, SHARD, ZERO1 = Plan(data=2), Plan(shard=2), Plan(data=2, zero1=True)
GRADIENTS, NORM_STATISTICS = "gradients", "batch-norm statistics"
ACTIVATIONS = ("activations",)

BUGS = [
    Bug(last_microbatch_stays_local, "plain", Plan(data=2, accumulate=2), GRADIENTS, None, "missing reduction"),
    Bug(every_rank_reads_the_same, "plain", DATA, "sample order", None, ("data order", "padded or repeated sample"),
        True),
    Bug(padded_to_equal_shares, "plain", Plan(data=3), "sample order", None, "padded or repeated sample", True),
    Bug(block_not_added_over_replicas, "two-tower", Plan(data=2, shard=2), GRADIENTS, "things.layers.1",
        "missing reduction", True),
    Bug(block_divided_twice, "two-tower", SHARD, GRADIENTS, "users.layers.0", "doubled reduction"),
    Bug(parameter_left_out_of_the_shards, "counting", SHARD, GRADIENTS, "net.2", "missing reduction"),
    Bug(block_stays_gathered, "two-tower", SHARD, "module outputs", "users.layers.1", "module", True),
    Bug(gathered_in_the_wrong_order, "two-tower", SHARD, "module outputs", "things.layers.0", "module", True),
    Bug(shards_of_each_other, "counting", SHARD, "initial parameters", "net.2", "start values"),
    Bug(not_sent_by_rank_1, "counting", ZERO1, "parameters", "net.0", "optimizer step"),
    Bug(moments_of_each_other, "two-tower", ZERO1, "optimizer state", "users.layers.0", "optimizer step"),
    Bug(sent_in_bfloat16, "counting", ZERO1, "parameters", "net.0", "master weights"),
    Bug(other_masks_the_second_time, "dropped", Plan(data=2, recompute=("attend",)), GRADIENTS, "attend",
        "dropout masks", True),
    Bug(statistics_moved_by_both_runs, "normed", Plan(data=2, recompute=("1",)), "buffers", "1", NORM_STATISTICS),
    Bug(input_detached, "counting", Plan(data=2, recompute=("net.2",)), GRADIENTS, "net.0", "backward"),
    Bug(buffer_written_too_early, "two-tower", Plan(data=2, offload=ACTIVATIONS), GRADIENTS, "users.layers.1",
        "backward", True),
    Bug(biased_running_variance, "normed", DATA, "buffers", "1", NORM_STATISTICS),
    Bug(padding_counts_in_statistics, "normed", Plan(data=3, accumulate=3), "module outputs", "1", NORM_STATISTICS,
        True),
    Bug(backward_of_statistics_is_local, "normed", DATA, GRADIENTS, ("0", "1"), (NORM_STATISTICS, "backward"), True),
    Bug(microbatches_weigh_alike, "counting", Plan(data=2, accumulate=3), GRADIENTS, None, "loss weighting"),
    Bug(norm_of_own_shard, "plain", SHARD, ("gradient norm", "clipped gradients"), None, "clip norm", True),
    Bug(no_weight_decay, "counting", ZERO1, "parameters", None, "optimizer step", True),
    Bug(ticks_each_microbatch, "plain", Plan(data=2, accumulate=2), "learning rate", None, "scheduler ticks twice"),
    Bug(ticks_after_the_last_step, "plain", DATA, "scheduler", None, "scheduler ticks twice", True),
    Bug(average_of_batch_averages, "biased", SHARD, "evaluation", None, "evaluation", True),
    Bug(padding_counts_in_evaluation, "plain", DATA, "evaluation", None, "evaluation", True),
    Bug(evaluated_with_the_first_buffers, "normed", DATA, "evaluation", None, "evaluation", True),
    Bug(tied_gradient_of_one_place, "tied", SHARD, GRADIENTS, ("left", "right"), "tied weight", True),
    Bug(one_sample_for_another, "plain", DATA, "sample order", None, "padded or repeated sample"),
    Bug(order_moved_by_one, "plain", DATA, "sample order", None, "data order", True),
    Bug(buffer_of_rank_1, "counting", DATA, "buffers", None, "buffer"),
    Bug(moments_of_rank_1, "counting", DATA, "optimizer state", "net.0", "optimizer step"),
    Bug(moments_of_the_other_shard, "counting", SHARD, "optimizer state", "net.0", "optimizer step"),
    Bug(learning_rate_times_ranks, "counting", DATA, ("learning rate", "parameters"), None,
        "learning rate times devices", True),
    Bug(ranks_evaluate_apart, "plain", DATA, "evaluation", None, "evaluation", True),
    Bug(dropout_in_the_evaluation, "dropped", DATA, "evaluation", None, ("evaluation", "dropout masks"), True),
    Bug(untied_and_kept_alike, "tied", DATA, "tied weights", ("left", "right"), "tied weight"),
]  # fmt: skip


def cases() -> list[Any]:
    found = []
    ordered = sorted(BUGS, key=lambda bug: (bug.job, bug.plan.devices))  # one device runs once for all of a job
    for bug in ordered:
        found.append(pytest.param(bug, id=bug.plant.__name__))
    return found


def fair(said: str, expected: str | tuple[str, ...]) -> bool:
    return said in ((expected,) if isinstance(expected, str) else expected)


@pytest.mark.slow  # `make test` has the bugs of test_planted.py
@pytest.mark.parametrize("bug", cases())
def test_it_is_found_and_said_as_a_person_would(bug: Bug, pool: Any) -> None:
    said_as_a_person_would(bug, pool)


def said_as_a_person_would(bug: Bug, pool: Any) -> None:
    proof = checked(pool, bug.job, bug.plan, plant=bug.plant)
    assert not proof.equal
    first = proof.comparison.first
    said = f"{first.kind} of {first.name!r} in step {first.step}, module {proof.module!r}, {proof.cause.name}"
    within = (bug.module,) if isinstance(bug.module, str) else bug.module or ()
    assert fair(first.kind, bug.kind), said
    assert bug.module is None or any(f"{proof.module}.".startswith(f"{name}.") for name in within), said
    assert fair(proof.cause.name, bug.cause), said
