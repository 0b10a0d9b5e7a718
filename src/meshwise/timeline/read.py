"""Read the logs of a run folder back as a Timeline: all ranks on one clock, and sentences on what is not there.

A log that was cut off, or that misses a block, gives what it has. A log of another version is left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.records import folder as names
from meshwise.records.lines import read_lines
from meshwise.timeline.align import ClockFit, causal_shifts, fit_clock, widened
from meshwise.timeline.arrivals import arrival_table
from meshwise.timeline.log import VERSION
from meshwise.timeline.pack import unpack
from meshwise.timeline.record import WIDTH
from meshwise.timeline.spans import KIND, LANE, SPAN
from meshwise.timeline.timeline import NO_PHASE, Clock, Counter, Rank, Session, Spans, Timeline

OF_SESSION = 1 << 40  # collectives are counted anew in every session
GONE = 10_000_000_000  # ns: of a run that says it is running, a rank silent for longer is taken for gone
Kind = tuple[str, str, str]


@dataclass
class _Log:
    """One rank's log of one session, as it was written."""

    head: dict[str, Any]
    session: int = 0
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    counters: list[list[Any]] = field(default_factory=list)
    clock: list[tuple[int, int, int]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    dropped: int = 0
    damaged: int = 0

    @property
    def rank(self) -> int:
        return int(self.head["rank"])

    @property
    def last(self) -> int:
        """The latest moment that it knows of (ns, the rank's clock)."""
        times = [int(self.head["clock"]), *(int(rows[:, 2].max()) for rows in self.rows if len(rows))]
        times += [int(counter[0]) for counter in self.counters[-1:]]
        return max([*times, int(self.end["end"])] if self.end else times)


def read_timeline(folder: Path, *, last_blocks: int | None = None) -> Timeline:
    """The timeline of the run in `folder`. Raises UsageError when it is no run folder.

    last_blocks: read only so many of the newest blocks of spans a rank, for a view of a run that goes on.
    """
    facts = names.read_run(folder)
    missing: list[str] = []
    logs: list[_Log] = []
    for path in sorted((folder / names.SPANS).glob("rank*.jsonl"), key=_rank_of):
        logs += _read_log(path, missing, last_blocks)
    world = _world(facts, logs)
    began = [float(session["began"]) for session in facts.get("sessions", [])]
    began = began or ([min(log.head.get("launched", log.head["unix"]) for log in logs)] if logs else [])
    for log in logs:  # the newest session that had begun when this log did; clocks of hosts may differ by a second
        log.session = max([i for i, start in enumerate(began) if start <= log.head["unix"] + 1.0], default=0)
    fits, origins = _clocks(logs, began)
    spans, kinds = _spans(logs, fits, origins)
    spans, clocks = _made_causal(spans, kinds, fits, logs)
    ranks = _ranks(logs, fits, origins)
    sessions = _sessions(facts, began, ranks, spans, logs)
    missing += _missing(facts, world, logs, spans, ranks, sessions)
    counters = (*_counters(logs, fits, origins), *_losses(folder, spans))
    return Timeline(spans, tuple(kinds), counters, tuple(ranks), tuple(clocks), tuple(sessions), tuple(missing), facts)


def _rank_of(path: Path) -> int:
    match = re.search(r"\d+", path.name)
    return int(match[0]) if match else 0


def _read_log(path: Path, missing: list[str], last_blocks: int | None) -> list[_Log]:
    logs: list[_Log] = []
    packed: list[tuple[_Log, dict[str, Any]]] = []
    other = ""
    for line in read_lines(path):
        if "log" in line:
            other = "" if line["log"] == VERSION else str(line["log"])
            if not other:
                logs.append(_Log(line))
        elif "kind" in line and not logs:
            other = "1"
        elif logs and not other:
            _take(logs[-1], line, packed)
    if other:
        missing.append(
            f"{names.SPANS}/{path.name} was written by another version of meshwise (log {other}; this one reads "
            f"{VERSION}): its spans are left out."
        )
    elif not logs:
        missing.append(f"{names.SPANS}/{path.name} has no first line: rank {_rank_of(path)} was cut off at its start.")
    for log, line in packed if last_blocks is None else packed[-last_blocks:]:
        try:
            log.rows.append(unpack(line["data"], int(line["spans"])))
        except (ValueError, TypeError):
            log.damaged += 1
    return logs


def _take(log: _Log, line: dict[str, Any], packed: list[tuple[_Log, dict[str, Any]]]) -> None:
    if "spans" in line:
        log.kinds += [(str(kind), str(lane), str(name)) for kind, lane, name in line.get("names", [])]
        log.dropped = int(line.get("dropped", log.dropped))
        packed.append((log, line))
    elif "counters" in line:
        log.counters += line["counters"]
    elif "clock" in line:
        log.clock += [(int(a), int(b), int(c)) for a, b, c in line["clock"]]
    elif "end" in line:
        log.end = line


def _world(facts: dict[str, Any], logs: Sequence[_Log]) -> int:
    return max(
        [int(facts.get("world", 0)), len(facts.get("devices", ())), *(int(log.head["world"]) for log in logs[-1:])],
        default=0,
    )


def _clocks(logs: Sequence[_Log], began: Sequence[float]) -> tuple[list[ClockFit], list[int]]:
    """For each log, the way to rank 0's clock, and what to subtract there so that the run begins at 0."""
    fits = [fit_clock(log.rank, log.clock) for log in logs]
    origins: dict[int, int] = {}
    for log, fit in zip(logs, fits, strict=True):
        if log.session not in origins:  # the lowest rank of the session says how the clock stood to the world's
            clock = int(fit.to_reference(np.array([log.head["clock"]]))[0])
            origins[log.session] = clock - round((float(log.head["unix"]) - began[0]) * 1e9)
    return fits, [origins[log.session] for log in logs]


def _spans(logs: Sequence[_Log], fits: Sequence[ClockFit], origins: Sequence[int]) -> tuple[Spans, list[str]]:
    found: dict[str, int] = {"": 0}
    tables = []
    for log, fit, origin in zip(logs, fits, origins, strict=True):
        rows = np.concatenate([*log.rows, np.empty((0, WIDTH), np.int64)])
        rows = rows[rows[:, 0] < len(log.kinds)]
        table = np.empty(len(rows), SPAN)
        table["rank"] = log.rank
        codes = [
            (KIND.get(kind, KIND["idle"]), LANE.get(lane, 0), found.setdefault(name, len(found)))
            for kind, lane, name in log.kinds
        ]
        of_code = np.array(codes, dtype=np.int64).reshape(-1, 3)[rows[:, 0]]
        table["kind"], table["lane"], table["name"] = of_code.T
        table["start"] = fit.to_reference(rows[:, 1]) - origin
        table["end"] = fit.to_reference(rows[:, 2]) - origin
        table["step"], table["bytes"] = rows[:, 3], rows[:, 4]
        table["collective"] = np.where(rows[:, 5] >= 0, rows[:, 5] + log.session * OF_SESSION, rows[:, 5])
        tables.append(table)
    spans = np.concatenate([*tables, np.empty(0, SPAN)])
    # Of spans that begin together the longest comes first: it holds the others.
    return spans[np.lexsort((-spans["end"], spans["start"], spans["rank"]))], list(found)


def _made_causal(
    spans: Spans, names: Sequence[str], fits: Sequence[ClockFit], logs: Sequence[_Log]
) -> tuple[Spans, list[Clock]]:
    """Shift whole clocks where a collective would end before its last arrival; the clocks as they then stand."""
    clocks: dict[int, Clock] = {}
    for fit, log in zip(fits, logs, strict=True):
        clock = clocks.get(log.rank)
        clocks[log.rank] = fit.clock if clock is None or fit.clock.error > clock.error else clock
    table = arrival_table(spans, names)
    if len(table.ranks) > 1:
        shifts = causal_shifts(table.arrival[table.together], table.end[table.together])
        for rank, shift in zip(table.ranks.tolist(), shifts if shifts is not None else (), strict=False):
            if shift:
                low, high = np.searchsorted(spans["rank"], [rank, rank + 1])
                spans["start"][low:high] += shift
                spans["end"][low:high] += shift
                clocks[rank] = widened(clocks[rank], int(shift))
    return spans, [clocks[rank] for rank in sorted(clocks)]


def _moment(time: int, fit: ClockFit, origin: int) -> int:
    return int(fit.to_reference(np.array([time]))[0]) - origin


def _ranks(logs: Sequence[_Log], fits: Sequence[ClockFit], origins: Sequence[int]) -> list[Rank]:
    ranks: dict[int, Rank] = {}
    for log, fit, origin in zip(logs, fits, origins, strict=True):
        cost = log.end.get("cost", {}).get("cpu_seconds", 0.0) if log.end else 0.0
        before = ranks.get(log.rank)
        ranks[log.rank] = Rank(
            log.rank,
            str(log.head.get("device", "")),
            str(log.head.get("host", "")),
            _moment(log.last, fit, origin),
            log.end is not None,
            log.dropped + (before.dropped if before else 0),
            cost + (before.watching_seconds if before else 0.0),
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _sessions(
    facts: dict[str, Any], began: Sequence[float], ranks: Sequence[Rank], spans: Spans, logs: Sequence[_Log]
) -> list[Session]:
    said = facts.get("sessions") or [{"began": start, "ended": _ended(facts)} for start in began]
    sessions = []
    starts = [round((start - began[0]) * 1e9) for start in began] if began else []
    for number, (entry, start) in enumerate(zip(said, starts, strict=True)):
        until = starts[number + 1] if number + 1 < len(starts) else None
        inside = (spans["start"] >= start) & ((spans["start"] < until) if until is not None else True)
        known = [int(spans["end"][inside].max())] if inside.any() else [start]
        if until is None:
            known += [rank.last for rank in ranks]
        ended = entry.get("ended")
        end = round((float(ended) - began[0]) * 1e9) if ended else max(known)
        steps = spans["step"][inside]
        first = int(steps[steps > 0].min()) if (steps > 0).any() else 0
        status = str(entry.get("status") or facts.get("status", "running"))
        sessions.append(Session(start, max(end, start), first, status))
    return sessions


def _ended(facts: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(facts["ended"])).timestamp()
    except (KeyError, ValueError):
        return None


def _missing(
    facts: dict[str, Any],
    world: int,
    logs: Sequence[_Log],
    spans: Spans,
    ranks: Sequence[Rank],
    sessions: Sequence[Session],
) -> Iterable[str]:
    here = {log.rank for log in logs}
    absent = [rank for rank in range(world) if rank not in here]
    if len(absent) == world:
        yield "no rank has a log here: the run ended before any worker began to record, or it was not recorded."
    elif absent:
        which = "ranks " + ", ".join(map(str, absent)) if len(absent) > 1 else f"rank {absent[0]}"
        yield (
            f"{which} of {world} left no log: never started, or on another machine (copy its {names.SPANS}/rank*.jsonl "
            "here). What follows is about the other ranks."
        )
    running = facts.get("status") == "running"
    latest = max((rank.last for rank in ranks), default=0)
    for rank in ranks:
        if not rank.complete and not (running and latest - rank.last < GONE):
            steps = spans["step"][spans["rank"] == rank.rank]
            at = f"in step {int(steps.max())}" if len(steps) and steps.max() > 0 else "before its first step"
            yield f"rank {rank.rank} was cut off {at}: it did not say how it ended, and up to half a second is lost."
        if rank.dropped:
            yield f"rank {rank.rank}: {rank.dropped:,} of its oldest spans were dropped: its log could not be written."
    hosts = {log.rank: log.head.get("host") for log in logs}
    for log in logs:
        if not log.clock and hosts.get(0) not in (None, log.head.get("host")):
            yield f"rank {log.rank}: its clock was never compared with rank 0's, on another host; its times may be off."
        if log.damaged:
            yield f"rank {log.rank}: {log.damaged} damaged blocks of its log were left out."


def _counters(logs: Sequence[_Log], fits: Sequence[ClockFit], origins: Sequence[int]) -> list[Counter]:
    rows: dict[tuple[int, str], list[list[Any]]] = {}
    for log, fit, origin in zip(logs, fits, origins, strict=True):
        for time, step, phase, name, value in log.counters:
            if value is not None:
                rows.setdefault((log.rank, str(name)), []).append([_moment(int(time), fit, origin), step, phase, value])
    return [_counter(rank, name, values) for (rank, name), values in sorted(rows.items())]


def _counter(rank: int, name: str, rows: list[list[Any]]) -> Counter:
    time, step, phase, value = zip(*sorted(rows, key=lambda row: int(row[0])), strict=True)
    return Counter(
        rank,
        name,
        np.array(time, dtype=np.int64),
        np.array(step, dtype=np.int64),
        np.array(phase, dtype=np.int64),
        np.array(value, dtype=np.float64),
    )


def _losses(folder: Path, spans: Spans) -> list[Counter]:
    """The losses of a job, each at the time when its step ended on the lowest rank that has spans."""
    said = {int(r["step"]): float(r["loss"]) for r in read_lines(folder / names.METRICS) if _has_loss(r)}
    if not said or not len(spans):
        return []
    first = spans[(spans["rank"] == spans["rank"][0]) & (spans["kind"] == KIND["optimizer"])]
    ended = dict(zip(first["step"].tolist(), first["end"].tolist(), strict=True))  # of a step done twice, the last time
    rows: list[list[Any]] = [[ended[step], step, NO_PHASE, loss] for step, loss in said.items() if step in ended]
    return [_counter(int(spans["rank"][0]), "loss", rows)] if rows else []


def _has_loss(record: dict[str, Any]) -> bool:
    return isinstance(record.get("loss"), (int, float)) and isinstance(record.get("step"), int)
