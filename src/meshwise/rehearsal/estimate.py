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
    """A predicted figure and its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the rank that needs most, in bytes. total: all that it takes of the device. allocated: the peak of its
    tensors. categories: that peak by category. reserved: what the allocator takes for them. host: the peak in host
    memory. capacity: of the device; None if unknown. kept: for a job, what `--redundancy 1` keeps of this rank's state
    in host memory."""

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
        """The share of the device's memory that is needed; if its capacity is unknown, the bytes that are needed."""
        return self.total.value / (self.capacity or 1)

    @property
    def verdict(self) -> str:
        """One of VERDICTS: a plan fits if the upper end of its interval is within the capacity."""
        if self.capacity is None:
            return UNKNOWN
        if self.total.high <= self.capacity:
            return FITS
        return TOO_LARGE if self.total.low > self.capacity else TOO_CLOSE


@dataclass(frozen=True)
class Estimate:
    """The estimate of one plan on one machine. seconds: of a step; None if that is unknown, for the reason `unknown`.
    parts: seconds of the slowest rank by what it does. notes: remarks on the program under this plan. samples: of the
    global batch. dtype: in which most FLOPs are computed; empty if there are none. balanced: shares of the batch with
    which unequal devices would compute equally long; empty if all devices are equal."""

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
        """Samples per second; None if samples or seconds are unknown."""
        return self.samples / self.seconds.value if self.samples and self.seconds and self.seconds.value else None

    @property
    def rank_key(self) -> tuple[int, float, float]:
        """A key to sort estimates, best first: by verdict, then by time, then by memory."""
        seconds = float("inf") if self.seconds is None else self.seconds.value
        return VERDICTS.index(self.memory.verdict), seconds, self.memory.total.value
