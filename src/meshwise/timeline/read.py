"""Read the logs of a run folder back as a Timeline: all ranks on one clock, and sentences on what is not there.

A log that was cut off, or that misses a block, gives what it has. A log of another version is left out and named.

Tested in tests/timeline/test_span_log.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.records import folder as names
from meshwise.records.lines import read_lines
from meshwise.spec.units import plural, seconds_text
from meshwise.timeline.align import ClockFit, causal_shifts, fit_clock, widened
from meshwise.timeline.arrivals import arrival_table
from meshwise.timeline.pack import Column
from meshwise.timeline.rank_log import RankLog, rank_of, read_rank_log
from meshwise.timeline.spans import KIND, LANE, SPAN
from meshwise.timeline.timeline import NO_PHASE, PER_SESSION, Clock, Counter, Rank, RunSession, Spans, Timeline

SILENT = 60.0
"""Seconds without any record after which a run that run.json has as running was probably killed."""
SILENT_RANK = 10_000_000_000
"""ns after which a rank of a running run was cut off, if others still record."""
Row = tuple[int, int, int, float]
"""Of a counter: time, step, phase, value."""


def read_timeline(folder: Path, *, last_blocks: int | None = None) -> Timeline:
    """The timeline of the run in `folder`. Raises UsageError when it is no run folder.

    last_blocks: read only so many of the newest blocks of spans a rank, to follow a run.
    """
    facts = names.read_run(folder)
    missing: list[str] = []
    logs: list[RankLog] = []
    for path in sorted((folder / names.SPANS).glob("rank*.jsonl"), key=rank_of):
        found, unread = read_rank_log(path, last_blocks)
        logs += found
        missing += [unread] if unread else []
    world = _world(facts, logs)
    began = [float(session["began"]) for session in facts.get("sessions", [])]
    began = began or ([min(log.launched for log in logs)] if logs else [])
    for log in logs:  # the newest session that had begun when this log did; clocks of hosts may differ by a second
        log.session = max([i for i, start in enumerate(began) if start <= log.unix + 1.0], default=0)
    fits, origins = _clocks(logs, began)
    spans, kinds = _spans(logs, fits, origins)
    spans, clocks = _made_causal(spans, kinds, fits, logs)
    ranks = _ranks(logs, fits, origins, spans)
    sessions = _sessions(facts, began, ranks, spans, logs)
    missing += _missing(facts, world, logs, spans, ranks)
    counters = (*_counters(logs, fits, origins), *_losses(folder, spans))
    return Timeline(spans, tuple(kinds), counters, tuple(ranks), tuple(clocks), tuple(sessions), tuple(missing), facts)


def _world(facts: dict[str, Any], logs: Sequence[RankLog]) -> int:
    return max(
        [int(facts.get("world", 0)), len(facts.get("devices", ())), *(log.world for log in logs[-1:])],
        default=0,
    )


def _clocks(logs: Sequence[RankLog], began: Sequence[float]) -> tuple[list[ClockFit], list[int]]:
    """For each log, the way to rank 0's clock, and what to subtract there so that the run begins at 0."""
    fits = [fit_clock(log.rank, log.round_trips) for log in logs]
    origins: dict[int, int] = {}
    for log, fit in zip(logs, fits, strict=True):
        if log.session not in origins:  # the lowest rank of the session relates the clock to the time of day
            clock = int(fit.to_reference(np.array([log.clock]))[0])
            origins[log.session] = clock - round((log.unix - began[0]) * 1e9)
    return fits, [origins[log.session] for log in logs]


def _spans(logs: Sequence[RankLog], fits: Sequence[ClockFit], origins: Sequence[int]) -> tuple[Spans, list[str]]:
    """All spans, sorted, on one clock."""
    found: dict[str, int] = {"": 0}
    spans = np.empty(sum(log.spans for log in logs), SPAN)
    at = first = 0
    for number, (log, fit, origin) in enumerate(zip(logs, fits, origins, strict=True)):
        codes = [
            (KIND.get(kind, KIND["idle"]), LANE.get(lane, 0), found.setdefault(name, len(found)))
            for kind, lane, name in log.kinds
        ]
        of_code = np.array(codes, dtype=np.int64).reshape(-1, 3)
        for block in log.blocks():
            rows = spans[at : at + len(block[0])]
            _fill(rows, block, of_code, log, fit, origin)
            at += len(rows)
        if number + 1 == len(logs) or logs[number + 1].rank != log.rank:
            mine = spans[first:at]
            # Of spans that begin together the longest is first: it holds the others.
            mine[:] = mine[np.lexsort((-mine["end"], mine["start"]))]
            first = at
    return spans[:at], list(found)


def _fill(rows: Spans, block: tuple[Column, ...], of_code: Column, log: RankLog, fit: ClockFit, origin: int) -> None:
    code, start, end, step, size, collective = block
    rows["rank"] = log.rank
    rows["kind"], rows["lane"], rows["name"] = of_code[code].T
    rows["start"], rows["end"] = fit.to_reference(start) - origin, fit.to_reference(end) - origin
    rows["step"], rows["bytes"] = step, size
    rows["collective"] = np.where(collective >= 0, collective + log.session * PER_SESSION, collective)


def _made_causal(
    spans: Spans, names: Sequence[str], fits: Sequence[ClockFit], logs: Sequence[RankLog]
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


def _ranks(logs: Sequence[RankLog], fits: Sequence[ClockFit], origins: Sequence[int], spans: Spans) -> list[Rank]:
    ranks: dict[int, Rank] = {}
    for log, fit, origin in zip(logs, fits, origins, strict=True):
        low, high = np.searchsorted(spans["rank"], [log.rank, log.rank + 1])
        last = max(_moment(log.last_known(), fit, origin), int(spans["end"][low:high].max(initial=0)))
        before = ranks.get(log.rank)
        ranks[log.rank] = Rank(
            log.rank,
            log.device,
            log.host,
            last,
            log.end is not None,
            log.dropped + (before.dropped if before else 0),
            log.overhead_seconds + (before.overhead_seconds if before else 0.0),
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _sessions(
    facts: dict[str, Any], began: Sequence[float], ranks: Sequence[Rank], spans: Spans, logs: Sequence[RankLog]
) -> list[RunSession]:
    entries = facts.get("sessions") or [{"began": start, "ended": _ended(facts)} for start in began]
    sessions = []
    starts = [round((start - began[0]) * 1e9) for start in began] if began else []
    for number, (entry, start) in enumerate(zip(entries, starts, strict=True)):
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
        sessions.append(RunSession(start, max(end, start), first, status))
    return sessions


def _ended(facts: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(facts["ended"])).timestamp()
    except (KeyError, ValueError):
        return None


def _missing(
    facts: dict[str, Any], world: int, logs: Sequence[RankLog], spans: Spans, ranks: Sequence[Rank]
) -> Iterator[str]:
    """Sentences on what is not there."""
    here = {log.rank for log in logs}
    absent = [rank for rank in range(world) if rank not in here]
    if len(absent) == world:
        yield "no rank has a log here: the run ended before any worker began to record, or it was not recorded."
    elif absent:
        yield (
            f"{_ranks_text(absent)} of {world} left no log: never started, or on another machine (copy its "
            f"{names.SPANS}/rank*.jsonl here). What follows is about the other ranks."
        )
    running = facts.get("status") == "running"
    silent = time.time() - max([log.unix for log in logs], default=time.time()) - _recorded(logs)
    if running and logs and silent > SILENT:
        running = False
        yield (
            f"run.json has the run as running, but nothing was recorded for {seconds_text(silent)}: its launcher "
            "was probably killed."
        )
    yield from _cut_off(ranks, spans, running)
    hosts = {log.rank: log.host for log in logs}
    for log in logs:
        if not log.round_trips and hosts.get(0, log.host) != log.host:
            yield f"rank {log.rank}: its clock was never compared with rank 0's, on another host; its times may be off."
        if log.damaged:
            yield f"rank {log.rank}: {plural(log.damaged, 'damaged line')} of its log left out."


def _cut_off(ranks: Sequence[Rank], spans: Spans, running: bool) -> Iterator[str]:
    latest = max((rank.last for rank in ranks), default=0)
    cut_off: dict[int, list[int]] = {}
    for rank in ranks:
        if not rank.complete and not (running and latest - rank.last < SILENT_RANK):
            steps = spans["step"][spans["rank"] == rank.rank]
            cut_off.setdefault(int(steps.max(initial=0)), []).append(rank.rank)
        if rank.dropped:
            yield f"rank {rank.rank}: {rank.dropped:,} of its oldest spans were dropped: its log could not be written."
    for step, which in sorted(cut_off.items()):
        at = f"in step {step}" if step else "before the first step"
        were = "was" if len(which) == 1 else "were"
        yield f"{_ranks_text(which)} {were} cut off {at}: no end was recorded, and up to a second is lost."


def _recorded(logs: Sequence[RankLog]) -> float:
    """Seconds from the newest log's first line to its newest plain line."""
    newest = max(logs, key=lambda log: log.unix, default=None)
    return 0.0 if newest is None else (newest.last_known() - newest.clock) / 1e9


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _counters(logs: Sequence[RankLog], fits: Sequence[ClockFit], origins: Sequence[int]) -> list[Counter]:
    rows: dict[tuple[int, str], list[Row]] = {}
    for log, fit, origin in zip(logs, fits, origins, strict=True):
        for when, step, phase, name, value in log.counters:
            rows.setdefault((log.rank, name), []).append((_moment(when, fit, origin), step, phase, value))
    return [_counter(rank, name, values) for (rank, name), values in sorted(rows.items())]


def _counter(rank: int, name: str, rows: list[Row]) -> Counter:
    *whole, value = zip(*sorted(rows), strict=True)
    time, step, phase = (np.array(column, dtype=np.int64) for column in whole)
    return Counter(rank, name, time, step, phase, np.array(value, dtype=np.float64))


def _losses(folder: Path, spans: Spans) -> list[Counter]:
    """The losses of a job, each at the time when its step ended on the lowest rank that has spans."""
    losses = {int(r["step"]): float(r["loss"]) for r in read_lines(folder / names.METRICS) if _has_loss(r)}
    if not losses or not len(spans):
        return []
    first = spans[(spans["rank"] == spans["rank"][0]) & (spans["kind"] == KIND["optimizer"])]
    ended = dict(zip(first["step"].tolist(), first["end"].tolist(), strict=True))  # of a step done twice, the last time
    rows = [(ended[step], step, NO_PHASE, loss) for step, loss in losses.items() if step in ended]
    return [_counter(int(spans["rank"][0]), "loss", rows)] if rows else []


def _has_loss(record: dict[str, Any]) -> bool:
    return isinstance(record.get("loss"), (int, float)) and isinstance(record.get("step"), int)
