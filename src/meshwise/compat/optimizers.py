"""What torch's optimizers keep to themselves: the order of their hooks, and the step without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def call_last(hook: RemovableHandle) -> None:
    """Move a hook behind those that were registered after it."""
    _hooks_beside(hook).move_to_end(hook.id)


def call_first(hook: RemovableHandle) -> None:
    """Move a hook before those that were registered before it."""
    _hooks_beside(hook).move_to_end(hook.id, last=False)


def _hooks_beside(hook: RemovableHandle) -> Any:
    return hook.hooks_dict_ref()


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The `step` of the optimizer's class, without the hooks that torch has put around it."""
    step: Any = type(optimizer).step
    unhooked: Callable[[Optimizer], Any] = step.__wrapped__
    return unhooked
