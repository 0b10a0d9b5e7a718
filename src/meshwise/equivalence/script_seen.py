"""What was seen of a script that keeps its own loop, and whether there is anything in it to compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwise.equivalence.diagnose_evaluation import UNSUMMED
from meshwise.equivalence.trace import Trace
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.keyed import Draw


@dataclass
class Seen:
    """What a script did.

    plan: that of `mw.distribute`; None when no model was given to it. side: None when no loader gave a batch.
    draws: the random draws of every step. backwards: calls of `mw.backward`. unsummed: loops over a loader without a
    backward and without `mw.sum`.
    """

    plan: Plan | None = None
    side: Trace | None = None
    draws: list[list[list[Draw]]] = field(default_factory=list)
    backwards: int = 0
    loops: int = 0
    unsummed: list[int] = field(default_factory=list)


def check_seen(seen: Seen, script: Path) -> None:
    """Raises UsageError, with what to write, for a script that shows nothing to compare."""
    if seen.plan is None:
        raise UsageError(
            f"{script}: mw.distribute was given no model, so there is nothing to check. Write "
            "model, optimizer, loader = mw.distribute(model, optimizer, loader) before the loop."
        )
    if seen.side is None:
        raise UsageError(
            f"{script}: no loop ran over a distributed loader. Give the DataLoader to mw.distribute too, and loop over "
            "what comes back."
        )
    if seen.backwards == 0:
        raise UsageError(f"{script}: mw.backward was never called. Write mw.backward(loss) instead of loss.backward().")
    if not seen.side.steps:
        raise UsageError(
            f"{script}: no optimizer of the model's parameters made a step after {seen.backwards} calls of "
            "mw.backward. Make the optimizer of the parameters of the model that is distributed, and call its step()."
        )


def check_same_steps(one: Seen, many: Seen, script: Path) -> None:
    """Raises UsageError for a script that makes another number of steps under the plan."""
    counts = [len(side.steps) for side in (one.side, many.side) if isinstance(side, Trace)]
    if counts[0] != counts[1]:
        raise UsageError(
            f"{script}: made {counts[0]} optimizer steps on one device and {counts[1]} under the plan, so they cannot "
            "be compared. Let the number of steps not depend on the number of devices (mw.world_size())."
        )


def with_unsummed(one: Seen, plan: Seen) -> tuple[Trace | None, Trace | None]:
    """Both sides, with what a loop without `mw.sum` would give: of one rank alone under the plan."""
    sides = []
    for seen, number in ((one, 1.0), (plan, math.nan)):
        found = {f"loop {loop} over a loader, {UNSUMMED}": number for loop in plan.unsummed}
        side = seen.side
        sides.append(None if side is None else replace(side, evaluation={**side.evaluation, **found}))
    return sides[0], sides[1]
