"""Warn of losses that couple the samples of a batch.

A contrastive loss is one: each rank computes it over its own samples, and the mean over ranks is not the loss of one
device. The warning comes once, on an early backward.

Not checked are losses that the program itself joins over the ranks by collectives, divided models, and plans that
offload activations.

Tested in tests/guards/test_coupled_losses.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwise.autograd.coupled_loss import couples_samples, notice_hooks
from meshwise.data.order import BatchSlice
from meshwise.engine.program import Program
from meshwise.spec.plan import Plan
from meshwise.spec.user_code import user_place
from meshwise.transfer.foreign import Foreign

LOOKED_AT = 5  # backwards; the first is passed by, since nothing is known of what was called before it
COUPLED = (
    "{place}: this loss couples the samples of a batch: it is not a mean or sum of one value per sample, but for "
    "example of similarities, the hardest samples, or a dice, root or correlation over the batch. Each of the {ranks} "
    "ranks computes it over its own samples, so training differs from one device; meshwise check shows by how much. "
    "Build the loss from sums over ranks, mw.sum(x, grad=True), or from one value per sample, and take the mean."
)


class CoupledLosses:
    """Checks the first losses of a program, and of each of its loops, for terms that depend on several samples at
    once."""

    def __init__(self, program: Program) -> None:
        self._program, self._looks = program, 0
        self._foreign: Foreign | None = None
        self._found = list[bool | None]()
        notice_hooks()

    def begins(self) -> None:
        """Start again to check the next few losses. This is called when a new program begins. It is also called when a
        loop begins for the 1st, 2nd, 4th, 8th ... time at its source line."""
        self._looks, self._program.joined_at = 0, None
        self._found.clear()
        self.close()

    @property
    def apart(self) -> bool:
        """Whether every loss checked so far is a mean or a sum of terms, each of which depends on one sample only."""
        return self._program.joined_at is None and bool(self._found) and all(found is False for found in self._found)

    def look(self, found: Any, part: BatchSlice, plan: Plan, where: str) -> str:
        """Return a warning if the loss has terms that depend on several samples at once; else an empty string.

        found: the loss, or a tuple of the loss and its weight.
        where: the name of a job's loss function, for the warning; empty in a script."""
        if self._looks == LOOKED_AT or self._program.joined_at is not None:
            return ""
        self._looks += 1
        joined = self._foreign is None or self.close()
        self._foreign = Foreign() if self._looks < LOOKED_AT else None
        loss = found[0] if isinstance(found, tuple) and found else found
        if joined or not isinstance(loss, Tensor) or plan.parameters_divided or plan.offload:
            return ""
        self._found.append(couples_samples(loss, len(part.indices)))
        if not self._found[-1]:
            return ""
        return COUPLED.format(place=where or user_place(), ranks=plan.devices)

    def close(self) -> bool:
        """Stop watching for collectives. Return whether the program itself has called a collective since the last call
        of `look`. Collectives that meshwise called do not count."""
        foreign, self._foreign = self._foreign, None
        return foreign is not None and foreign.close()
