"""Price changing one thing in a plan, in bytes and time.

Tested in tests/rehearsal/test_search.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwise.rehearsal.estimate import Estimate
from meshwise.spec.plan import Plan


@dataclass(frozen=True)
class Edit:
    """A small change of a plan and its effect.

    changes: the changed fields with their new values.
    memory: the additional bytes.
    seconds: the additional time relative to the step, e.g. 0.1 if the step takes 10 % longer. None if unknown.
    verdict: whether the changed plan fits in memory, one of `estimate.VERDICTS`.
    """

    changes: dict[str, Any]
    memory: float
    seconds: float | None
    verdict: str


def edits(of: Estimate, others: Sequence[Estimate]) -> list[Edit]:
    """Return small changes of a plan that save memory or time, the fastest first."""
    found: list[Edit] = []
    for other in others:
        changes = _changes(of.plan, other.plan)
        if not 0 < len(changes) <= 2 or other.plan.devices != of.plan.devices:
            continue
        more = None
        if of.seconds is not None and other.seconds is not None:
            more = other.seconds.value / of.seconds.value - 1
        memory = other.memory.total.value - of.memory.total.value
        if memory < 0 or (more is not None and more < 0):
            found.append(Edit(changes, memory, more, other.memory.verdict))
    found.sort(key=lambda edit: (0.0 if edit.seconds is None else edit.seconds, edit.memory))
    least = list(itertools.accumulate((edit.memory for edit in found), min, initial=float("inf")))
    return [edit for edit, before in zip(found, least, strict=False) if edit.memory < before]


def _changes(plan: Plan, other: Plan) -> dict[str, Any]:
    values = {field.name: getattr(other, field.name) for field in fields(other)}
    return {name: value for name, value in values.items() if value != getattr(plan, name)}
