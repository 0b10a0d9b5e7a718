"""Check the first losses of each loop for a wrong reduction.

The first losses of a program are checked too. A wrong reduction is warned of, or rejected.

`meshwise check` needs no such warning: it compares the numbers.

Tested in tests/slips/test_slips.py and tests/guards/test_coupled_losses.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwise.compat.dispatch import rehearsing
from meshwise.data.order import BatchSlice
from meshwise.engine.engine import Engine
from meshwise.engine.weighing import check_reduction
from meshwise.guards.coupled import CoupledLosses
from meshwise.spec.user_code import user_place

BACKWARDS = 9  # a program may have several, and none becomes another one later


class LossLooks:
    """Checks the losses of a program's first backwards on several ranks for mistakes in how they are reduced."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.coupled = engine, CoupledLosses(engine.program)

    def begins(self) -> None:
        """Start again to check the next few losses for mistakes in their reduction. This is called when a new program
        begins. It is also called when a loop begins for the 1st, 2nd, 4th, 8th ... time at its source line."""
        self.coupled.begins()

    def close(self) -> None:
        """Stop checking losses. `CoupledLosses` also stops watching whether the program itself calls collectives."""
        self.coupled.close()

    def backward_begins(
        self, loss: Any, part: BatchSlice | None, weight: Tensor | float | None, reduction: str | None, where: str
    ) -> None:
        """Check a loss before its backward.

        loss: a script's loss, or the result of a job's loss function.
        where: the name of the job's loss function; empty in a script."""
        engine = self._engine
        if engine.watcher is not None or part is None or part.whole or rehearsing():
            return
        samples, verb = part.samples if weight is None else 0, "Job(…, " if where else "mw.backward(loss, "
        place = where or user_place()
        engine.notify(check_reduction(loss, reduction, engine.world.size, place, verb, samples))
        engine.notify(self.coupled.look(loss, part, engine.plan, where))


def watch(engine: Engine) -> None:
    """Add the guard `LossLooks` to an engine that runs on several ranks. Do nothing on one device."""
    if engine.world.size > 1:
        looks = LossLooks(engine)
        engine.events.listen(looks, backwards=BACKWARDS, anew=looks.begins)
        engine.ends.callback(looks.close)


def losses_apart(engine: Engine) -> bool:
    """Return True if, in every loss checked so far, each term depends on one sample only. The loss is then a mean or a
    sum of such terms."""
    looks = engine.events.find(LossLooks)
    return looks is not None and looks.coupled.apart
