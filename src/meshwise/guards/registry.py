"""List the guards, each looking for one mistake.

Each guard has a file. The engine imports none of them; only `agreed` sends values along with the loss.

If several guards would raise in one event, the first in this order does, the same on every rank.

Tested in tests/engine/test_events.py.
"""

from __future__ import annotations

from meshwise.engine.engine import Engine
from meshwise.engine.steps import follow_optimizers
from meshwise.guards import (
    agreed,
    behind_loop,
    by_hand,
    changeless_steps,
    draws_note,
    finite_losses,
    loss_looks,
    replicas,
    same_data,
    undistributed,
    unsummed,
)

WATCH = (
    finite_losses.watch,
    agreed.watch,  # what it compares is told to the losses
    by_hand.watch,
    loss_looks.watch,
    unsummed.watch,
    undistributed.watch,
    behind_loop.watch,
    changeless_steps.watch,
    same_data.watch,
    draws_note.watch,
    replicas.watch,
)


def attach(engine: Engine) -> Engine:
    """Add all guards to a new engine, and return the engine. A guard, such as `FiniteLosses`, looks for one kind of
    mistake in the program. The engine also gets hooks by which it notices each optimizer step."""
    follow_optimizers(engine)
    for watch in WATCH:
        watch(engine)
    return engine
