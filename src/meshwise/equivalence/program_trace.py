"""What a program did while its engine was watched, and whether there is anything in it to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwise.equivalence.diagnose_evaluation import UNSUMMED
from meshwise.equivalence.trace import Trace
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.keyed import Draw

Draws = Sequence[Sequence[Sequence[Draw]]]
"""What one device drew: step -> microbatch -> draws."""


@dataclass
class ProgramTrace:
    """What a program did.

    plan: that of its models; None when it distributed none. trace: None when there was no batch. draws: the random
    draws of every step. backwards: how many there were. unsummed: loops over a loader without a backward and without
    `mw.sum`, counted from 1.
    """

    plan: Plan | None = None
    trace: Trace | None = None
    draws: list[list[list[Draw]]] = field(default_factory=list)
    backwards: int = 0
    unsummed: list[int] = field(default_factory=list)


def trace_to_compare(found: ProgramTrace, script: str) -> Trace:
    """What there is to compare. Raises UsageError, with what to write, for a script without anything."""
    if found.plan is None:
        raise UsageError(
            f"{script}: mw.distribute was given no model, so there is nothing to check. Write "
            "model, optimizer, loader = mw.distribute(model, optimizer, loader) before the loop."
        )
    if found.trace is None:
        raise UsageError(
            f"{script}: no loop ran over a distributed loader. Give the DataLoader to mw.distribute too, and loop over "
            "what comes back."
        )
    if found.backwards == 0:
        raise UsageError(f"{script}: mw.backward was never called. Write mw.backward(loss) instead of loss.backward().")
    if not found.trace.steps:
        raise UsageError(
            f"{script}: no optimizer of the model's parameters made a step after {found.backwards} calls of "
            "mw.backward. Make the optimizer of the parameters of the model that is distributed, and call its step()."
        )
    return found.trace


def check_same_steps(one: Trace, many: Trace, script: str) -> None:
    """Raises UsageError for a script that makes another number of steps under the plan."""
    if len(one.steps) != len(many.steps):
        raise UsageError(
            f"{script}: made {len(one.steps)} optimizer steps on one device and {len(many.steps)} under the plan, so "
            "they cannot be compared. Let the number of steps not depend on the number of devices (mw.world_size())."
        )


def with_unsummed(one: Trace, many: Trace, unsummed: Sequence[int]) -> tuple[Trace, Trace]:
    """Both sides, with what a loop without `mw.sum` would give: of one rank only under the plan."""
    names = [f"loop {loop} over a loader, {UNSUMMED}" for loop in unsummed]
    mine, theirs = ({**trace.evaluation, **dict.fromkeys(names, x)} for trace, x in ((one, 1.0), (many, math.nan)))
    return replace(one, evaluation=mine), replace(many, evaluation=theirs)
