"""Define a plan's estimated cost: step time and memory, with intervals.

Both are also split into parts. `edits` says what small changes of the plan would save.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from meshwise.spec.plan import Plan

FITS, TOO_CLOSE, TOO_LARGE, UNKNOWN = "fits", "too close to call", "does not fit", "unknown"
VERDICTS = (FITS, TOO_CLOSE, UNKNOWN, TOO_LARGE)


@dataclass(frozen=True)
class Range:
    """A predicted figure and its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a plan needs on the rank that needs the most, in bytes."""

    rank: int
    total: Range
    allocated: int
    categories: Mapping[str, int]
    reserved: int
    host: int
    capacity: int | None

    @property
    def filled(self) -> float:
        """The fraction of the device's memory that is needed."""
        return self.total.value / (self.capacity or 1)

    @property
    def verdict(self) -> str:
        """One of VERDICTS. A plan fits if the upper end of its memory interval is within the capacity."""
        if self.capacity is None:
            return UNKNOWN
        if self.total.high <= self.capacity:
            return FITS
        return TOO_LARGE if self.total.low > self.capacity else TOO_CLOSE


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of one plan on one machine.

    seconds: the time of a step. None if it is unknown.
    parts: the seconds of the slowest rank by kind of time, such as `computing`.
    unknown: the reason why `seconds` is unknown.
    notes: remarks on the program under this plan.
    samples: the size of the global batch.
    dtype: the dtype in which most FLOPs are computed. An empty string if the step has no FLOPs.
    balanced: the shares of the batch at which all replicas would compute for the same time. Empty if all devices are
    equal.
    """

    plan: Plan
    memory: MemoryEstimate
    seconds: Range | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    unknown: str = ""
    notes: tuple[str, ...] = ()
    samples: int = 0
    dtype: str = ""
    balanced: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """Samples per second. None if the number of samples or the step time is unknown."""
        return self.samples / self.seconds.value if self.samples and self.seconds and self.seconds.value else None

    @property
    def rank_key(self) -> tuple[int, float, float]:
        """A sort key that puts the best estimate first: by verdict, then time, then memory."""
        seconds = float("inf") if self.seconds is None else self.seconds.value
        return VERDICTS.index(self.memory.verdict), seconds, self.memory.total.value


@dataclass(frozen=True)
class Edit:
    """A small change of a plan and its effect."""

    changes: dict[str, Any]
    memory: float
    seconds: float | None
    verdict: str


def edits(of: Estimate, others: Sequence[Estimate]) -> list[Edit]:
    """Return the small changes that turn `of` into one of `others` and save memory or time, the fastest first."""
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
