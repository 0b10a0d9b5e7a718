"""Models and optimizers of a loop of the user's own, laid as the plan says; and what is asked before each step.

Parameters that are sharded are new objects. An optimizer that holds the old ones is re-bound when it is given to
`mw.distribute`, whether with its model or later; one that is never given is refused at its step, since it would step
without an error and change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwise.parallel.apply import apply, bind
from meshwise.parallel.deferred import materialise
from meshwise.parallel.precision import cast_batch, computing
from meshwise.parallel.rebind import rebind
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.block_spans import record_blocks
from meshwise.training.own_state import own, say
from meshwise.transfer.sharded import shard_like
from meshwise.transfer.tree import map_tensors


def lay_models(models: list[nn.Module], plan: Plan, world: World) -> None:
    """Lay those models that are new as the plan says, in place. Collective."""
    new = [model for model in models if not any(model is known for known in own.models)]
    if not new:
        return
    own.models.extend(new)
    _watch_steps()
    if plan != Plan():
        _apply(new, plan, world)
    before = _named()
    for model in new:
        materialise(model)  # one that is deferred still: on one device
    _note_replaced(before)
    for model in new:  # afterwards: what looks on must not keep the old parameters
        record_blocks(model)
    for optimizer in own.optimizers:
        lay_optimizer(optimizer, world)


def _apply(new: list[nn.Module], plan: Plan, world: World) -> None:
    before = _named()
    again = own.applied is not None
    if again and (plan.parameters_divided or plan.offload):
        raise UsageError(
            f"mw.distribute was called a second time with a model, under {plan}. Give all models in one call."
        )
    together = own.models if again or len(new) > 1 else new[0]
    if world.size == 1:
        world = replace(world, device=_device_of(together, world.device))
    applied = apply(together, plan, world, metered=True, counts=_counts)
    for note in applied.notes:
        say(note)
    for model in new:
        _compute_in(model, plan, world.device)
    own.applied = applied
    _note_replaced(before)


def _named() -> list[tuple[str, nn.Parameter]]:
    return list(own.models.named_parameters())


def _note_replaced(before: list[tuple[str, nn.Parameter]]) -> None:
    """Keep which parameters are no longer the models', for optimizers that hold them."""
    now = {id(p) for p in own.models.parameters()}
    own.replaced.update({p: name for name, p in before if id(p) not in now})


def _counts() -> bool:
    return own.share is None or own.share.samples > 0


def _device_of(model: nn.Module, otherwise: str) -> str:
    first = next(model.parameters(), None)
    return otherwise if first is None else str(first.device)


def _compute_in(model: nn.Module, plan: Plan, device: str) -> None:
    """Let the model's own forward be computed in the plan's dtypes, and give float32 back, as the loss needs it."""
    if plan.dtypes.computed != plan.dtypes.stored:
        changed: Any = model
        changed.forward = functools.partial(_computed, model.forward, plan, device)


def _computed(forward: Callable[..., Any], plan: Plan, device: str, /, *arguments: Any, **keywords: Any) -> Any:
    with computing(device, plan.dtypes):
        result = forward(*arguments, **keywords)
    return map_tensors(_widened, result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def lay_optimizer(optimizer: Optimizer, world: World) -> None:
    """Give `optimizer` what the plan has made of the parameters that it holds."""
    if not any(optimizer is known for known in own.optimizers):
        own.optimizers.append(optimizer)
    applied = own.applied
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if id(optimizer) in own.bound:
        return
    names = {id(p): name for name, p in own.models.named_parameters()}
    if not any(p in own.replaced or id(p) in names for p in held):
        return  # its model may come later
    if any(p in own.replaced for p in held):
        names |= {id(p): own.replaced[p] for p in held if p in own.replaced}
        rebind(optimizer, names, own.models, shard_like)
    if applied is not None:
        bind(applied, optimizer, world)
        own.bound.add(id(optimizer))


@functools.cache
def _watch_steps() -> None:
    """Ask every optimizer of this process before it steps, given or not. These hooks come before an optimizer's own."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    """Gradients of one rank alone, or old parameters, must never be stepped with: the ranks would part in silence."""
    reduction = own.applied.reduction if own.applied is not None else None
    if id(optimizer) in own.stepping:
        return
    ours = _is_ours(optimizer) if reduction is not None or own.replaced else False
    if reduction is not None and ours:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        unmade = own.backwards == 0 or id(optimizer) in own.stepped
        if unmade and any(p.grad is not None for p in held):
            raise UsageError(
                "optimizer.step() found gradients that mw.backward did not make, so each rank has its own. "
                "Write mw.backward(loss) instead of loss.backward()."
            )
        if reduction.unreduced:
            reduction.reduce_now()
    own.stepped.add(id(optimizer))
    own.stepping.add(id(optimizer))
    if own.observer is not None:
        own.observer.steps(optimizer)


def _after_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    if id(optimizer) in own.stepping:
        own.stepping.discard(id(optimizer))
        if own.observer is not None:
            own.observer.stepped(optimizer)


def _is_ours(optimizer: Optimizer) -> bool:
    """Whether the optimizer holds parameters that were distributed. Raises UsageError where stepping would be wrong."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours = {id(p) for p in own.models.parameters()}
    if any(p in own.replaced for p in held):
        raise UsageError(
            "optimizer.step(): this optimizer was made before mw.distribute and not given to it, so it holds the "
            "parameters that the model had before they were sharded, and would change nothing. Give it to "
            "mw.distribute with the model, or make it afterwards."
        )
    foreign = [p for p in held if id(p) not in ours]
    if len(foreign) == len(held):
        if any(optimizer is known for known in own.optimizers):
            raise UsageError(
                "optimizer.step(): this optimizer was given to mw.distribute, and holds no parameter of a model that "
                "was. Give the model that it trains to mw.distribute too."
            )
        return False
    for p in foreign:
        if p.grad is not None:
            raise UsageError(
                f"optimizer.step(): the optimizer holds a parameter of shape {tuple(p.shape)} that belongs to no "
                "distributed model, so its gradient is of one rank alone. Give the module that it is of to "
                "mw.distribute too."
            )
    if own.plan is not None and own.plan.zero1 and id(optimizer) not in own.bound:
        say("zero1: an optimizer that was not given to mw.distribute keeps its whole state on every rank.")
    return True


def cast(batch: Any) -> Any:
    """A batch in the dtype that the plan stores."""
    return batch if own.plan is None else cast_batch(batch, own.plan.dtypes)
