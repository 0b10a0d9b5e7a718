"""Attach the guards, each looking for one mistake.

Each guard has its own file, which the engine does not import. Only `agreed` sends values along with the loss.

If several guards would raise in one event, the guard that was attached first raises, the same on every rank.
"""

from __future__ import annotations

import functools

from meshwise.training.engine.engine import Engine
from meshwise.training.engine.steps import follow_optimizers
from meshwise.training.guards.agreed import Agreed, held_alike
from meshwise.training.guards.finite_losses import FiniteLosses
from meshwise.training.guards.loss_looks import BACKWARDS, LossLooks
from meshwise.training.guards.replicas import UpdatesByHand
from meshwise.training.guards.same_data import SameData


def attach(engine: Engine) -> Engine:
    """Add the guards of all views to a new engine, and return it. A guard, such as `FiniteLosses`, finds one kind of
    mistake in the program. The engine also gets hooks by which it notices each optimizer step."""
    follow_optimizers(engine)
    listen, several, losses = engine.events.listen, engine.world.size > 1, None
    listen(SameData(engine))
    if several:
        looks = LossLooks(engine)
        listen(looks, backwards=BACKWARDS, anew=looks.begins, whole=())
        engine.ends.callback(looks.close)
    if several and engine.script:
        listen(UpdatesByHand(engine), batches=1, whole=())
    if engine.script:
        losses = FiniteLosses(engine)
        engine.phases.look = losses.look
        ends = ("backward_ends",)
        listen(losses, only=() if several else ends, whole=ends)  # on several ranks, Agreed checks the mean loss
    engine.carried = Agreed(engine.world, functools.partial(held_alike, engine.program), losses)
    return engine
