"""Check a program's first losses for wrong reductions and coupled samples.

A contrastive loss couples samples: each rank computes it over its own samples, and the mean over ranks is not the loss
of one device. This is not checked for losses that the program itself joins by collectives, for divided
models, and under plans that offload activations. `meshwise check` needs no such warning: it compares the numbers.
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
from meshwise.transfer.traced import Foreign

BACKWARDS = 9  # how many backwards to check: by then, a program has usually shown all of its losses
COUPLING = 5  # backwards to test for coupling. The first is not tested, since collectives before it were not seen
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
        self.close()

    def close(self) -> bool:
        """Stop watching for collectives. Return whether the program called one itself since the last backward."""
        foreign, self._foreign = self._foreign, None
        return foreign is not None and foreign.close()

    def backward_begins(
        self, loss: Any, part: BatchSlice | None, weight: Tensor | float | None, reduction: str | None, where: str
    ) -> None:
        """Check a loss before its backward."""
        engine = self._engine
        if engine.watcher is not None or part is None or part.whole or rehearsing():
            return
        samples, verb = part.samples if weight is None else 0, "Job(…, " if where else "mw.backward(loss, "
        place = where or user_place()
        engine.notify(check_reduction(loss, reduction, engine.world.size, place, verb, samples))
        if self._looks < COUPLING and engine.program.joined_at is None and self._is_coupled(loss, part):
            engine.notify(COUPLED.format(place=place, ranks=engine.plan.devices))

    def _is_coupled(self, loss: Any, part: BatchSlice) -> bool:
        """Return whether the loss has terms that depend on several samples at once."""
        plan = self._engine.plan
        self._looks += 1
        joined = self._foreign is None or self.close()
        self._foreign = Foreign() if self._looks < COUPLING else None
        loss = loss[0] if isinstance(loss, tuple) and loss else loss
        if joined or not isinstance(loss, Tensor) or plan.parameters_divided or plan.offload:
            return False
        return couples_samples(loss, len(part.indices))
