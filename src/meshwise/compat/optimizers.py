"""Order the hooks of torch's optimizers, and step without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def call_last(hook: RemovableHandle) -> None:
    """Make the optimizer call this hook after all others of the same kind."""
    _hooks_beside(hook).move_to_end(hook.id)


def call_first(hook: RemovableHandle) -> None:
    """Make the optimizer call this hook before all others of the same kind."""
    _hooks_beside(hook).move_to_end(hook.id, last=False)


def _hooks_beside(hook: RemovableHandle) -> Any:
    return hook.hooks_dict_ref()


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the `step` function of the optimizer's class without the wrapper in which torch calls hooks."""
    step: Any = type(optimizer).step
    unhooked: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
    return unhooked


def after_method(optimizer: Optimizer, name: str, then: Callable[[], None]) -> None:
    """Call `then()` after each call of the optimizer's method `name`, if the optimizer has such a method."""
    method = getattr(optimizer, name, None)
    if not callable(method):
        return

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(optimizer, name, called)


def is_hooks(name: str) -> bool:
    """Return whether `name` is an attribute of optimizers that holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def takes_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks can be added to the optimizer. This is impossible for some wrappers of optimizers, whose
    classes do not call `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")
