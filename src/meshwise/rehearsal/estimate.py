"""Define a plan's estimated cost: step time and memory, with intervals.

Each is given with its parts.

Tested in tests/rehearsal/test_estimate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.spec.plan import Plan

FITS, TOO_CLOSE, TOO_LARGE, UNKNOWN = "fits", "too close to call", "does not fit", "unknown"
VERDICTS = (FITS, TOO_CLOSE, UNKNOWN, TOO_LARGE)


@dataclass(frozen=True)
class Range:
    """A figure and its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that needs most. total: of the device, with what lies outside of the allocator. allocated: the
    peak of tensors, by category what there is of each at that moment. reserved: what the allocator holds for them.
    host: the peak in the host's memory. capacity: of the device; None where it is not known. kept: of a job, what
    `--redundancy 1` keeps of this rank's state in the host's memory."""

    rank: int
    total: Range
    allocated: int
    categories: Mapping[str, int]
    reserved: int
    host: int
    capacity: int | None
    kept: int = 0

    @property
    def filled(self) -> float:
        """How full the device is; of one whose capacity is not known, bytes."""
        return self.total.value / (self.capacity or 1)

    @property
    def verdict(self) -> str:
        """One of VERDICTS: a plan fits where the upper end of the interval does."""
        if self.capacity is None:
            return UNKNOWN
        if self.total.high <= self.capacity:
            return FITS
        return TOO_LARGE if self.total.low > self.capacity else TOO_CLOSE


@dataclass(frozen=True)
class Estimate:
    """One plan on one machine. seconds: of a step; None where the machine's speed is not known, with `unknown` why.
    parts: seconds of the step by what the slowest rank does in them. notes: what the plan says of the program. samples:
    of the global batch. balanced: shares of the batch with which unequal devices would compute as long as each other;
    empty where all are alike."""

    plan: Plan
    memory: MemoryEstimate
    seconds: Range | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    unknown: str = ""
    notes: tuple[str, ...] = ()
    samples: int = 0
    balanced: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """Samples a second, where both are known."""
        return self.samples / self.seconds.value if self.samples and self.seconds and self.seconds.value else None

    @property
    def rank_key(self) -> tuple[int, float, float]:
        """Smaller is better: what fits first, then the fastest."""
        seconds = float("inf") if self.seconds is None else self.seconds.value
        return VERDICTS.index(self.memory.verdict), seconds, self.memory.total.value
