"""The optimizer hook: once a step, in order, and nothing left behind by a step that raised."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from meshwise.parallel.step_hooks import Order, Subscription, has_closure, subscribe


class Mine(SGD):
    """Calls its parent's step, which has hooks of its own once a plain SGD was made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Breaking(Mine):
    """Raises inside of a step, once: in its parent's call, or after it."""

    breaks = ""

    def step(self, closure: Any = None) -> Any:
        when, self.breaks = self.breaks, ""
        if when == "before":
            raise RuntimeError("broken")
        result = super().step(closure)
        if when == "after":
            raise RuntimeError("broken")
        return result


class Composite(SGD):
    """Steps another optimizer within its own step."""

    inner: Optimizer | None = None

    def step(self, closure: Any = None) -> Any:
        if self.inner is not None:
            self.inner.step()
        return super().step(closure)


@pytest.fixture
def everyone() -> Iterator[Callable[..., Subscription]]:
    """`subscribe` for all optimizers, removed at the end."""
    made: list[Subscription] = []

    def subscribed(*args: Any, **kwargs: Any) -> Subscription:
        made.append(subscribe(*args, **kwargs))
        return made[-1]

    yield subscribed
    for subscription in made:
        subscription.remove()


def optimizer_of(kind: type[Optimizer], **settings: Any) -> Any:
    SGD([nn.Parameter(torch.zeros(1))])  # a plain one exists: torch puts hooks around SGD.step itself
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.1, **settings)  # type: ignore[call-arg]


def noting(calls: list[str], name: str, order: Order, **where: Any) -> dict[str, Any]:
    return {
        "order": order,
        "before": lambda *_: calls.append(f"before {name}"),
        "after": lambda _: calls.append(f"after {name}"),
        "failed": lambda _: calls.append(f"failed {name}"),
        **where,
    }


@pytest.mark.parametrize("kind", [SGD, Mine, Breaking, Adam])
def test_a_step_is_one_whatever_it_calls(kind: type[Optimizer], everyone: Any) -> None:
    optimizer, calls = optimizer_of(kind), list[str]()
    everyone(**noting(calls, "all", Order.GUARD))
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    for _ in range(2):
        calls.clear()
        optimizer.step()
        assert calls == ["before all", "before one", "after one", "after all"]


def test_the_order_is_the_stated_one_and_reversed_afterwards(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()
    for order in (Order.PHASE, Order.GUARD):
        everyone(**noting(calls, order.name, order))
    for order in (Order.OFFLOAD, Order.ZERO1):
        subscribe(**noting(calls, order.name, order, optimizer=optimizer))
    optimizer.step()
    names = [order.name for order in Order]
    assert calls == [f"before {n}" for n in names] + [f"after {n}" for n in reversed(names)]


def test_the_hooks_of_the_program_lie_outside_of_what_is_done_to_one_optimizer(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("program, early"))
    optimizer.register_step_post_hook(lambda *_: calls.append("program's end, early"))
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    optimizer.register_step_pre_hook(lambda *_: calls.append("program, late"))
    optimizer.register_step_post_hook(lambda *_: calls.append("program's end, late"))
    optimizer.step()
    early, late = calls[:3], calls[3:]
    assert early == ["program, early", "program, late", "before one"]
    assert late == ["after one", "program's end, early", "program's end, late"]


def test_one_optimizer_inside_another_has_a_step_of_its_own(everyone: Any) -> None:
    outer, inner, stepped = optimizer_of(Composite), optimizer_of(Mine), list[Optimizer]()
    outer.inner = inner
    everyone(Order.GUARD, after=stepped.append)
    outer.step()
    assert stepped == [inner, outer]


def test_who_is_removed_is_not_called_any_more(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()
    both = [everyone(**noting(calls, "all", Order.GUARD))]
    both.append(subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer)))
    for subscription in both:
        subscription.remove()
        subscription.remove()
    optimizer.step()
    assert calls == []


@pytest.mark.parametrize("breaks", ["before", "after"])
def test_a_step_that_raises_leaves_nothing_behind(breaks: str, everyone: Any) -> None:
    optimizer, calls = optimizer_of(Breaking), list[str]()
    everyone(**noting(calls, "all", Order.GUARD))
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    optimizer.breaks = breaks
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert calls == ["before all", "before one", "failed one"]  # at once
    calls.clear()
    optimizer.step()
    assert calls == ["before all", "before one", "after one", "after all"]


@pytest.mark.parametrize("kind", [Breaking, Composite])
def test_a_step_after_one_that_raised_is_a_step(kind: type[Optimizer], everyone: Any) -> None:
    broken, other, calls = optimizer_of(Breaking), optimizer_of(kind), list[str]()
    everyone(**noting(calls, "all", Order.GUARD))
    broken.breaks = "before"
    with pytest.raises(RuntimeError, match="broken"):
        broken.step()
    if isinstance(other, Composite):
        other.inner = broken  # it steps again, inside another's step
    other.step()
    steps = 2 if isinstance(other, Composite) else 1
    assert calls == ["before all"] + ["before all"] * steps + ["after all"] * steps


def test_who_refuses_a_step_ends_it_for_those_before_it(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()
    everyone(**noting(calls, "all", Order.GUARD))

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    told: Any = lambda _: calls.append("failed refusing")  # noqa: E731
    refusing = subscribe(Order.OFFLOAD, refuse, failed=told, optimizer=optimizer)
    for _ in range(2):
        calls.clear()
        with pytest.raises(ValueError, match="no"):
            optimizer.step()
        assert calls == ["before all", "before one", "failed refusing", "failed one"]
    refusing.remove()
    calls.clear()
    optimizer.step()
    assert calls == ["before all", "before one", "after one", "after all"]


def test_a_step_that_is_refused_from_outside_has_called_nobody_after_it(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    everyone(Order.GUARD, refuse)
    everyone(**noting(calls, "last", Order.PHASE))
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    with pytest.raises(ValueError, match="no"):
        optimizer.step()
    assert calls == []


def test_an_error_that_leaves_by_the_method_of_the_class_is_told_before_the_next_step() -> None:
    optimizer, calls = optimizer_of(Breaking), list[str]()
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    optimizer.breaks = "after"
    with pytest.raises(RuntimeError, match="broken"):
        Breaking.step(optimizer)
    optimizer.step()
    assert calls == ["before one", "failed one", "before one", "after one"]


def test_an_error_afterwards_is_told_to_those_who_come_later(everyone: Any) -> None:
    optimizer, calls = optimizer_of(SGD), list[str]()
    everyone(**noting(calls, "all", Order.GUARD))

    def fail(_: Optimizer) -> None:
        raise ValueError("too late")

    failing = subscribe(Order.OFFLOAD, after=fail, optimizer=optimizer)
    subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
    with pytest.raises(ValueError, match="too late"):
        optimizer.step()
    assert calls == ["before all", "before one", "failed one"]
    failing.remove()
    optimizer.step()
    assert calls[3:] == ["before all", "before one", "after one", "after all"]


@pytest.mark.parametrize("raising", [False, True])
def test_an_optimizer_that_the_program_lets_go_is_freed_at_once(raising: bool, everyone: Any) -> None:
    everyone(Order.GUARD, lambda *_: None)
    optimizer = optimizer_of(Breaking)
    subscribe(Order.ZERO1, lambda *_: None, optimizer=optimizer)
    known = weakref.ref(optimizer)
    if raising:
        optimizer.breaks = "after"
        with pytest.raises(RuntimeError):
            optimizer.step()
        gc.collect()  # the error, and the frames that it holds
    gc.disable()
    try:
        optimizer.step()
        del optimizer
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["a scheduler before", "a scheduler after"])
def test_schedulers_find_the_step_that_they_follow(when: str) -> None:
    optimizer, calls = optimizer_of(Mine), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make: Any = lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        schedulers = [make()] if when.endswith("before") else []
        subscribe(**noting(calls, "one", Order.ZERO1, optimizer=optimizer))
        schedulers += [make()]
        for scheduler in schedulers:
            optimizer.step()
            scheduler.step()
    assert calls == ["before one", "after one"] * len(schedulers)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** len(schedulers))


def test_step_keeps_its_signature_and_its_result() -> None:
    optimizer = optimizer_of(SGD)
    before = inspect.signature(SGD.step)
    subscribe(Order.ZERO1, optimizer=optimizer)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert inspect.signature(optimizer.step) == before
    assert copy.deepcopy(optimizer).step(lambda: 4.0) == 4.0


def test_a_closure_is_seen_wherever_it_stands(everyone: Any) -> None:
    optimizer, found = optimizer_of(SGD), list[bool]()
    everyone(Order.GUARD, lambda _, args, kwargs: found.append(has_closure(args, kwargs)))
    optimizer.step()
    optimizer.step(None)
    optimizer.step(lambda: 0.0)
    optimizer.step(closure=lambda: 0.0)
    assert found == [False, False, True, True]
