"""Trace a model as it trains: outputs, draws, gradients.

The trace holds what each module returned, which random draws it made, and when gradients were ready.

A module's output is kept as random projections of each sample's row (see sketches.py). Those of all ranks together
equal those of one device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.checker import model_state
from meshwise.checker.contents import contents_of
from meshwise.checker.exchanges import noting_exchanges, noting_nan
from meshwise.checker.loss_numbers import NotedNumbers
from meshwise.checker.model_state import clean, is_replicated, named_parameters
from meshwise.checker.sketches import pieces, sketches
from meshwise.checker.trace import OUTSIDE, Draws, Named, Output, Reading, StepTrace, Trace
from meshwise.checker.upcast import upcast
from meshwise.checker.whole_view import RowDraws, part_of
from meshwise.parallel.splits.axis import SplitPart
from meshwise.spec.user_code import place_of
from meshwise.torch_compat.dispatch import without_interception
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.sharding import groups_of, local_of, sharded_modules
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.keyed import KeyedDraws, Rows, by_reference, by_rows, on_one_device
from meshwise.transfer import stages
from meshwise.transfer.sharded import full_tensor


class ModelTracer:
    """Records how `model` trains. Call `begin` for each step, and enter `forward` and `backward` for each microbatch.

    The methods are collective if the model is divided over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        reference: Draws | None = None,
        *,
        upcast: bool,
        perturb: bool = False,
        whole: bool = False,
    ) -> None:
        """whole: whether the program sees whole batches. In that case, no rank has a loss of its own."""
        modules = {clean(name): type(module) for name, module in model.named_modules()}
        kinds = {name: kind.__name__ for name, kind in modules.items()}
        parameters, buffers = model_state.parameters_of(model), model_state.buffers_of(model)
        self.trace = Trace(kinds, model_state.tied_in(model), parameters, buffers)
        self.trace.places = {name: at for name, kind in modules.items() if (at := place_of(kind.forward))}
        self.step = StepTrace()
        self._seed, self._reference, self._upcast, self._perturb = seed, reference, upcast, perturb
        self._whole = whole
        self._at = 0, -1  # (number of the step that began last, number of its latest microbatch)
        self._begun = 0  # number of microbatches before this step
        self._forwards = 0  # number of forwards, including those of batches without a backward
        self._rows: Rows  # the rows of the current microbatch
        self.draws: RowDraws
        """The random draws of the current microbatch."""
        self._calls: dict[str, int] = {}
        self.in_forward = False
        """Whether the forward pass of a microbatch is being traced."""
        self._numbers = NotedNumbers()
        self._running: list[tuple[str, tuple[Output, ...]]]  # running modules and their inputs, the innermost last
        self._made: MutableMapping[Tensor, tuple[int, Output]]  # the version of each tensor, and its sketches
        self._drawn = 0  # number of draws of this microbatch when a module last began or ended
        self._norms_left: dict[str, float] | None = None
        self.in_backward = False
        """Whether a backward is being traced."""
        self._own: Named | None = None  # this rank's own gradients in the running backward
        self._of_loss: Any = None  # the hook registered on the latest loss
        self._own_factor = 1.0  # the factor that the running backward applied to the loss
        self._hooked = WeakIdKeyDictionary()  # parameters that have a hook for `_keep_own`
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Trace `model` from now on."""
        self._model = model
        for name, module in model.named_modules():
            module.register_forward_pre_hook(LooksOn(partial(self._entered, clean(name))), with_kwargs=True)
            module.register_forward_hook(LooksOn(partial(self._left, clean(name))))
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._ready, clean(name)))

    def begin(self, step: int) -> StepTrace:
        """Begin step number `step`, counted from 0, and return its trace."""
        self._at, self.step, self._norms_left, self._begun = (step, -1), StepTrace(), None, self._forwards
        return self.step

    @contextlib.contextmanager
    def forward(self, rows: Rows, batch: Any, reading: Reading, *, number: int | None = None) -> Iterator[None]:
        """Trace the forward pass of the step's next microbatch inside the with block."""
        step, newest = self._at
        self._at, self._rows = (step, newest + 1 if number is None else number), rows
        if rows.samples > 0:
            self.step.contents.append(contents_of(self._at[1], batch, rows.count, reading))
        count = self._forwards if number is None else self._begun + number
        layout = on_one_device if self._reference is None else by_reference(self._reference.get(count, ()), rows)
        self.draws = RowDraws((self._seed, count, 0), rows, layout, alike=reading.split)
        self.trace.draws[count] = self.draws.log
        self._forwards = max(self._forwards, count + 1)
        self._calls, self.in_forward, self._drawn, self._running = {}, True, 0, []
        self._made = WeakIdKeyDictionary()
        try:
            of_modules = stages.carried(lambda: dict(self._calls), self._go_on)
            self._numbers = NotedNumbers()
            nan = noting_nan(self.step.nan_while_open, self._perturb)
            by_hand = noting_exchanges(self.trace.exchanges, lambda: self._running[-1][0] if self._running else "")
            with upcast(self._upcast), of_modules, self.draws.forward(), self._numbers.noting(), by_hand, nan:
                yield
        finally:
            self.in_forward = False
            self.trace.unkeyed |= self.draws.unkeyed

    def _go_on(self, calls: dict[str, int]) -> None:
        """Count each module's calls on from those of the previous pipeline stage."""
        self._calls = dict(calls)

    def discard(self) -> None:
        """Forget the newest microbatch, because its forward pass had no backward pass."""
        step, number = self._at
        self._at = step, number - 1
        self.step.outputs = [output for output in self.step.outputs if output.microbatch < number]
        self.step.contents = [contents for contents in self.step.contents if contents.microbatch < number]

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[None]:
        """Trace nothing inside the with block, where a model runs on trial. Reset the random draws at its end."""
        traced, redraw = self.in_forward, self.draws.attempt()
        self.in_forward = False
        try:
            yield
        finally:
            self.in_forward = traced
            redraw()

    def attempt(self, part: SplitPart) -> Callable[[], None]:
        """Let modules draw for this part of a split tensor. Return a function that discards what follows."""
        if self._reference is not None:
            self.draws.draw_for(part, self._reference.get(self._forwards - 1, ()))
        redraw, outputs, calls = self.draws.attempt(), len(self.step.outputs), dict(self._calls)
        running, drawn = list(self._running), self._drawn

        def forget() -> None:
            redraw()
            del self.step.outputs[outputs:]
            self._calls, self._running, self._drawn = calls, running, drawn

        return forget

    @contextlib.contextmanager
    def backward(self, number: int | None = None) -> Iterator[None]:
        """Trace the backward pass of a microbatch inside the with block."""
        self.step.ready_order.clear()
        if self._reference is not None and not self._whole:
            self._own = self.step.own_gradients.setdefault((0, self._at[1] if number is None else number), {})
            self._watch_own()
        self._compare_with_last_backward()
        self.step.drawn_alike |= self.draws.of_program
        drawn = len(self.draws.log)
        nan = noting_nan(self.step.nan_while_open, self._perturb)
        by_hand = noting_exchanges(self.trace.exchanges_backward, str)
        self.in_backward = True
        with upcast(self._upcast), self.draws.backward(), by_hand, nan:
            yield
        self._own, self.in_backward = None, False
        if self._of_loss is not None:
            self._of_loss.remove()  # otherwise it would be taken for a hook of the program
        # The log grows only if the backward draws numbers that do not repeat draws of the forward.
        self.step.rng_mismatch |= len(self.draws.log) > drawn
        self._norms_left = model_state.local_norms(self._model)

    def forget_gradients(self) -> None:
        """Forget the gradients of this step."""
        self._norms_left = None
        self.step.own_gradients.clear()

    def loss_made(self, loss: Tensor) -> None:
        """Record the scalars of this rank's loss, and the factor of its gradient."""
        if self._whole:
            return
        if self._at[1] == 0 and self._rows.samples:
            self.step.numbers[:] = [self._numbers.of(loss)]

        if self._reference is not None and loss.requires_grad and type(loss) is Tensor:
            self._of_loss = loss.register_hook(self._keep_factor)

    def _keep_factor(self, gradient: Tensor) -> None:
        self._own_factor = float(gradient)

    def _watch_own(self) -> None:
        """Register hooks that receive the gradients of this rank's own loss."""
        found = list(named_parameters(self._model))
        names = {id(p): name for name, p in found}
        groups = [group for _, module in sharded_modules(self._model) for group in groups_of(module)]
        found += [(names[id(p)], whole) for group in groups for p, whole in group.wholes() if id(p) in names]
        for name, p in found:
            if p.requires_grad and p not in self._hooked and (type(p) is nn.Parameter or is_replicated(p)):
                self._hooked[p] = p.register_hook(partial(self._keep_own, name))

    def _keep_own(self, name: str, gradient: Tensor) -> None:
        """Record the first gradient that a parameter gets in a backward pass."""
        gradient = local_of(gradient) if is_replicated(gradient) else gradient
        if self._own is not None and name not in self._own and type(gradient) is Tensor:
            with without_interception():
                self._own[name] = pieces(gradient.detach()).div(self._own_factor or math.inf)

    def _compare_with_last_backward(self) -> None:
        """Record whether gradients changed since the last backward of this step."""
        if self._norms_left is None:
            return
        now = model_state.local_norms(self._model)
        self.step.standing[self._at[1] - 1] = math.hypot(*now.values())
        ratios = [now.get(name, 0.0) / norm for name, norm in self._norms_left.items() if norm > 0]
        if ratios and max(abs(ratio - 1) for ratio in ratios) > 1e-12:
            alike = max(ratios) - min(ratios) <= 1e-9 * max(ratios)
            before, after = (math.hypot(*norms.values()) for norms in (self._norms_left, now))
            self.step.modified_between_backwards.append((0, self._at[1] - 1, before, after, alike))

    def keyed(self, function: Callable[..., Any], rows: Sequence[Rows]) -> Callable[..., Any]:
        """Wrap a job's loss or metric function, so that its random draws do not depend on the number of ranks."""
        batches = iter(enumerate(rows))
        now: list[Any] = []  # [batch, its number, its rows] of the last call, since two stages may use the same batch

        def evaluated(*args: Any) -> Any:
            if not now or args[-1] is not now[0]:
                now[:] = args[-1], *next(batches)
            _, number, own = now
            draws = KeyedDraws((self._seed, -1, number), own, by_rows(own))
            with upcast(self._upcast), draws.forward():
                result = function(*args)
            self.trace.unkeyed |= draws.unkeyed
            return result

        return evaluated

    def _ready(self, name: str, p: Tensor) -> None:
        self.step.ready_order.append(name)

    def _entered(self, name: str, module: nn.Module, *given: Any) -> None:
        if self.in_forward:
            if not module.training:
                self.step.evaluating.add(name)
            self._note_draws()
            inputs = tensors_in(given) if stages.counts() else ()
            self._running.append((name, tuple(self._sketched(t) for t in inputs if t.layout == torch.strided)))

    def _left(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.in_forward:
            self._note_draws()
            given = self._running.pop()[1] if self._running else ()
            for tensor in tensors_in(output) if stages.counts(module) else ():
                if tensor.is_floating_point() or tensor.is_complex():
                    self._keep(name, type(module).__name__, tensor, given)

    def _sketched(self, tensor: Tensor) -> Output:
        """Return the sketches of a tensor, which are made once for each value of it."""
        known = self._made.get(tensor)
        if known is None or known[0] != version(tensor):
            with without_interception():  # selective recomputation must not count these operators
                value = full_tensor(part_of(tensor, self._rows.total))
                found = sketches(value, self._rows.count)
            name = self._running[-1][0] if self._running else OUTSIDE
            output = Output(self._at[1], name, "", 0, tuple(value.shape), self._rows.count, found)
            known = self._made[tensor] = version(tensor), output
        return known[1]

    def _keep(self, name: str, kind: str, tensor: Tensor, given: tuple[Output, ...]) -> None:
        number = self._calls[name] = self._calls.get(name, -1) + 1
        output = replace(self._sketched(tensor), module=name, kind=kind, number=number, inputs=given)
        if self._rows.samples > 0:
            self.step.outputs.append(output)

    def _note_draws(self) -> None:
        """Record the innermost running module if it drew since a module began or ended."""
        drawn = len(self.draws.log) + len(self.draws.unkeyed)
        if drawn > self._drawn and self._running:
            self.trace.random_modules.add(self._running[-1][0])
        self._drawn = drawn


class LooksOn:
    """A module hook that only calls a function, and does nothing in a copy of the model."""

    def __init__(self, looks: Callable[..., None]) -> None:
        self._looks = looks

    def __call__(self, *given: Any) -> None:
        self._looks(*given)

    def __reduce__(self) -> Any:
        return LooksOn, (_nothing,)


def _nothing(*given: Any) -> None:
    pass
