"""Write the timeline as a Chrome trace, for Perfetto and chrome://tracing.

Perfetto is at ui.perfetto.dev.

A rank is a process, a lane is a thread. Spans that overlap on a lane, such as buckets in flight together, go to further
copies of the lane, since slices of a thread must be nested or apart. The format: "Trace Event Format", Google, 2016.

Perfetto reads a time as `int(number * 1000)`. Where that would be a nanosecond too low, 0.3 ns are added, since slices
that touch would overlap otherwise. Some versions of Perfetto misread \\u escapes and `displayTimeUnit`: neither is
written.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.arrivals import Arrivals, arrival_table, is_collective
from meshwise.reports.run_report import NOT_MEMORY, Report
from meshwise.reports.spans import KIND, KINDS, LANES, NO_COLLECTIVE, Counter, Spans, Timeline, of_rank
from meshwise.spec.json_values import json_value

Whole = NDArray[np.int64]
Event = dict[str, Any]
COPIES = 1 << 16
"""How many thread ids a lane gets: one for itself, the others for its further copies."""
CHUNK = 1 << 14  # spans to convert to Python numbers at a time
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


_Rows = dict[int, tuple[Spans, Whole]]
"""The spans of each rank, in the order in which they are written, and the id of the thread on which each is drawn. The
ids are the same on all ranks."""


def render(report: Report, timeline: Timeline) -> Iterator[bytes]:
    """Yield the trace as gzip data."""
    packer = zlib.compressobj(level=5, wbits=zlib.MAX_WBITS | 16)  # 16 adds a gzip header, with no file name or time
    for text in trace_text(report, timeline):
        yield packer.compress(text)
    yield packer.flush()


def trace_text(report: Report, timeline: Timeline) -> Iterator[bytes]:
    """Yield the trace as JSON, in pieces."""
    steps = report.chosen_steps
    spans = timeline.spans if steps is None else timeline.of_steps(*steps)
    ranks = _ranks(timeline)
    # A process id is a rank. Thread ids begin above all ranks: viewers take thread N of process N as its main thread.
    first = 10 ** len(str(max(ranks, default=0)))
    rows = {rank: _rank_rows(of_rank(spans, rank), first) for rank in ranks}
    counters = [_of_steps(counter, steps) for counter in timeline.counters]
    arrivals = arrival_table(timeline.spans, timeline.names)
    times = [drawn["start"] for drawn, _ in rows.values()] + [counter.time for counter in counters]
    origin = min([0, *(int(some.min()) for some in times if len(some))])
    names = [_plain(name) for name in timeline.names]
    events = itertools.chain(
        _names(timeline, rows, first),
        *(_slices(rank, *row, arrivals, names, origin) for rank, row in rows.items()),
        *(_counts(counter, origin) for counter in counters),
        _flows(rows, arrivals, origin),
    )
    yield f'{{"otherData":{_json(_facts(timeline, report, origin))},\n"traceEvents":[\n'.encode()
    between = ""
    while several := list(itertools.islice(events, 1024)):
        yield (between + _json(several)[1:-1]).encode()
        between = ",\n"
    yield b"\n]}\n"


def _ranks(timeline: Timeline) -> list[int]:
    known = {rank.rank for rank in timeline.ranks} | {counter.rank for counter in timeline.counters}
    return sorted(known | set(np.unique(timeline.spans["rank"]).tolist()))


def _rank_rows(spans: Spans, first: int) -> tuple[Spans, Whole]:
    spans = spans.copy()
    spans["end"] = np.maximum(spans["start"], spans["end"])
    spans = spans[np.lexsort((-spans["end"], spans["start"]))]  # sort parents before children
    return spans, first + spans["lane"].astype(np.int64) * COPIES + _copies(spans)


def _copies(spans: Spans) -> Whole:
    """Return on which row of its lane each span is drawn."""
    copy = np.zeros(len(spans), np.int64)
    lanes: list[list[list[tuple[int, bool]]]] = [[] for _ in LANES]  # (end, is collective) of each copy's open spans
    for at, (start, end, lane, kind) in enumerate(_columns(spans, "start", "end", "lane", "kind")):
        stacks = lanes[lane]
        number = next((number for number, stack in enumerate(stacks) if _has_room(stack, start, end)), len(stacks))
        if number == len(stacks):
            stacks.append([])
        stacks[number].append((end, kind == KIND["communication"]))
        copy[at] = number
    return copy


def _has_room(stack: list[tuple[int, bool]], start: int, end: int) -> bool:
    """Return whether a new span can be drawn on a row that has the open spans of `stack`."""
    while stack and stack[-1][0] <= start:
        stack.pop()
    return not stack or (end <= stack[-1][0] and not stack[-1][1])


def _columns(spans: Spans, *names: str) -> Iterator[tuple[int, ...]]:
    for low in range(0, len(spans), CHUNK):
        chunk = spans[low : low + CHUNK]
        yield from zip(*(chunk[name].tolist() for name in names), strict=True)


def _of_steps(counter: Counter, steps: tuple[int, int] | None) -> Counter:
    keep = np.isfinite(counter.value)
    if steps is not None:
        keep &= (counter.step >= steps[0]) & (counter.step <= steps[1])
    return counter.where(keep)


def _facts(timeline: Timeline, report: Report, origin: int) -> dict[str, Any]:
    """Return facts about the whole trace, such as the job, the verdict, and how exact the ranks' clocks are."""
    facts: dict[str, Any] = {
        "written by": "meshwise",
        "job": report.title,
        "status": report.status,
        "source": report.source,
        "verdict": report.verdict,
        "run's begin (s since 1970)": timeline.began,
        "time 0 (s before the run's begin)": -origin / 1e9,
        "times across ranks (± µs)": report.error_seconds * 1e6,
    }
    facts |= {f"clock of rank {clock.rank} (± µs)": clock.error_seconds * 1e6 for clock in report.clocks}
    facts |= {f"missing {number}": text for number, text in enumerate(report.missing, 1)}
    texts = {key: _plain(value) if isinstance(value, str) else value for key, value in json_value(facts).items()}
    return {key: value for key, value in texts.items() if value is not None}


def _names(timeline: Timeline, rows: _Rows, first: int) -> Iterator[Event]:
    places = {rank.rank: (rank.device, rank.host) for rank in timeline.ranks}
    for rank, (_, thread) in rows.items():
        title = " · ".join([f"rank {rank}", *filter(None, places.get(rank, ()))])
        process = {"ph": "M", "pid": rank}
        yield process | {"name": "process_name", "args": {"name": _plain(title)}}
        yield process | {"name": "process_sort_index", "args": {"sort_index": rank}}
        for tid in np.unique(thread).tolist():
            lane, copy = divmod(tid - first, COPIES)
            name = f"{LANES[lane]} {copy}" if copy else LANES[lane]
            yield process | {"tid": tid, "name": "thread_name", "args": {"name": name}}
            yield process | {"tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slices(
    rank: int, every: Spans, threads: Whole, table: Arrivals, names: Sequence[str], origin: int
) -> Iterator[Event]:
    for low in range(0, len(every), CHUNK):
        spans = every[low : low + CHUNK]
        start = spans["start"]
        columns = [spans[name].tolist() for name in ("kind", "name", "step", "bytes", "collective")]
        times = [_micro(some) for some in (start - origin, spans["end"] - start, table.waits_until(spans) - start)]
        places = threads[low : low + CHUNK].tolist(), _waited_for(table, spans).tolist()
        for kind, name, step, size, number, begun, long, wait, thread, last in zip(
            *columns, *times, *places, strict=True
        ):
            args = {"step": step}
            if size:
                args["bytes"] = size
            if number != NO_COLLECTIVE:
                args["collective"] = number
            title = f"{KINDS[kind]}: {names[name]}" if names[name] else KINDS[kind]
            place = {"ph": "X", "pid": rank, "tid": thread, "ts": begun}
            yield {**place, "dur": long, "cat": KINDS[kind], "name": title, "args": args}
            if wait:
                waiting = {"cat": "waiting", "name": f"waiting for rank {last}", "args": {**args, "rank": last}}
                yield {**place, "dur": wait, **waiting}


def _waited_for(table: Arrivals, spans: Spans) -> Whole:
    """Return the rank for which each collective in `spans` waits. The value is meaningless for other spans."""
    if not len(table.number):
        return np.zeros(len(spans), np.int64)
    row = np.minimum(np.searchsorted(table.number, spans["collective"]), len(table.number) - 1)
    return table.ranks[table.last_rank[row]]


def _counts(counter: Counter, origin: int) -> Iterator[Event]:
    unit = "value" if counter.name in NOT_MEMORY else "bytes"
    place = {"ph": "C", "pid": counter.rank, "name": _plain(counter.name)}
    for time, value in zip(_micro(counter.time - origin), counter.value.tolist(), strict=True):
        yield {**place, "ts": time, "args": {unit: value}}


def _flows(rows: _Rows, table: Arrivals, origin: int) -> Iterator[Event]:
    """Yield arrows from the rank that arrived last at a collective to each rank that waited for it."""
    tids = _tids(rows, table)
    for low in range(0, len(table.number), CHUNK):
        part = slice(low, low + CHUNK)
        tid, last, known = tids[part], table.last[part, None], table.complete[part, None]
        source = table.last_rank[part, None]
        target = known & (table.arrival[part] <= last) & (last <= table.end[part]) & (tid > 0)
        target &= (np.arange(len(table.ranks)) != source) & (np.take_along_axis(tid, source, axis=1) > 0)
        times = _micro(np.where(known, last - origin, 0)[:, 0])
        for row, column in np.argwhere(target).tolist():
            number, come = (low + row) * len(table.ranks) + column + 1, source[row, 0]
            same = {"cat": "arrival", "name": "last to come", "id": number, "ts": times[row]}
            yield {"ph": "s", "pid": int(table.ranks[come]), "tid": int(tid[row, come]), **same}
            yield {"ph": "f", "bp": "e", "pid": int(table.ranks[column]), "tid": int(tid[row, column]), **same}


def _tids(rows: _Rows, table: Arrivals) -> Whole:
    """Return the id of the thread on which each collective is drawn, by collective and rank."""
    tids = np.zeros((len(table.number), len(table.ranks)), np.int64)
    for rank, (spans, thread) in rows.items():
        found = is_collective(spans)
        if found.any():
            row = np.searchsorted(table.number, spans["collective"][found])
            tids[row, np.searchsorted(table.ranks, rank)] = thread[found]
    return tids


def _micro(times: Whole) -> list[float]:
    """Convert ns to µs that Perfetto converts back to exactly these ns."""
    missed = np.trunc(times / 1000 * 1000.0) != times
    micro: list[float] = ((times + 0.3 * missed) / 1000).tolist()
    return micro


def _plain(text: str) -> str:
    """Replace control characters and lone surrogates with spaces. JSON would escape them as \\u sequences."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", " ", text)
