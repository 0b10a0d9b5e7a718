"""Detect parameter updates by hand from one rank's gradients alone.

`loss.backward()` and `p -= lr * p.grad` let replicas diverge silently: no optimizer step could refuse.

An iteration without mw.backward that runs another backward, or writes parameters, is suspicious: after it, a sum of the
parameters is compared over the ranks, through the store.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meshwise.compat.complex_numbers import as_real
from meshwise.compat.reducer import version
from meshwise.engine.engine import Engine
from meshwise.engine.loops import LoopRead
from meshwise.engine.program import Program
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.transfer.agreement import agree

MOST = 5  # comparisons of a loop: what writes gradients and leaves replicas alike (an attack on inputs) goes on
BATCHES = 4  # at the beginning of a loop
GRACE = 10.0  # seconds for the other ranks; where they do not come, it is not known
_made = itertools.count()  # every rank makes its engines in the same order


class HandUpdates:
    """Checks between batches whether the ranks' parameters have diverged."""

    def __init__(self, program: Program) -> None:
        self._program, self._key = program, f"meshwise/by-hand/{next(_made)}"
        self._written: list[int] = []
        self._backwards_of_any = [0]  # mw.backward's or not
        self._hooks: list[RemovableHandle] = []
        self._backwards = -1
        self._compared = self._compared_in_it = 0

    def begins(self) -> None:
        """Allow `MOST` more comparisons of the ranks' parameters. This is called when a new program begins. It is also
        called for the first loop at a source line, and again for its 2nd, 4th, 8th ... repetition."""
        self._compared_in_it = 0

    def batch_given(self, loop: LoopRead, batch: object) -> None:
        """Compare the parameters of all ranks if the program may have updated them by hand. Raise UsageError if they
        differ. An iteration is suspicious if it did not call `mw.backward`, but ran another backward or changed
        parameters."""
        program = self._program
        if program.backwards != self._backwards:
            self._backwards, self._written = program.backwards, []
            if self._backwards > 0:
                self.loop_ends(loop)
                return
        if self._compared_in_it == MOST or program.reduction is None or program.plan is None:
            return
        if program.plan.parameters_divided:
            return
        parameters = [p for p in program.named_parameters().values() if p.requires_grad]
        if not self._hooks:
            count = functools.partial(_count, self._backwards_of_any)
            self._hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters[:1] + parameters[-1:]]
        written = [*self._backwards_of_any, *map(version, parameters)]
        before, self._written = self._written, written
        if before and len(before) == len(written) and before != written:
            self._compared += 1
            self._compared_in_it += 1
            self._compare(parameters)
        if loop.given == BATCHES:
            self.loop_ends(loop)

    def loop_ends(self, loop: LoopRead) -> None:
        """Stop checking this loop, because it has ended or has been checked long enough."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _compare(self, parameters: Sequence[Tensor]) -> None:
        total = torch.stack([as_real(p.detach()).double().sum().cpu() for p in parameters]).sum().item()
        if agree(f"{self._key}/{self._compared}", repr(total), self._program.world.size, GRACE):
            raise UsageError(
                f"{user_place()}: the ranks' parameters have diverged, because this loop updates them by hand from the "
                "gradients of one rank alone. Write mw.backward(loss) instead of loss.backward(): .grad is then the "
                "gradient of the whole batch."
            )


def _count(backwards: list[int], p: Tensor) -> None:
    backwards[0] += 1


def watch(engine: Engine) -> None:
    """Add the guard `HandUpdates` to an engine that runs a script on several ranks. Do nothing for the engine of a job,
    or on one device."""
    if engine.script and engine.world.size > 1:
        updates = HandUpdates(engine.program)
        engine.events.listen(updates, batches=BATCHES, anew=updates.begins)
