"""Trace a model while it trains: what each module gave, which draws it made, when gradients were ready.

A module's output is kept as sketches of each sample's row (see sketches.py): ranks send sketches, and those of the
ranks together are those of one device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshwise.compat.dispatch import without_interception
from meshwise.compat.tree import tensors_in
from meshwise.equivalence.model_state import clean, local_norms
from meshwise.equivalence.sketches import sketches
from meshwise.equivalence.trace import Output, StepTrace
from meshwise.equivalence.upcast import upcast
from meshwise.training.keyed import Draw, KeyedDraws, Rows, by_reference, by_rows, on_one_device
from meshwise.transfer.sharded import full_tensor


class ModelTracer:
    """Traces `model`. `begin` a step, then enter `forward` and `backward` around those of each microbatch."""

    def __init__(self, model: nn.Module, seed: int, *, upcast: bool) -> None:
        self._model, self._seed, self._upcast = model, seed, upcast
        self._step = 0
        self._rows: Sequence[Rows] = ()
        self._reference: Sequence[Sequence[Draw]] | None = None
        self._draws: list[KeyedDraws] = []
        self._calls: dict[str, int] = {}
        self._in_forward = False
        self._open_calls: list[list[int]] = []  # of each: draws before it, draws of the calls inside it
        self._norms_left: dict[str, float] | None = None
        self.outputs: list[Output] = []
        self.ready: list[str] = []
        self.modified_between_backwards: list[tuple[int, int, float, float, bool]] = []
        self.rng_mismatch = False
        self.unkeyed: set[str] = set()
        self.random_modules: set[str] = set()
        self.evaluation_draws = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entered)
            module.register_forward_hook(self._left(clean(name), type(module).__name__))
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._ready_hook(clean(name)))

    def begin(self, step: int, rows: Sequence[Rows], reference: Sequence[Sequence[Draw]] | None = None) -> None:
        """A step begins: its rows and, on the side that follows, the draws of one device, an entry a microbatch."""
        self._step, self._rows, self._reference = step, rows, reference
        self._draws, self.outputs, self.ready = [], [], []
        self._norms_left, self.modified_between_backwards, self.rng_mismatch = None, [], False

    def end_step(self, step: StepTrace) -> None:
        """The optimizer has made the step that began last: what the model did in it goes into `step`."""
        step.draws, step.outputs = [draws.log for draws in self._draws], self.outputs
        step.modified_between_backwards, step.rng_mismatch = self.modified_between_backwards, self.rng_mismatch

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The forward of the next microbatch of the step."""
        number = len(self._draws)
        reference = None if self._reference is None else [*self._reference, *([] for _ in range(number + 1))][number]
        rows = self._rows[number]
        layout = on_one_device if reference is None else by_reference(reference, rows)
        draws = KeyedDraws((self._seed, self._step, number), rows, layout)
        self._draws.append(draws)
        self._calls, self._in_forward, self._open_calls = {}, True, []
        try:
            with upcast(self._upcast), draws.forward():
                yield
        finally:
            self._in_forward = False
            self.unkeyed |= draws.unkeyed

    def discard(self) -> None:
        """Forget the newest microbatch: it was none, no backward came."""
        self.evaluation_draws += len(self._draws.pop().log)
        self.outputs = [output for output in self.outputs if output.microbatch < len(self._draws)]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of the newest microbatch: what it recomputes is in float64 and keyed alike."""
        self.ready.clear()
        self._compare_with_last_backward()
        drawn = len(self._draws[-1].log)
        with upcast(self._upcast), self._draws[-1].backward():
            yield
        # What runs again and draws the same numbers as at first is the same call, and not noted again.
        self.rng_mismatch = self.rng_mismatch or len(self._draws[-1].log) > drawn
        self._norms_left = local_norms(self._model)

    def _compare_with_last_backward(self) -> None:
        """Were gradients changed since the last backward of this step?"""
        if self._norms_left is None:
            return
        now = local_norms(self._model)
        ratios = [now.get(name, 0.0) / norm for name, norm in self._norms_left.items() if norm > 0]
        if ratios and max(abs(ratio - 1) for ratio in ratios) > 1e-12:
            alike = max(ratios) - min(ratios) <= 1e-9 * max(ratios)
            before, after = (math.hypot(*norms.values()) for norms in (self._norms_left, now))
            self.modified_between_backwards.append((0, len(self._draws) - 2, before, after, alike))

    def precise(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the job, its casts in float64, not traced."""
        return upcast(self._upcast)(function)

    def keyed(self, function: Callable[..., Any], rows: Sequence[Rows]) -> Callable[..., Any]:
        """What a job evaluates with, in float64 and with keyed draws; called once for each of `rows`."""
        batches = iter(enumerate(rows))

        def evaluated(*args: Any) -> Any:
            number, own = next(batches)
            draws = KeyedDraws((self._seed, -1, number), own, by_rows(own))
            with upcast(self._upcast), draws.forward():
                result = function(*args)
            self.unkeyed |= draws.unkeyed
            self.evaluation_draws += len(draws.log)
            return result

        return evaluated

    def _ready_hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.ready.append(name)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        if self._in_forward:
            self._open_calls.append([self._drawn(), 0])

    def _left(self, name: str, kind: str) -> Callable[[nn.Module, Any, Any], None]:
        def left(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._in_forward:
                self._close_call(name)
                for tensor in tensors_in(output):
                    if tensor.is_floating_point():
                        self._keep(name, kind, tensor)

        return left

    def _keep(self, name: str, kind: str, tensor: Tensor) -> None:
        micro = len(self._draws) - 1
        rows = self._rows[micro]
        number = self._calls[name] = self._calls.get(name, -1) + 1
        with without_interception():  # selective recomputation counts the operators of a block
            value = full_tensor(tensor.detach())
            found = sketches(value, rows.count)
        counts = int(rows.samples > 0)  # a padding sample is no entry
        shapes, each = (tuple(value.shape),) * counts, {layout: (s,) * counts for layout, s in found.items()}
        self.outputs.append(Output(micro, name, kind, number, shapes, (rows.count,) * counts, each))

    def _drawn(self) -> int:
        """Draws of this microbatch so far; of those that cannot be keyed, kinds."""
        return len(self._draws[-1].log) + len(self._draws[-1].unkeyed)

    def _close_call(self, name: str) -> None:
        """A module's call ends: did it draw more than the modules inside it?"""
        if not self._open_calls:
            return
        before, below = self._open_calls.pop()
        drawn = self._drawn() - before
        if drawn > below:
            self.random_modules.add(name)
        if self._open_calls:
            self._open_calls[-1][1] += drawn


def merged(ranks: Sequence[Sequence[Output]]) -> list[Output]:
    """The outputs of all ranks, each call with the sketches of the ranks that had samples, in rank order."""
    found: dict[tuple[int, str, int], list[Output]] = {}
    for output in (output for outputs in ranks for output in outputs):
        found.setdefault(output.key, []).append(output)
    return [
        replace(
            calls[0],
            shapes=tuple(shape for call in calls for shape in call.shapes),
            rows=tuple(rows for call in calls for rows in call.rows),
            sketches={
                layout: tuple(s for call in calls for s in call.sketches.get(layout, ()))
                for layout in {layout for call in calls for layout in call.sketches}
            },
        )
        for calls in found.values()
    ]
