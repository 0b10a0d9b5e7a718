"""Call everything that runs around an optimizer step, in order.

Each optimizer has one pair of hooks, which call each subscriber once before and once after a step.

An optimizer may call `super().step()`: only the outermost call counts as a step, whichever classes torch has put its
hooks into. If a step raises, `failed` of those subscribers of this optimizer is called that were called before the
step, as soon as the error leaves `optimizer.step`.

The order around a step, from the outside: subscribers to all optimizers of the process, then the program's hooks, then
subscribers to this optimizer. So the program's hooks (clipping, an EMA) see all gradients and all new parameters.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwise.compat import optimizers

MAKES_STATE = "_init_optim_state"  # of torch's distributed/checkpoint/state_dict.py
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""(optimizer, the positional arguments of its step, the keyword arguments)"""
After = Callable[[Optimizer], None]


class Order(enum.IntEnum):
    """The order in which subscribers are called before a step; after it, the order is reversed."""

    GUARD = 1  # first: refuses a step before anybody has changed something for it
    WATCH = 2  # sees the gradients of all parameters before, and the parameters of all ranks after
    DRAWS = 3  # what an optimizer draws is for parameters, not for a rank's samples
    PHASE = 4  # around the techniques: what they cost belongs to the optimizer's span
    ZERO1 = 5  # before offload, which gets state only for parameters that this rank steps
    OFFLOAD = 6  # last: it steps all but its last bucket itself


@dataclass(eq=False)
class Subscription:
    """The functions to call around steps, until `remove` is called."""

    order: Order
    before: Before | None
    after: After | None
    failed: After | None
    among: list[Subscription] = field(repr=False)

    def remove(self) -> None:
        """Stop calling these functions."""
        if self in self.among:
            self.among.remove(self)


def subscribe(
    order: Order,
    before: Before | None = None,
    after: After | None = None,
    failed: After | None = None,
    *,
    optimizer: Optimizer | None = None,
) -> Subscription:
    """Call these functions around each step of `optimizer`; if None, of every optimizer in this process.

    failed: only for one optimizer; called in place of `after` if the step, or a function called before it, raised. The
    optimizer owns its subscribers; nothing here keeps it alive.
    """
    _hook_every_optimizer()
    among = _of_all if optimizer is None else _hooked(optimizer).subscriptions
    subscription = Subscription(order, before, after, failed, among)
    among.append(subscription)
    among.sort(key=lambda s: s.order)
    return subscription


def held_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer holds, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step needs a closure, as that of LBFGS does."""
    known = _need_closures.get(optimizer)
    if known is None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        known = _need_closures[optimizer] = closure is not None and closure.default is closure.empty
    return known


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a step include a closure."""
    return any(value is not None for value in (*args, kwargs.get("closure")))


class _OneOptimizer:
    """The subscribers to one optimizer, and which of them the current step has called. Only its hooks keep it alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.subscriptions: list[Subscription] = []
        self._called: list[Subscription] = []
        self._hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def move_inside(self) -> None:
        """Make its hooks run after the program's hooks before a step, and ahead of them after a step."""
        optimizers.call_last(self._hooks[0])
        optimizers.call_first(self._hooks[1])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(sys._getframe(1)) in _inner:
            return
        self.fail(optimizer)  # a step whose error did not leave by `optimizer.step`
        for subscription in list(self.subscriptions):
            self._called.append(subscription)
            if subscription.before is not None:
                subscription.before(optimizer, args[1:], kwargs)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(sys._getframe(1)) in _inner:
            return
        while self._called:
            after = self._called.pop().after
            if after is not None:
                after(optimizer)

    def fail(self, optimizer: Optimizer) -> None:
        """Call `failed` of the subscribers that were called before a step that raised."""
        while self._called:
            failed = self._called.pop().failed
            if failed is not None:
                failed(optimizer)


_of_all: list[Subscription] = []
_inner: set[int] = set()
"""The ids of frames of steps that run inside another step, recorded from their beginning to their end."""
_stepping: set[int] = set()
"""The ids of optimizers whose step has begun and not ended, or has raised. Only in these, or when torch creates state,
can a step run inside another."""
_need_closures: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
_hooks_of: weakref.WeakValueDictionary[int, _OneOptimizer] = weakref.WeakValueDictionary()


@functools.cache
def _hook_every_optimizer() -> None:
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _hooked(optimizer: Optimizer) -> _OneOptimizer:
    known = _hooks_of.get(id(optimizer))
    if known is None:
        known = _hooks_of[id(optimizer)] = _OneOptimizer(optimizer)
        _notice_failures(optimizer, known.fail)
    return known


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call subscribers as a step begins: torch calls this for every optimizer, before the optimizer's hooks."""
    frame = sys._getframe(1)
    if (id(optimizer) in _stepping or not optimizer.state) and _is_inner(frame):
        _inner.add(id(frame))
        return
    _inner.discard(id(frame))
    _stepping.add(id(optimizer))
    if (one := _hooks_of.get(id(optimizer))) is not None:
        one.move_inside()
    for subscription in list(_of_all):
        if subscription.before is not None:
            subscription.before(optimizer, args[1:], kwargs)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call subscribers as a step ends: torch calls this for every optimizer, after the optimizer's hooks."""
    if id(sys._getframe(1)) in _inner:
        return
    _stepping.discard(id(optimizer))
    for subscription in reversed(list(_of_all)):
        if subscription.after is not None:
            subscription.after(optimizer)


def _is_inner(frame: FrameType) -> bool:
    """Return whether `frame`, which calls the hooks of a step, runs inside another step of the same optimizer, as
    `super().step()` calls torch's hooks again; or inside torch's `set_optimizer_state_dict`, which steps with zero
    gradients and learning rates to create the state that it loads into.

    Read in torch 2.11, 2.13 and 2.15: `optim/optimizer.py`, `profile_hook_step`, whose `wrapper` every step has.
    """
    optimizer, outer = frame.f_locals["self"], frame.f_back
    while outer is not None:
        if (
            outer.f_code is frame.f_code and outer.f_locals["self"] is optimizer
        ) or outer.f_code.co_name == MAKES_STATE:
            return True
        outer = outer.f_back
    return False


def _notice_failures(optimizer: Optimizer, fail: After) -> None:
    """Call `fail` for each error before it leaves `optimizer.step`. The method is replaced by a function without a
    reference to the optimizer, as torch's schedulers do; a scheduler's wrapper still works."""
    step: Any = optimizer.step
    known = weakref.ref(optimizer)
    is_method = hasattr(step, "__func__")
    function = step.__func__ if is_method else step

    @functools.wraps(function)
    def noticed(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(optimizer, *args, **kwargs) if is_method else function(*args, **kwargs)
        except BaseException:
            fail(optimizer)
            raise

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return noticed(known(), *args, **kwargs)

    bound.__func__ = noticed  # type: ignore[attr-defined]
    optimizer.step = bound  # type: ignore[method-assign]
