"""Find likely mistakes in a script, with their source lines.

Such mistakes affect one device and the plan alike, so no comparison shows them. They are found on one device.

A hint is a warning, since what it reports may be intended. It is given only if it holds for every step, or every loop,
that was seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.checker.model_state import local_sums
from meshwise.checker.model_tracer import LooksOn, ModelTracer
from meshwise.checker.per_rank import slips_in
from meshwise.spec.user_code import frame_in, user_lines, user_place
from meshwise.spec.words import some

DROPOUT = (
    "{place}: dropout is active in an evaluation ({names}): call model.eval() before the evaluation, unless you sample "
    "on purpose, as in Monte Carlo dropout."
)
THROWN_AWAY = (
    "{place}: gradients are set to zero between the {count} backwards of a step, so only those of the last backward "
    "are used. Call optimizer.zero_grad() after optimizer.step()."
)
TICKS = (
    "{place}: the scheduler steps after every backward, and a step has {count} of them: the learning rate changes "
    "{count} times as fast as it should. Call scheduler.step() after optimizer.step()."
)
DROPS = {"bernoulli_", "native_dropout"}
"""Operators that draw dropout masks."""
OF_STATISTICS = "torch/optim/swa_utils.py"
"""The file of torch with `update_bn`. It runs a model in training mode on purpose, to recompute its batch norms."""


@dataclass
class _Window:
    """What a script did between two optimizer steps."""

    backwards: int = 0
    between: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    moved: bool = False


@dataclass
class _Loop:
    trained: bool = False
    dropped: dict[str, list[str]] = field(default_factory=dict)


class Hints:
    """Collects hints while a script runs on one device. A hint is a warning about a likely mistake."""

    def __init__(self) -> None:
        self.tracer: ModelTracer | None = None
        self._said: dict[str, None] = {}
        self._loops: list[_Loop] = []
        self._window, self._windows = _Window(), list[_Window]()
        self._called = dict[str, str]()  # text of a hint -> place of the last such call after the last backward
        self._files = dict[str, None]()
        self._begun = 0  # number of random draws before the current model call

    def follow(self, tracer: ModelTracer, model: nn.Module) -> None:
        """Observe the calls of a model that trains."""
        self.tracer = tracer
        model.register_forward_pre_hook(LooksOn(self._call_begins))
        model.register_forward_hook(LooksOn(self._call_ends))

    # Events of the program.

    def loop_begins(self) -> None:
        """Record that a loop over batches begins."""
        self._loops.append(_Loop())
        self._files |= dict.fromkeys(file for file, _ in user_lines())

    def loop_ends(self) -> None:
        """Record that a loop over batches has ended, or that the program left it."""
        if (loop := self._loops.pop()).trained:
            return
        self._said |= {DROPOUT.format(place=at, names=some(names)): None for at, names in loop.dropped.items()}

    def backward_begins(self, model: nn.Module) -> None:
        """Record that a backward pass begins, and what has changed since the last one."""
        for loop in self._loops:
            loop.trained = True
        window, now = self._window, local_sums(model, buffers=False)
        if window.backwards:
            if any(p.grad is not None and p.grad.any() for p in model.parameters()):
                self._called.pop(THROWN_AWAY, None)
            for text, where in self._called.items():
                window.between.setdefault(text, []).append(where)
            window.moved |= now != window.parameters  # parameters changed between backwards, e.g. by look-ahead
        window.backwards, window.parameters, self._called = window.backwards + 1, now, {}

    def step_made(self) -> None:
        """Record that an optimizer has made its step."""
        if self._window.backwards:
            self._windows.append(self._window)
        self._window, self._called = _Window(), {}

    def _call_begins(self, root: nn.Module, *_: object) -> None:
        self._begun = len(self.tracer.draws.log) if self.tracer is not None and self.tracer.in_forward else 0

    def _call_ends(self, root: nn.Module, *_: object) -> None:
        """Report dropout that is active during an evaluation."""
        if torch.is_grad_enabled() or frame_in(OF_STATISTICS):
            return
        active = [name or type(root).__name__ for name, m in root.named_modules() if _is_active(m)]
        where = user_place()
        if self.tracer is not None and self.tracer.in_forward:
            drawn = {draw.operator for draw in self.tracer.draws.log[self._begun :]}
            if drawn & DROPS and self._loops:
                self._loops[-1].dropped[where] = active or [type(root).__name__]
        elif active and not self._loops:
            self._said[DROPOUT.format(place=where, names=some(active))] = None

    def end(self, *, by_hand: bool, per_rank: bool) -> list[str]:
        """Return all warnings about likely mistakes in the script."""
        several = [window for window in self._windows if window.backwards > 1]
        count = max((window.backwards for window in several), default=1)
        for text in (THROWN_AWAY, TICKS):
            skipped = text is THROWN_AWAY and (by_hand or any(window.moved for window in several))
            every = all(len(window.between.get(text, ())) == window.backwards - 1 for window in several)
            if several and every and not skipped:
                self._said[text.format(place=several[0].between[text][0], count=count)] = None
        return [*self._said, *(slips_in(self._files) if per_rank else ())]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Watch zero_grad and scheduler steps inside the with block."""
        methods = [(THROWN_AWAY, "zero_grad", kind) for kind in (nn.Module, *_with_own(Optimizer, "zero_grad"))]
        methods += [(TICKS, "step", kind) for kind in _with_own(LRScheduler, "step")]
        with contextlib.ExitStack() as stack:
            for text, name, kind in methods:
                called = _telling(getattr(kind, name), functools.partial(self._note, text))
                stack.enter_context(patch.object(kind, name, called))
            yield

    def _note(self, text: str) -> None:
        if self._window.backwards:
            self._called[text] = user_place()


def _is_active(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ and module.training and getattr(module, "p", 0) > 0


def _with_own(kind: Any, name: str) -> Iterator[Any]:
    """Yield the classes, `kind` and its subclasses, that define the method `name`."""
    if name in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _with_own(each, name)


def _telling(method: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """Return a method that first calls `tell`."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell()
        return method(self, *args, **kwargs)

    return called
