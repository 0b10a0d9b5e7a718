"""Commit a checkpoint of what failed ranks left in memory.

This module does not import torch.

Tested in tests/faults/test_restarts.py.
"""

from __future__ import annotations

from pathlib import Path

from meshwise.records import folder as names
from meshwise.records.left_parts import commit_parts, newest_whole, read_parts
from meshwise.workers.failure import Failure
from meshwise.workers.kept_memory import KeptMemory


def keep_left(folder: Path, kept: KeptMemory, attempt: int, failure: Failure | None) -> str:
    """Save the newest complete state that an attempt's ranks left in memory. Returns a sentence on an error, or ""."""
    if failure is None or failure.has_spoiled or (failure.kind == "raised" and failure.plain):
        return ""  # a value is wrong, and would be so there too
    left = [part for rank in range(kept.ranks) for part in read_parts(kept.path(rank), rank)]
    found = newest_whole(left, attempt)
    try:
        if found:
            commit_parts(folder / names.CHECKPOINTS, found)
    except OSError as error:
        return f"The state after step {found[0].step} could not be saved ({error.strerror}). "
    return ""
