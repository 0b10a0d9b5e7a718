"""Spans: what a rank did from when to when."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "data",
    "transfer",
    "forward",
    "backward",
    "communication",
    "waiting",
    "optimizer",
    "evaluate",
    "checkpoint",
    "idle",
)


@dataclass(frozen=True)
class Span:
    """One stretch of work. Times are nanoseconds of the rank's own monotonic clock; `bytes` 0 means nothing moved."""

    kind: str
    start: int
    end: int
    step: int
    name: str = ""
    bytes: int = 0
