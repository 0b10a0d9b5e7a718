"""Refuse a script on several workers that has distributed nothing.

Such a script would do the same work in each worker.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from meshwise.parallel.step_hooks import Order, has_closure, held_parameters, subscribe
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import frame_in
from meshwise.spec.world import World
from meshwise.training import process
from meshwise.workers.join import made_process_group

LIGHTNING = ("lightning/pytorch/trainer/trainer.py", "pytorch_lightning/trainer/trainer.py")


def refuse_same_work(script: str, world: World) -> None:
    """Stop a script whose workers would all train the same model on the same samples. UsageError is raised at the first
    optimizer step with gradients. With one worker, nothing is checked.

    A script is not stopped if it has passed a model to mw.distribute. It is not stopped either if it has made a process
    group, as DDP, accelerate and Trainer do.
    """
    if world.size == 1:
        return

    def first_step(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        gradients = any(p.grad is not None for p in held_parameters(optimizer))
        if not gradients and not has_closure(arguments, keywords):
            return  # some programs step once before training, to prepare state
        hook.remove()
        if process.session.has_distributed_model() or (dist.is_initialized() and not made_process_group()):
            return
        what = "passed no model to mw.distribute" if process.session.has_begun() else "does not use mw.distribute"
        said = f"{script} {what}: {world.size} workers would do the same work. Use --devices 1x{world.kind}, or"
        if any(map(frame_in, LIGHTNING)):
            raise UsageError(f"{said} write trainer = mw.distribute(trainer) before trainer.fit().")
        raise UsageError(f"{said} pass its model, optimizer and loaders to mw.distribute.")

    hook = subscribe(Order.GUARD, first_step)
