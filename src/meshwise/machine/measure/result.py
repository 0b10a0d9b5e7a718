"""What was measured of one path or collective: its times by size, and whether the bytes arrived."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.spec.timings import Timings


@dataclass(frozen=True)
class PathResult:
    """One path or collective.

    operation: `copy`, `copy both ways`, `one-to-all`, `all-to-one`, or a collective (`all-reduce`). source and target:
    names of devices, `host`, or `node0` for a host; empty for a collective. path: `pinned`, `pageable`, `peer`,
    `staged`, `gloo`, `nccl`. ranks: devices that take part. timings: sizes are bytes one way, for a collective of the
    full tensor. wrong: where the bytes differed, in words; None when all of them were right.
    """

    operation: str
    source: str
    target: str
    path: str
    ranks: int
    timings: Timings
    wrong: str | None = None
    note: str = ""
    """What else to know, such as that the budget was spent before the largest size."""
