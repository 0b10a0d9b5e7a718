"""Define spans: kinds, lanes, and the table of a timeline.

Spans are measured or predicted.

Tested in tests/timeline/views/test_chrome_trace.py.
"""

from __future__ import annotations

import functools
import re

import numpy as np

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
LANES = ("main", "blocks", "host", "communication")
"""Rows of a rank, from top to bottom: phases and blocking collectives · blocks of the model · work of the host while an
accelerator computes · collectives that overlap with computing."""

KIND = {kind: code for code, kind in enumerate(KINDS)}
LANE = {lane: code for code, lane in enumerate(LANES)}
NO_COLLECTIVE = -1
WIDTH = 6
"""Numbers that a recorder keeps per span: code, start, end, step, bytes, collective."""
_STAGE = re.compile(r"stage (\d+), microbatch (\d+)")


@functools.cache
def collective_name(operation: str, of: str = "") -> str:
    """Return the name of a collective's span: `all-reduce of gradients`."""
    return f"{operation} of {of}" if of else operation


def operation_and_source(name: str) -> tuple[str, str]:
    """Split a collective's name into `all-reduce` and `gradients`; the second is "" if the name has no ` of `."""
    operation, _, of = name.partition(" of ")
    return operation, of


def stage_name(stage: int, microbatch: int) -> str:
    """Return the name of a forward's or backward's span in a pipeline stage."""
    return f"stage {stage}, microbatch {microbatch}"


def stage_and_microbatch(name: str) -> tuple[int, int] | None:
    """Read stage and microbatch from a span's name; None for a span outside any stage."""
    found = _STAGE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("name", "<i4"),
        ("step", "<i4"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("bytes", "<i8"),
        ("collective", "<i8"),
    ]
)
"""One span per row. kind, lane: index in KINDS, LANES. name: index in the timeline's names. step: from 1; 0 before the
first. start, end: nanoseconds. bytes: number moved or saved, 0 for none. collective: the number of a collective, the
same on every rank, or -1."""
