"""Read a run folder's logs as a Timeline on one clock.

The Timeline has all ranks, and sentences on what is missing.

If a log was cut off or lacks a block, the rest of the log is used. A log of another version is left out, and a sentence
names it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.records import folder as names
from meshwise.records.metrics import Metrics
from meshwise.records.run_list import args_of, best_of, plan_of
from meshwise.reports.arrivals import arrival_table
from meshwise.reports.rank_log import MOST, RankLog, causal_shifts, fit_clock, place_of, read_rank_log
from meshwise.reports.spans import (
    KIND,
    LANE,
    NO_PHASE,
    PER_SESSION,
    SPAN,
    Clock,
    Column,
    Counter,
    Rank,
    RunSession,
    Spans,
    Timeline,
    of_rank,
)
from meshwise.spec.units import plural, seconds_text
from meshwise.spec.words import ranks_text

SILENT = 60.0
"""A run was probably killed if run.json says `running`, but nothing was recorded for this many seconds."""
SILENT_RANK = 10_000_000_000
"""In a running run, a rank counts as cut off if its last record is this many ns older than another rank's."""
CLOCKS_DIFFER = 1_000_000_000
"""The largest difference in ns that is expected between the times of day of two hosts."""
Row = tuple[int, int, int, float]
"""One value of a counter: the time, the step, the phase and the value."""


def read_timeline(folder: Path, *, last_blocks: int | None = None, metrics: Metrics | None = None) -> Timeline:
    """Read the timeline of the run in `folder`. Raises UsageError if `folder` does not contain a run.

    last_blocks: read only this many blocks from the end of each rank's newest log, to follow a run while it is running.
        A rank writes a block of spans about once a second.
    metrics: the metrics that were read before. Only later ones are read from the files.
    """
    facts, metrics = names.read_run(folder), metrics or Metrics(folder)
    metrics.read_on()
    last = {name: values[-1] for name, values in metrics.by_name().items()}
    metric = next((f"{name} {value:.6g}" for name, value in last.items()), "")
    facts |= {"plan": plan_of(folder), "args": args_of(facts), "metric": metric, "metrics": last}
    facts["best"] = str(best_of(folder) or "")
    missing: list[str] = []
    logs: list[RankLog] = []
    for path in sorted((folder / names.SPANS).glob("rank*.jsonl"), key=place_of):
        found, unread = read_rank_log(path, last_blocks)
        if last_blocks is not None and logs and found and logs[-1].rank == found[-1].rank:
            logs[-1].packed = []  # `--live` needs no spans of earlier attempts
        logs += found
        missing += [unread] if unread else []
    facts |= {"program": "job" if "request" in facts else next((log.program for log in logs if log.program), "script")}
    for text in list({log.rank: log.divided for log in logs if log.divided}.values())[:1]:  # text of the newest session
        facts["divided"] = text
    entries = facts.get("sessions") or [{"began": min((log.unix for log in logs), default=0.0)}]
    began = [float(entry["began"]) for entry in entries]
    for log in logs:  # find the newest session that began before this log, allowing 1 s between clocks
        by_time = max([i for i, start in enumerate(began) if start <= log.unix + 1.0], default=0)
        log.session = log.attempt - 1 if 0 < log.attempt <= len(began) else by_time
    _align(logs, began)
    spans, kinds = _spans(logs, [round((each - began[0]) * 1e9) for each in began])
    clocks = _made_causal(spans, kinds, logs)
    ranks = _ranks(logs, spans)
    sessions = _sessions(facts, entries, ranks, spans)
    missing += _missing(facts, logs, spans, ranks)
    counters = _counters(logs)
    if all(counter.name != "loss" for counter in counters):  # for jobs: only scripts record losses as a counter
        counters += _losses(metrics.losses, spans)
    dtypes = {key: dtype for log in logs for key, dtype in log.dtypes.items()}
    lists = tuple(kinds), tuple(counters), tuple(ranks), tuple(clocks), tuple(sessions), tuple(missing)
    return Timeline(spans, *lists, facts, dtypes=dtypes)


def _align(logs: Sequence[RankLog], began: Sequence[float]) -> None:
    origins: dict[int, int] = {}
    for log in logs:
        log.fit = fit_clock(log.rank, log.round_trips)
        if log.session not in origins:  # the lowest rank of the session relates the clock to the time of day
            clock = int(log.fit.to_reference(np.array([log.clock]))[0])
            origins[log.session] = clock - round((log.unix - began[0]) * 1e9)
        log.origin = origins[log.session]


def _spans(logs: Sequence[RankLog], began: Sequence[int]) -> tuple[Spans, list[str]]:
    """Return the spans of all ranks, with their times on the timeline's clock, and the list of the spans' names."""
    found: dict[str, int] = {"": 0}
    spans = np.empty(sum(log.spans for log in logs), SPAN)
    at = 0
    for log in logs:
        codes = [
            (KIND.get(kind, KIND["idle"]), LANE.get(lane, 0), found.setdefault(name, len(found)))
            for kind, lane, name in log.kinds
        ]
        of_code = np.array(codes, dtype=np.int64).reshape(-1, 3)
        for block in log.blocks():
            rows = spans[at : at + len(block[0])]
            _fill(rows, block, of_code, log)
            if log.session + 1 < len(began):
                kept = rows["start"] <= began[log.session + 1] + CLOCKS_DIFFER
                rows[: kept.sum()] = rows[kept]
                rows = rows[: kept.sum()]
            at += len(rows)
    spans = spans[:at]
    for rank in {log.rank for log in logs}:
        mine = of_rank(spans, rank)
        # Among spans with the same start, the longest comes first: it contains the others.
        mine[:] = mine[np.lexsort((-mine["end"], mine["start"]))]
    return spans, list(found)


def _fill(rows: Spans, block: tuple[Column, ...], of_code: Column, log: RankLog) -> None:
    code, start, end, step, size, collective = block
    rows["rank"] = log.rank
    rows["kind"], rows["lane"], rows["name"] = of_code[code].T
    rows["start"], rows["end"] = log.moments(start), log.moments(end)
    rows["step"], rows["bytes"] = step, size
    rows["collective"] = np.where(collective >= 0, collective + log.session * PER_SESSION, collective)


def _made_causal(spans: Spans, names: Sequence[str], logs: Sequence[RankLog]) -> list[Clock]:
    """Shift the ranks' spans so that no collective ends before its last rank has arrived.
    Return the shifted clocks."""
    clocks: dict[int, Clock] = {}
    for log in logs:
        clocks[log.rank] = max(clocks.get(log.rank, log.fit.clock), log.fit.clock, key=lambda clock: clock.error)
    table = arrival_table(spans, names)
    shifts = causal_shifts(table.arrival[table.together], table.end[table.together])
    for rank, shift in zip(table.ranks.tolist(), shifts if shifts is not None else (), strict=False):
        if shift:
            mine = of_rank(spans, rank)
            mine["start"] += shift
            mine["end"] += shift
            clock, moved = clocks[rank], abs(float(shift))
            clocks[rank] = replace(clock, offset=clock.offset + int(shift), error=max(clock.error, moved))
    return list(clocks.values())


def _ranks(logs: Sequence[RankLog], spans: Spans) -> list[Rank]:
    ranks = []
    for rank, sessions in itertools.groupby(logs, lambda log: log.rank):  # the logs are sorted by rank
        every = [*sessions]
        newest = every[-1]
        last_known = int(newest.moments(np.array([newest.last_known()]))[0])
        last = max(last_known, int(of_rank(spans, rank)["end"].max(initial=0)))
        dropped, overhead = sum(log.dropped for log in every), sum(log.overhead_seconds for log in every)
        ranks.append(Rank(rank, newest.device, newest.host, last, newest.end is not None, dropped, overhead))
    return ranks


def _sessions(
    facts: dict[str, Any], entries: Sequence[dict[str, Any]], ranks: Sequence[Rank], spans: Spans
) -> list[RunSession]:
    """Return the sessions of a run, as run.json lists them. Their times are in ns since the first session began."""
    run = float(entries[0]["began"])
    starts = [round((float(entry["began"]) - run) * 1e9) for entry in entries]
    sessions = []
    for entry, start, until in zip(entries, starts, [*starts[1:], MOST], strict=True):
        inside = spans[(spans["start"] >= start) & (spans["start"] < until)]
        last = [rank.last for rank in ranks] if until == MOST else []
        ended = entry.get("ended")
        end = round((float(ended) - run) * 1e9) if ended else max([int(inside["end"].max(initial=start)), *last])
        status = str(entry.get("status") or facts.get("status", "running"))
        sessions.append(RunSession(start, max(end, start), status))
    return sessions


def _missing(facts: dict[str, Any], logs: Sequence[RankLog], spans: Spans, ranks: Sequence[Rank]) -> Iterator[str]:
    """Yield a sentence for each thing that is missing from the run's logs."""
    world = max([int(facts.get("world", 0)), len(facts.get("devices", ())), *(log.world for log in logs[-1:])])
    here = {log.rank for log in logs}
    absent = [rank for rank in range(world) if rank not in here]
    if len(absent) == world:
        yield "no rank has a log here: the run ended before any worker began to record, or it was not recorded."
    elif absent:
        yield (
            f"{ranks_text(absent)} of {world} left no log. Either they never started, or they ran on another machine: "
            f"copy its {names.SPANS}/rank*.jsonl here. This report covers only the other ranks."
        )
    if facts.get("program") == "plain":
        yield (
            "the program calls no function of meshwise. All that happens before a backward is shown as forward, and "
            "samples and losses are not known."
        )
    running = facts.get("status") == "running"
    if running and logs:
        newest = max(logs, key=lambda log: log.unix)
        silent = time.time() - newest.unix - (newest.last_known() - newest.clock) / 1e9
        if silent > SILENT:
            running = False
            yield (
                f"run.json says that the run is running, but nothing was recorded for {seconds_text(silent)}. Its "
                "launcher was probably killed."
            )
    yield from _cut_off(ranks, spans, running)
    hosts = {log.rank: log.host for log in logs}
    for log in logs:
        if not log.round_trips and hosts.get(0, log.host) != log.host:
            yield f"rank {log.rank}: its clock was not compared with rank 0's on another host, so times may be off."
        if log.damaged:
            yield f"rank {log.rank}: its log has {plural(log.damaged, 'damaged line')}, left out here."


def _cut_off(ranks: Sequence[Rank], spans: Spans, running: bool) -> Iterator[str]:
    latest = max((rank.last for rank in ranks), default=0)
    cut_off: dict[int, list[int]] = {}
    for rank in ranks:
        if not rank.complete and not (running and latest - rank.last < SILENT_RANK):
            step = of_rank(spans, rank.rank)["step"].max(initial=0)
            cut_off.setdefault(int(step), []).append(rank.rank)
        if rank.dropped:
            yield f"rank {rank.rank}: {rank.dropped:,} of its oldest spans were dropped: its log could not be written."
    for step, which in sorted(cut_off.items()):
        at = f"in step {step}" if step else "before the first step"
        were = "was" if len(which) == 1 else "were"
        yield f"{ranks_text(which)} {were} cut off {at}: no end was recorded, and up to a second of the log is lost."


def _counters(logs: Sequence[RankLog]) -> list[Counter]:
    rows: dict[tuple[int, str], list[Row]] = {}
    for log in logs:
        times = log.moments(np.array([when for when, *_ in log.counters], dtype=np.int64)).tolist()
        for moment, (_, step, phase, name, value) in zip(times, log.counters, strict=True):
            rows.setdefault((log.rank, name), []).append((moment, step, phase, value))
    return [_counter(rank, name, values) for (rank, name), values in sorted(rows.items())]


def _counter(rank: int, name: str, rows: list[Row]) -> Counter:
    *whole, value = zip(*sorted(rows), strict=True)
    time, step, phase = (np.array(column, dtype=np.int64) for column in whole)
    return Counter(rank, name, time, step, phase, np.array(value, dtype=np.float64))


def _losses(losses: Mapping[int, float], spans: Spans) -> list[Counter]:
    """Return the losses of a job as a list with one `Counter`."""
    if not losses or not len(spans):
        return []
    first = spans[(spans["rank"] == spans["rank"][0]) & (spans["kind"] == KIND["optimizer"])]
    ended = dict(zip(first["step"].tolist(), first["end"].tolist(), strict=True))  # for a repeated step, its last end
    rows = [(end, step, NO_PHASE, losses[step]) for step, end in ended.items() if step in losses]
    return [_counter(int(spans["rank"][0]), "loss", rows)] if rows else []
