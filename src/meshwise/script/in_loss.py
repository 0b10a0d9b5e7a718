"""Sum over ranks inside a loss: `mw.sum(value, grad=True)`.

A ratio of sums, a norm or a correlation needs such sums. `mw.mean` works, too.

Each rank's loss then depends on sums over the whole batch, and is the same on all ranks. In the backward, the gradients
of such a sum are summed over the ranks, as each rank's part of it is in the losses of all; `mw.backward` weighs ranks
as usual, so other terms of the loss are right as well. The sum is on the rank's device, even if a rank without items
gave a zero on the host: else its collectives would differ from those of other ranks.

Tested in tests/script/test_in_loss.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from meshwise.engine.engine import Engine
from meshwise.engine.weighing import as_weight
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.splits.crossing import gather, through
from meshwise.timeline.recorder import current
from meshwise.transfer import collectives

REFUSED = (
    "{place}: {verb}(…, grad=True) does not work with {what}: it needs the whole batch, but the backward of the first "
    "microbatch begins before the forward of the last microbatch. Use a plan without pipeline and accumulate, or a "
    "loss that is a mean over samples."
)

NOT_OURS = (
    "torch.autograd.grad or loss.backward() would return {ranks} times the gradient that {verb}(…, grad=True) has on "
    "one device. Call mw.backward instead, and compute what needs this gradient from the .grad that mw.backward leaves."
)


def sum_in_loss(engine: Engine, value: Tensor) -> Tensor:
    """Return the sum of `value` over the ranks, with its gradient. Collective, and so is the backward."""
    part = _begin(engine, "mw.sum", value)
    if part is None:
        return value
    here = value.to(engine.world.device)
    wide = _attached(here.to(torch.promote_types(value.dtype, torch.float32)) if _is_float(value) else here)
    total = _added(wide if part.samples else torch.where(torch.zeros_like(wide, dtype=torch.bool), wide, 0), "mw.sum")
    return total.to(value.dtype)


def mean_in_loss(engine: Engine, value: Tensor, weight: Tensor | float | None) -> Tensor:
    """Return the mean of `value` over the ranks, for use in a loss: gradients flow back through the mean to `value`.

    The call is collective, and so is its backward.

    weight: how many items this rank's `value` is a mean over. By default, the number of its samples."""
    part = _begin(engine, "mw.mean", value)
    if part is None:
        return value
    here = value.to(engine.world.device)
    known = as_weight((part.samples if weight is None else weight) if part.samples else 0, here)
    wide = _attached(here).to(known.dtype).reshape(-1)
    counted = torch.where(known != 0, wide, 0) * known
    sums = _added(torch.cat([counted, known.reshape(1)]), "mw.mean")
    return (sums[:-1] / sums[-1]).view(value.shape).to(value.dtype)


def _begin(engine: Engine, verb: str, value: Any) -> Any:
    """Check a call of `mw.sum` or `mw.mean` with grad=True, and return the slice of the batch that this rank processes.
    Return None if every rank processes the whole batch. Raise UsageError if the call does not work here.

    verb: the name of the called function, for error messages."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{user_place()}: {verb}(…, grad=True) needs a tensor, but got a {type(value).__name__}.")
    plan, part = engine.plan, engine.part
    sizes = {"pipeline": plan.pipeline, "accumulate": plan.accumulate}
    if what := ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1):
        raise UsageError(REFUSED.format(place=user_place(), verb=verb, what=what))
    engine.program.joined_at, engine.program.coupled_gradients = engine.program.backwards, True
    if engine.world.size == 1:
        return None
    if part is None or engine.reads.ended is not None:
        raise UsageError(
            f"{user_place()}: {verb}(…, grad=True) works only in a loss, inside the loop over the loader and "
            f"before mw.backward. For a value that is no part of a loss, call {verb} without grad=True."
        )
    if part.whole:
        return None
    engine.reads.check_one_share(verb, weighed=verb == "mw.sum")
    return part


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _attached(value: Tensor) -> Tensor:
    """Return `value` so that it has an autograd graph. A rank without items may have only a constant, such as 0, in its
    loss. It needs a graph all the same, because the backward is collective, and every rank must take part."""
    whole = gather(value)
    if whole.requires_grad or not _is_float(whole) or not torch.is_grad_enabled():
        return whole
    return whole.detach().clone().requires_grad_()


def _added(value: Tensor, of: str) -> Tensor:
    return through(_Added, value, of)


class _Added(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, of: str) -> Tensor:
        ctx.of = of
        return collectives.all_reduce(value.clone(memory_format=torch.contiguous_format), of=of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if current().phase != "backward":  # of this rank's loss alone: the sum would be of all ranks' losses
            raise UsageError(NOT_OURS.format(verb=ctx.of, ranks=collectives.world_size()))
        return _added(gradient, ctx.of), None
