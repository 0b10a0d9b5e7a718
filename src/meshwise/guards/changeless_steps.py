"""Warn of optimizer steps before the first `mw.backward`: they change nothing.

Tested in tests/engine/test_step_mistakes.py.
"""

from __future__ import annotations

from torch.optim import Optimizer

from meshwise.engine.engine import Engine
from meshwise.parallel.step_hooks import held_parameters
from meshwise.spec.user_code import user_place


class ChangelessSteps:
    """Checks a program's optimizer steps until its first `mw.backward`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step_ends(self, optimizer: Optimizer) -> None:
        """Warn of a step without gradients, if inside a loop: before a loop, some programs prepare state that way."""
        program = self._engine.program
        if program.backwards > program.began or self._engine.part is None:
            return
        if all(p.grad is None for p in held_parameters(optimizer)):
            self._engine.notify(
                f"{user_place()}: this step changes nothing: mw.backward(loss) was not called before it."
            )


def watch(engine: Engine) -> None:
    """Attach this guard, if the engine runs a script."""
    if engine.script:
        engine.events.listen(ChangelessSteps(engine), backwards=1)
