"""What is noted around the steps of a script's optimizers: the verb, the phase, and a step that changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from meshwise.parallel.step_hooks import Order, Subscription, held_parameters
from meshwise.spec.user_code import user_place
from meshwise.training.phases import Phases
from meshwise.training.program import Program
from meshwise.workers.verb_log import came_to


def note_steps(
    program: Program, phases: Phases, in_loop: Callable[[], bool], notify: Callable[[str], None]
) -> list[Subscription]:
    """Subscribe to the steps of the program's optimizers. in_loop: whether a batch is being worked on: before a loop,
    some programs step without gradients to prepare state."""

    def ends(optimizer: Optimizer) -> None:
        if program.backwards > program.began or not in_loop():
            return
        if all(p.grad is None for p in held_parameters(optimizer)):
            notify(f"{user_place()}: this step changes nothing: mw.backward(loss) was not called before it.")

    return [
        program.at_steps(Order.GUARD, lambda _: came_to("optimizer.step"), ends),
        program.at_steps(Order.PHASE, phases.optimizer_begins, phases.optimizer_ends),
    ]
