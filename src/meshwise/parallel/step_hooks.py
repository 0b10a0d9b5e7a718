"""Call everything that runs around an optimizer step, in order.

A subscriber is a set of functions to call before and after a step. Each optimizer has one pair of hooks, which calls
every subscriber once before and once after a step.

An optimizer may call `super().step()`. Only the outermost call counts as a step, whichever classes torch has put its
hooks into. If a step raises an error, `failed` is called as soon as the error leaves `optimizer.step`, for each
subscriber of this optimizer that was called before the step.

The order around a step, from the outside: subscribers to all optimizers of the process, then the program's hooks, then
subscribers to this optimizer. So the program's hooks (clipping, an EMA) see all gradients and all new parameters.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwise.torch_compat.modules import move_hook
from meshwise.torch_compat.sharding import local_of

BY_NUMBERS: set[Any] = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam}
BY_NUMBERS |= {optim.RAdam, optim.RMSprop, optim.SGD, optim.SparseAdam}
MAKES_STATE = "_init_optim_state"  # a function of torch's distributed/checkpoint/state_dict.py
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""A function called with the optimizer, the positional arguments of its step, and the keyword arguments."""
After = Callable[[Optimizer], None]


def is_by_numbers(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to update every element independently."""
    return type(optimizer) in BY_NUMBERS


class Order(enum.IntEnum):
    """The order in which the functions that were passed to `subscribe` are called before an optimizer's step. After the
    step, they are called in reverse order."""

    GUARD = 1  # first, so that it can refuse a step before anything has changed
    PHASE = 2  # before the techniques, so that their cost belongs to the optimizer's span
    ZERO1 = 3  # before OFFLOAD, so that only the state of parameters that this rank steps is offloaded
    OFFLOAD = 4  # last, because offloading itself steps all buckets except the last one


@dataclass(eq=False)
class Subscription:
    """The functions that one caller of `subscribe` wants to be called before and after optimizer steps, until
    `remove`."""

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
    """Call `before` before each optimizer step, and `after` after it, until the returned `Subscription` is
    removed.

    order: decides which subscriber is called first (see `Order`).
    failed: called in place of `after` if the step, or a function called before it, raised an error. It is called only
        if `optimizer` is given.
    optimizer: the optimizer whose steps count. Its hooks hold the subscription, which ends when the optimizer is freed.
        By default, the steps of all optimizers in this process count.
    """
    _hook_every_optimizer()
    among = _of_all if optimizer is None else _hooked(optimizer).subscriptions
    subscription = Subscription(order, before, after, failed, among)
    among.append(subscription)
    among.sort(key=lambda s: s.order)
    return subscription


def held_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def buckets_of(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Group adjacent tensors of the same dtype and device into buckets of at most `most` bytes."""
    buckets: list[list[Tensor]] = []
    size = 0
    for t in tensors:
        size += local_of(t).nbytes
        last = buckets[-1] if buckets else []
        if not last or size > most or (last[0].dtype, last[0].device) != (t.dtype, t.device):
            buckets.append([])
            size = local_of(t).nbytes
        buckets[-1].append(t)
    return buckets


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as the step of LBFGS does."""
    known = _need_closures.get(optimizer)
    if known is None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        known = _need_closures[optimizer] = closure is not None and closure.default is closure.empty
    return known


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a step include a closure."""
    return any(value is not None for value in (*args, kwargs.get("closure")))


class _OneOptimizer:
    """The subscribers to one optimizer. It also remembers which of them have been called in the current step. The
    optimizer's hooks hold the only reference to this object."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.subscriptions: list[Subscription] = []
        self._called: list[Subscription] = []
        self._hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def move_inside(self) -> None:
        """Make these hooks the closest to the step: the last to run before it, and the first to run after it."""
        move_hook(self._hooks[0], last=True)
        move_hook(self._hooks[1], last=False)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(sys._getframe(1)) in _inner:
            return
        self.fail(optimizer)  # an earlier step that bypassed `optimizer.step` may have failed unnoticed
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
        """Call the `failed` functions that were passed to `subscribe`, because a step of `optimizer` has raised an
        error. Subscribers that were not called before this step are left out."""
        while self._called:
            failed = self._called.pop().failed
            if failed is not None:
                failed(optimizer)


_of_all: list[Subscription] = []
_inner: set[int] = set()
"""The ids of frames of steps that run inside another step. An outer step removes its id, because ids are reused."""
_stepping: set[int] = set()
"""The ids of the optimizers whose step has begun and has not ended normally. If an optimizer has state and its id is
not here, its step cannot be inside another step. The slow search of the call stack (`_is_inner`) is then left out."""
_need_closures: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
_hooks_of: dict[int, weakref.ref[_OneOptimizer]] = {}  # by optimizer id (a WeakValueDictionary would be slower)


@functools.cache
def _hook_every_optimizer() -> None:
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _hooked(optimizer: Optimizer) -> _OneOptimizer:
    ref = _hooks_of.get(id(optimizer))
    known = None if ref is None else ref()
    if known is None:
        known = _OneOptimizer(optimizer)
        _hooks_of[id(optimizer)] = weakref.ref(known)
        _notice_failures(optimizer, known.fail)
    return known


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call subscribers as a step begins. torch calls this hook for every optimizer, before the optimizer's own
    hooks."""
    frame = sys._getframe(1)
    if (id(optimizer) in _stepping or not optimizer.state) and _is_inner(frame):
        _inner.add(id(frame))
        return
    _inner.discard(id(frame))
    _stepping.add(id(optimizer))
    if (ref := _hooks_of.get(id(optimizer))) is not None and (one := ref()) is not None:
        one.move_inside()
    for subscription in list(_of_all):
        if subscription.before is not None:
            subscription.before(optimizer, args[1:], kwargs)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call subscribers as a step ends. torch calls this hook for every optimizer, after the optimizer's own hooks."""
    if id(sys._getframe(1)) in _inner:
        return
    _stepping.discard(id(optimizer))
    for subscription in reversed(list(_of_all)):
        if subscription.after is not None:
            subscription.after(optimizer)


def _is_inner(frame: FrameType) -> bool:
    """Return whether an optimizer step runs inside another step, and must be ignored."""
    code, outer = frame.f_code, frame.f_back
    while outer is not None:
        same = outer.f_code is code and outer.f_locals["self"] is frame.f_locals["self"]
        if same or outer.f_code.co_name == MAKES_STATE:
            return True
        outer = outer.f_back
    return False


def _notice_failures(optimizer: Optimizer, fail: After) -> None:
    """Replace `optimizer.step` with a function that calls `fail(optimizer)` if the step raises an error, and then
    raises the error."""
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
