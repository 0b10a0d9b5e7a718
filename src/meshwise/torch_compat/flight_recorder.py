"""Read the progress of a rank's collectives from torch's flight recorder.

On a GPU a rank runs ahead of its device, so its own progress says little about what the device waits for. NCCL's
watchdog follows each collective by CUDA events, and the recorder stores each group's progress. Its getter
`_dump_fr_trace_json` is private (torch 2.11 and later). The buffer is on by default; TORCH_FR_BUFFER_SIZE=0 (formerly
TORCH_NCCL_TRACE_BUFFER_SIZE) turns it off. Whether a collective has begun is known only with
TORCH_NCCL_ENABLE_TIMING=1.
Based on torch 2.13: `distributed/flight_recorder`, and the dump of a gloo group, which has no states. Two threads
complete the collectives of a gloo group, and its status keeps the number that was written last. This may not be the
largest one, so the entries are read too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank has come in one process group. The collectives of a group are counted from 1.

    enqueued: the number of the newest collective that the rank has enqueued.
    begun: the number of the newest one that has begun on the device; None if unknown.
    completed: the number of the newest one that is completed.
    name: the name of the first incomplete collective, such as `all_reduce`; empty if there is none or if it is
    unknown."""

    group: str
    enqueued: int
    begun: int | None
    completed: int
    name: str = ""

    def __str__(self) -> str:
        where = f"{self.name or 'collective'} {self.completed + 1} of group {self.group}"
        if self.enqueued <= self.completed:
            return f"all {self.completed} collectives of group {self.group} are completed"
        if self.begun is None:
            return f"{where} is enqueued and not completed"
        state = "begun and is not completed" if self.begun > self.completed else "not begun on the device"
        return f"{where} has {state}"


def progress() -> list[GroupProgress]:
    """Return this rank's progress in each process group; an empty list if torch's recorder cannot be read."""
    getter: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return [] if getter is None else read_progress(getter())


def read_progress(dump: bytes) -> list[GroupProgress]:
    """Return how far this rank has come in each process group, given a JSON dump of torch's flight recorder."""
    try:
        told = json.loads(dump)
        return [_group(key, status, told.get("entries", [])) for key, status in told.get("pg_status", {}).items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _group(key: str, status: Mapping[str, Any], entries: list[Mapping[str, Any]]) -> GroupProgress:
    enqueued, begun, completed = (
        max(int(status[f"last_{which}_collective"]), -1) for which in ("enqueued", "started", "completed")
    )
    own = [entry for entry in entries if str(entry.get("pg_id")) == key]
    over = [e["collective_seq_id"] for e in own if e.get("retired") and not e.get("is_p2p")]
    completed = max([completed, *over])
    described = next((str(entry["process_group"][1]) for entry in own if entry["process_group"][1]), "")
    names = (e["profiling_name"] for e in own if not e.get("is_p2p") and e["collective_seq_id"] == completed + 1)
    name = str(next(names, "")).partition(":")[2]
    return GroupProgress(described or key, max(enqueued, 0), begun if begun >= 0 else None, max(completed, 0), name)
