"""Check a program's first losses for wrong reductions and coupled samples.

A contrastive loss couples samples: each rank computes it over its own samples, and the mean over ranks is not the loss
of one device. This is not checked for losses that the program itself joins by collectives, and under plans that offload
activations. `meshwise check` needs no such warning: it compares the numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.training.autograd.coupled_loss import couples_samples, notice_hooks
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.weighing import check_reduction
from meshwise.transfer import stages
from meshwise.transfer.traced import Foreign

BACKWARDS = 9  # how many backwards to check: by then, a program has usually shown all of its losses
COUPLED = (
    "{place}: this loss couples the samples of a batch: it is not a mean or sum of one value per sample, but for "
    "example of similarities, the hardest samples, or a dice, root or correlation over the batch. Each of the {ranks} "
    "ranks computes it over its own samples, so training differs from one device; meshwise check shows by how much. "
    "Build the loss from sums over ranks, mw.sum(x, grad=True), or from one value per sample, and take the mean."
)


class LossLooks:
    """Checks the losses of the first backwards of a program, and of each of its loops."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._looks = engine, 0
        self._foreign: Foreign | None = None
        notice_hooks()

    def begins(self) -> None:
        """Check the losses of the next few backwards, as at the start."""
        self._looks, self._engine.program.joined_at = 0, None

    def batch_given(self, *_: Any) -> None:
        """Watch for collectives in the forward, since those of a backward reduce gradients."""
        self.close()
        self._foreign = Foreign()

    def close(self) -> bool:
        """Stop watching for collectives. Return whether the program called one itself meanwhile."""
        foreign, self._foreign = self._foreign, None
        return foreign is not None and foreign.close()

    def backward_begins(
        self, loss: Any, part: BatchSlice | None, weight: Tensor | float | None, reduction: str | None, where: str
    ) -> None:
        """Check a loss before its backward."""
        engine, self._looks = self._engine, self._looks + 1
        joined = self._foreign is None or self.close() or engine.program.joined_at is not None
        self._foreign = Foreign() if self._looks < BACKWARDS else None  # no batch is given where the program splits it
        if part is None or part.whole or rehearsing():
            return
        samples, verb = part.samples if weight is None else 0, "Job(…, " if where else "mw.backward(loss, "
        place, pipe = where or user_place(), stages.pipe()
        rank = 0 if pipe is None else min(pipe.same_stage)  # only the last stage has a loss
        engine.notify(check_reduction(loss, reduction, engine.world.size, place, verb, samples), rank)
        loss = loss[0] if isinstance(loss, tuple) and loss else loss
        skipped = joined or engine.watcher is not None or engine.plan.offload or type(loss) is not Tensor
        if not skipped and couples_samples(loss, len(part.indices)):
            engine.notify(COUPLED.format(place=place, ranks=engine.world.size), rank)
