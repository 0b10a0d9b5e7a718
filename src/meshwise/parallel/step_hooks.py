"""The one optimizer hook: who is called before and after a step, in which order, and once for each step.

An optimizer may call `super().step()`: only the outermost step of an optimizer is one, whichever classes torch has put
its hooks into. A step that raises leaves nothing behind: those called before it are called again with `failed`, as soon
as the error leaves `optimizer.step` (or at the next step, where no subscriber is of this optimizer alone).

Around a step, from the outside: subscribers of all optimizers of the process, then the program's own hooks, then
subscribers of this one optimizer. So the program's hooks (clipping, an EMA) see all gradients and all new parameters.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwise.compat import optimizers

Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""(optimizer, the positional arguments of its step, the others)"""
After = Callable[[Optimizer], None]


class Order(enum.IntEnum):
    """In this order subscribers are called before a step, and in the reverse order after it."""

    GUARD = 1  # first: refuses a step before anybody has changed something for it
    WATCH = 2  # sees the gradients of all parameters before, and the parameters of all ranks after
    PHASE = 3  # around the techniques: what they cost belongs to the optimizer's span
    ZERO1 = 4  # before offload, which gets state only for parameters that this rank steps
    OFFLOAD = 5  # last: it steps all but its last bucket itself


@dataclass(eq=False)
class Subscription:
    """Who is called around steps, until it is removed."""

    order: Order
    before: Before | None
    after: After | None
    failed: After | None
    among: list[Subscription] = field(repr=False)

    def remove(self) -> None:
        """Call it no more."""
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
    """Call these functions around each step of `optimizer`; without one, of every optimizer of this process.

    failed: called instead of `after` when the step raised, or something that was called before it (`before` too).
    The optimizer holds its subscribers, and nobody here holds it.
    """
    _hook_every_optimizer()
    among = _of_all if optimizer is None else _hooked(optimizer).subscriptions
    subscription = Subscription(order, before, after, failed, among)
    among.append(subscription)
    among.sort(key=lambda s: s.order)
    return subscription


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step with these arguments was given a closure."""
    return any(value is not None for value in (*args, kwargs.get("closure")))


@dataclass(eq=False)
class _Step:
    """A step that has begun, and whom it has called so far.

    frame: identifies torch's call of this step, which calls the hooks too, among all that are running.
    """

    frame: tuple[int, int]
    optimizer: weakref.ref[Optimizer]
    called: list[Subscription] = field(default_factory=list)


class _Running(threading.local):
    """The steps that have begun in this thread, and not ended: one inside another where an optimizer steps others."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []

    def at(self, frame: FrameType) -> _Step | None:
        """The step whose hooks this frame calls; None for one that is inside a step of the same optimizer."""
        return next((step for step in self.steps if step.frame == _identity(frame)), None)


class _OneOptimizer:
    """The subscribers of one optimizer. Held by its hooks alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.subscriptions: list[Subscription] = []
        self._hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def move_inside(self) -> None:
        """Come after the program's hooks before the step, and before them after it."""
        optimizers.call_last(self._hooks[0])
        optimizers.call_first(self._hooks[1])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = _running.at(sys._getframe(1))
        if step is not None:
            _call_before(step, self.subscriptions, args, kwargs)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = _running.at(sys._getframe(1))
        if step is not None:
            _call_after(step, self.subscriptions, optimizer)


_of_all: list[Subscription] = []
_running = _Running()
_hooks_of: weakref.WeakValueDictionary[int, _OneOptimizer] = weakref.WeakValueDictionary()


@functools.cache
def _hook_every_optimizer() -> None:
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _hooked(optimizer: Optimizer) -> _OneOptimizer:
    known = _hooks_of.get(id(optimizer))
    if known is None:
        known = _hooks_of[id(optimizer)] = _OneOptimizer(optimizer)
        _notice_failures(optimizer)
    return known


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch calls this before every step of every optimizer, and before the optimizer's own hooks."""
    frame = sys._getframe(1)
    _forget_ended(frame.f_back)
    if any(step.optimizer() is optimizer for step in _running.steps):
        return
    step = _Step(_identity(frame), weakref.ref(optimizer))
    _running.steps.append(step)
    one = _hooks_of.get(id(optimizer))
    if one is not None:
        one.move_inside()
    _call_before(step, _of_all, args, kwargs)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch calls this after every step of every optimizer, and after the optimizer's own hooks."""
    step = _running.at(sys._getframe(1))
    if step is not None:
        _call_after(step, _of_all, optimizer)
        _running.steps.remove(step)


def _call_before(step: _Step, subscriptions: list[Subscription], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        for subscription in list(subscriptions):
            step.called.append(subscription)
            if subscription.before is not None:
                subscription.before(args[0], args[1:], kwargs)
    except BaseException:
        _fail(step)
        raise


def _call_after(step: _Step, subscriptions: list[Subscription], optimizer: Optimizer) -> None:
    try:
        while step.called and step.called[-1].among is subscriptions:
            subscription = step.called.pop()
            if subscription.after is not None:
                subscription.after(optimizer)
    except BaseException:
        _fail(step)
        raise


def _fail(step: _Step) -> None:
    _running.steps.remove(step)
    optimizer = step.optimizer()
    for subscription in reversed(step.called):
        if subscription.failed is not None and optimizer is not None:
            subscription.failed(optimizer)


def _forget_ended(frame: FrameType | None) -> None:
    """Steps that run neither in `frame` nor around it have raised: torch calls no hook then."""
    if not _running.steps:
        return
    around = set()
    while frame is not None:
        around.add(_identity(frame))
        frame = frame.f_back
    for step in [step for step in reversed(_running.steps) if step.frame not in around]:
        _fail(step)


def _identity(frame: FrameType) -> tuple[int, int]:
    """Of a frame that is running. One that has ended may have had the same, where it ran the same code: so `_begin`
    forgets a step that has the identity of the one that begins."""
    return id(frame), id(frame.f_code)


def _notice_failures(optimizer: Optimizer) -> None:
    """Let no error leave `optimizer.step` before the step's subscribers know. A function takes the method's place and
    does not hold the optimizer, as torch's schedulers do it."""
    step, known = optimizer.step, weakref.ref(optimizer)
    function = getattr(step, "__func__", None) or _without_self(step)

    @functools.wraps(function)
    def noticed(optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(optimizer, *args, **kwargs)
        except BaseException:
            _forget_ended(sys._getframe())
            raise

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return noticed(known(), *args, **kwargs)

    bound.__func__ = noticed  # type: ignore[attr-defined]
    optimizer.step = bound  # type: ignore[method-assign]


def _without_self(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's function in the place of `step` finds the optimizer itself."""

    @functools.wraps(step)
    def function(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return function
