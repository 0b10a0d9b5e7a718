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
"""The rows in which the spans of a rank are drawn, from top to bottom: phases and blocking collectives, the model's
blocks, work of the host while an accelerator computes, and collectives that run while the rank computes."""

KIND = {kind: code for code, kind in enumerate(KINDS)}
LANE = {lane: code for code, lane in enumerate(LANES)}
NO_COLLECTIVE = -1
WIDTH = 6
"""Number of integers that a recorder keeps per span: code, start, end, step, bytes, collective."""
_STAGE = re.compile(r"stage (\d+), microbatch (\d+)")


@functools.cache
def collective_name(operation: str, of: str = "") -> str:
    """Build the name of a collective's span, such as `all-reduce of gradients`."""
    return f"{operation} of {of}" if of else operation


def operation_and_source(name: str) -> tuple[str, str]:
    """Split the name of a collective's span into the operation and the data that it sends, such as `all-reduce` and
    `gradients`. The second part is "" if the name does not contain ` of `."""
    operation, _, of = name.partition(" of ")
    return operation, of


def stage_name(stage: int, microbatch: int) -> str:
    """Build the name of the span of a forward or backward pass in a pipeline stage."""
    return f"stage {stage}, microbatch {microbatch}"


def stage_and_microbatch(name: str) -> tuple[int, int] | None:
    """Read the stage and the microbatch from a span's name. Returns None for a span that belongs to no stage."""
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
"""The fields of a span. `kind`, `lane` and `name` are indices: in KINDS, in LANES, and in `Timeline.names`. `start` and
`end` are in ns. `step` counts from 1, and is 0 before step 1. `bytes` is the size of the data that was sent or saved,
or 0. `collective` is the number of the collective, which is equal on all ranks, or -1."""
