"""The log of one rank, read back: session by session, with its spans still packed.

Tested in tests/timeline/test_span_log.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.records.files import read_lines
from meshwise.timeline.pack import VERSION, Column, unpack

Kind = tuple[str, str, str]
"""Kind, lane and name of a span."""


@dataclass
class RankLog:
    """One rank's log of one session. `damaged` counts the lines that could not be read."""

    rank: int
    world: int
    device: str
    host: str
    unix: float
    """When the log began: seconds since 1970, and what the rank's own clock then was (ns)."""
    clock: int
    program: str = ""
    """`plain` of a program that uses none of our verbs, which was recorded from outside."""
    session: int = 0
    packed: list[tuple[int, str]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    counters: list[tuple[int, int, int, str, float]] = field(default_factory=list)
    round_trips: list[tuple[int, int, int]] = field(default_factory=list)
    dtypes: dict[tuple[str, int], str] = field(default_factory=dict)
    """What collectives moved, by their name and bytes."""
    end: int | None = None
    overhead_seconds: float = 0.0
    dropped: int = 0
    damaged: int = 0

    @property
    def spans(self) -> int:
        """How many spans its blocks claim to have."""
        return sum(count for count, _ in self.packed)

    def blocks(self) -> Iterator[tuple[Column, ...]]:
        """The columns of its spans (see `pack.unpack`), block by block; each is forgotten here once it was given."""
        while self.packed:
            count, text = self.packed.pop(0)
            try:
                block = unpack(text, count)
            except ValueError:
                self.damaged += 1
                continue
            if count and int(block[0].min()) >= 0 and int(block[0].max()) < len(self.kinds):
                yield block
            elif count:
                self.damaged += 1

    def last_known(self) -> int:
        """The latest moment that it records besides its spans (ns, the rank's clock)."""
        return max([self.clock, *(counter[0] for counter in self.counters[-1:]), *([self.end] if self.end else [])])


def read_rank_log(path: Path, last_blocks: int | None = None) -> tuple[list[RankLog], str]:
    """The sessions of a rank's log, and a sentence on what of it cannot be read ("" for nothing).

    last_blocks: keep only so many of the newest blocks of spans.
    """
    logs: list[RankLog] = []
    other = ""
    for line in read_lines(path):
        try:
            if "log" in line:
                other = "" if line["log"] == VERSION else str(line["log"])
                if not other:
                    logs.append(_begun(line))
            elif "kind" in line and not logs:
                other = "1"
            elif logs and not other:
                _take(logs[-1], line)
        except (TypeError, ValueError, KeyError):
            if logs:
                logs[-1].damaged += 1
    if last_blocks is not None and logs:
        logs[-1].packed = logs[-1].packed[-last_blocks:]
        for log in logs[:-1]:
            log.packed = []
    return logs, _unread(path, other, logs)


def rank_of(path: Path) -> int:
    """The rank whose log a file is, by its name."""
    match = re.search(r"\d+", path.name)
    return int(match[0]) if match else 0


def _unread(path: Path, other: str, logs: list[RankLog]) -> str:
    if other:
        return (
            f"{path.parent.name}/{path.name} was written by another version of meshwise (log {other}; this one reads "
            f"{VERSION}): its spans are left out."
        )
    if not logs:
        return f"{path.parent.name}/{path.name} has no first line: rank {rank_of(path)} was cut off at its start."
    return ""


def _begun(line: dict[str, Any]) -> RankLog:
    return RankLog(
        rank=int(line["rank"]),
        world=int(line["world"]),
        device=str(line.get("device", "")),
        host=str(line.get("host", "")),
        unix=float(line["unix"]),
        clock=int(line["clock"]),
        program=str(line.get("program", "")),
    )


def _take(log: RankLog, line: dict[str, Any]) -> None:
    if "spans" in line:
        log.kinds += [(str(kind), str(lane), str(name)) for kind, lane, name in line.get("names", [])]
        for code, size, dtype in line.get("dtypes", []):
            log.dtypes[log.kinds[code][2], int(size)] = str(dtype)
        log.dropped = int(line.get("dropped", log.dropped))
        log.packed.append((int(line["spans"]), str(line["data"])))
    elif "counters" in line:
        for time, step, phase, name, value in line["counters"]:
            if value is not None:
                log.counters.append((int(time), int(step), int(phase), str(name), float(value)))
    elif "clock" in line:
        log.round_trips += [(int(sent), int(theirs), int(received)) for sent, theirs, received in line["clock"]]
    elif "end" in line:
        log.end = int(line["end"])
        log.overhead_seconds = float(line.get("cost", {}).get("cpu_seconds", 0.0))
