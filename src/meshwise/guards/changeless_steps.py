"""Warn of optimizer steps before the first `mw.backward`: they change nothing.

Tested in tests/engine/test_step_mistakes.py.
"""

from __future__ import annotations

from torch.optim import Optimizer

from meshwise.engine.engine import Engine
from meshwise.parallel.step_hooks import held_parameters
from meshwise.spec.user_code import user_place


class ChangelessSteps:
    """Warns if an optimizer step changes nothing. The reason is that the program did not call `mw.backward` before the
    step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step_ends(self, optimizer: Optimizer) -> None:
        """Warn if an optimizer has made a step without any gradients inside a loop. Before a loop such a step is
        allowed, because some programs use it to create the optimizer's state."""
        program = self._engine.program
        if program.backwards > program.began or self._engine.part is None:
            return
        if all(p.grad is None for p in held_parameters(optimizer)):
            self._engine.notify(
                f"{user_place()}: this step changes nothing: mw.backward(loss) was not called before it."
            )


def watch(engine: Engine) -> None:
    """Add the guard `ChangelessSteps` to an engine that runs a script. Do nothing for the engine of a job."""
    if engine.script:
        engine.events.listen(ChangelessSteps(engine), backwards=1)
