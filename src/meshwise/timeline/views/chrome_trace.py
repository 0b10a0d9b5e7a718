"""The timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A rank is a process, a lane is a thread. What overlaps on a lane, such as buckets in flight together, gets lanes of its
own, since slices of one thread may only nest. The format: "Trace Event Format", Google, 2016.

Read by Perfetto, a time is `int(number * 1000)`; where that would miss by a nanosecond, three tenths of one are added:
slices that touch would cross. Not all its versions read \\u escapes, or `displayTimeUnit` as it is meant: both are left
out.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.spec.units import seconds_text
from meshwise.timeline.arrivals import Arrivals, arrival_table, is_collective
from meshwise.timeline.run_report import NOT_MEMORY, Report
from meshwise.timeline.spans import KIND, KINDS, LANES, NO_COLLECTIVE
from meshwise.timeline.timeline import Counter, Spans, Timeline

Whole = NDArray[np.int64]
COPY = 32
CHUNK = 1 << 14  # spans that are held as Python numbers at once


@dataclass(frozen=True)
class _Rows:
    """The spans of one rank in the order in which they are written, and the thread of each: where its lane is in LANES,
    shifted by COPY, and on which copy of the lane it lies."""

    rank: int
    spans: Spans
    thread: Whole


def render(report: Report, timeline: Timeline) -> Iterator[bytes]:
    """The trace, compressed; of the steps that were asked for, else of all.

    It has a slice for each span, and one for each waiting that was found in one. Times are µs from the run's begin,
    with ns as decimals.
    """
    packer = zlib.compressobj(level=5, wbits=zlib.MAX_WBITS | 16)  # with gzip's head, without a name or a time
    for text in trace_text(report, timeline):
        yield packer.compress(text)
    yield packer.flush()


def trace_text(report: Report, timeline: Timeline) -> Iterator[bytes]:
    """The trace as JSON, in pieces."""
    steps = report.chosen_steps
    rows = [_rank_rows(timeline, rank, steps) for rank in _ranks(timeline)]
    counters = [_of_steps(counter, steps) for counter in timeline.counters]
    arrivals = arrival_table(timeline.spans, timeline.names)
    times = [r.spans["start"] for r in rows] + [counter.time for counter in counters]
    origin = min([0, *(int(some.min()) for some in times if len(some))])
    threads = _threads(rows)
    events = itertools.chain(
        _names(timeline, report, rows, threads),
        *(_slices(r, arrivals, threads, timeline.names, origin) for r in rows),
        *(_counts(counter, origin) for counter in counters),
        _flows(rows, arrivals, threads, origin),
    )
    yield f'{{"otherData":{_json(_facts(timeline, report, origin))},\n"traceEvents":[\n'.encode()
    between = ""
    while several := list(itertools.islice(events, 1024)):
        yield (between + ",\n".join(several)).encode()
        between = ",\n"
    yield b"\n]}\n"


def _ranks(timeline: Timeline) -> list[int]:
    known = {rank.rank for rank in timeline.ranks} | {counter.rank for counter in timeline.counters}
    return sorted(known | set(np.unique(timeline.spans["rank"]).tolist()))


def _rank_rows(timeline: Timeline, rank: int, steps: tuple[int, int] | None) -> _Rows:
    spans = timeline.of_rank(rank)
    if steps is not None:
        spans = spans[(spans["step"] >= steps[0]) & (spans["step"] <= steps[1])]
    if (spans["end"] < spans["start"]).any():
        spans = spans.copy()
        spans["end"] = np.maximum(spans["start"], spans["end"])
    order = np.lexsort((-spans["end"], spans["start"]))  # a parent before its children
    if (np.diff(order) != 1).any():  # not as `read` sorts them
        spans = spans[order]
    return _Rows(rank, spans, (spans["lane"].astype(np.int64) << COPY) + _copies(spans))


def _copies(spans: Spans) -> Whole:
    """On which copy of its lane each span lies: the first where it is apart from all others or within one of them.

    Nothing lies within a collective but its waiting: buckets in flight together are beside each other.
    """
    copy = np.zeros(len(spans), np.int64)
    lanes: list[list[list[tuple[int, bool]]]] = [[] for _ in LANES]  # of each copy the open spans: end, collective
    for at, (start, end, lane, kind) in enumerate(_columns(spans, "start", "end", "lane", "kind")):
        stacks = lanes[lane]
        number = next((number for number, stack in enumerate(stacks) if _has_room(stack, start, end)), len(stacks))
        if number == len(stacks):
            stacks.append([])
        stacks[number].append((end, kind == KIND["communication"]))
        copy[at] = number
    return copy


def _has_room(stack: list[tuple[int, bool]], start: int, end: int) -> bool:
    """Close what has ended; then whether nothing is open, or something around this that is no collective."""
    while stack and stack[-1][0] <= start:
        stack.pop()
    return not stack or (end <= stack[-1][0] and not stack[-1][1])


def _columns(spans: Spans, *names: str) -> Iterator[tuple[int, ...]]:
    for low in range(0, len(spans), CHUNK):
        chunk = spans[low : low + CHUNK]
        yield from zip(*(chunk[name].tolist() for name in names), strict=True)


def _threads(rows: Sequence[_Rows]) -> dict[int, int]:
    """The tid of each lane and copy, the same on all ranks. None is a pid: Perfetto takes that for a main thread."""
    used = np.unique(np.concatenate([np.empty(0, np.int64), *(np.unique(r.thread) for r in rows)])).tolist()
    first = 10 ** len(str(max((r.rank for r in rows), default=0)))
    return {thread: first + number for number, thread in enumerate(used)}


def _of_steps(counter: Counter, steps: tuple[int, int] | None) -> Counter:
    keep = np.isfinite(counter.value)
    if steps is not None:
        keep &= (counter.step >= steps[0]) & (counter.step <= steps[1])
    return Counter(
        counter.rank, counter.name, counter.time[keep], counter.step[keep], counter.phase[keep], counter.value[keep]
    )


def _facts(timeline: Timeline, report: Report, origin: int) -> dict[str, Any]:
    """What goes beside the events. No lists: Perfetto had versions that could not read them here."""
    sessions = timeline.facts.get("sessions") or [{}]
    facts: dict[str, Any] = {
        "written by": "meshwise",
        "job": report.title,
        "status": report.status,
        "source": report.source,
        "verdict": report.verdict,
        "run's begin (s since 1970)": sessions[0].get("began"),
        "time 0 (s before the run's begin)": -origin / 1e9,
        "times across ranks (± µs)": report.error_seconds * 1e6,
    }
    facts |= {f"clock of rank {clock.rank} (± µs)": clock.error_seconds * 1e6 for clock in report.clocks}
    facts |= {f"missing {number}": text for number, text in enumerate(report.missing, 1)}
    return {key: value for key, value in facts.items() if _sayable(value)}


def _sayable(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def _names(timeline: Timeline, report: Report, rows: Sequence[_Rows], threads: dict[int, int]) -> Iterator[str]:
    ranks = {rank.rank: rank for rank in timeline.ranks}
    errors = {clock.rank: clock.error_seconds for clock in report.clocks}
    for r in rows:
        known = ranks.get(r.rank)
        title = " · ".join([f"rank {r.rank}", *(part for part in (known and (known.device, known.host)) or () if part)])
        yield _meta("process_name", r.rank, {"name": title})
        yield _meta("process_sort_index", r.rank, {"sort_index": r.rank})
        if errors.get(r.rank, 0.0) > 0:
            yield _meta("process_labels", r.rank, {"labels": f"clock ± {seconds_text(errors[r.rank])}"})
        for thread in np.unique(r.thread).tolist():
            lane, copy, tid = LANES[thread >> COPY], thread % (1 << COPY), threads[thread]
            yield _meta("thread_name", r.rank, {"name": f"{lane} {copy}" if copy else lane}, tid)
            yield _meta("thread_sort_index", r.rank, {"sort_index": tid}, tid)


def _meta(name: str, rank: int, args: dict[str, Any], tid: int | None = None) -> str:
    return _json({"ph": "M", "pid": rank, **({} if tid is None else {"tid": tid}), "name": name, "args": args})


def _slices(r: _Rows, table: Arrivals, threads: dict[int, int], names: Sequence[str], origin: int) -> Iterator[str]:
    known: dict[tuple[int, int, int], str] = {}
    for low in range(0, len(r.spans), CHUNK):
        spans = r.spans[low : low + CHUNK]
        until, last = table.waits_until(spans), _waited_for(table, spans)
        facts = _columns(spans, "kind", "name", "step", "bytes", "collective")
        times = zip(
            _micro(spans["start"] - origin),
            _micro(spans["end"] - spans["start"]),
            _micro(until - spans["start"]),
            r.thread[low : low + CHUNK].tolist(),
            last.tolist(),
            strict=True,
        )
        for (kind, name, step, size, number), (start, length, wait, thread, rank) in zip(facts, times, strict=True):
            begin = known.get((thread, kind, name))
            if begin is None:
                title = f"{KINDS[kind]}: {names[name]}" if names[name] else KINDS[kind]
                begin = known[thread, kind, name] = _open(
                    {"ph": "X", "pid": r.rank, "tid": threads[thread], "cat": KINDS[kind], "name": title}
                )
            args = f'"step":{step}'
            if size:
                args += f',"bytes":{size}'
            if number != NO_COLLECTIVE:
                args += f',"collective":{number}'
            yield f'{begin},"ts":{start},"dur":{length},"args":{{{args}}}}}'
            if wait != "0":
                yield (
                    f'{{"ph":"X","pid":{r.rank},"tid":{threads[thread]},"cat":"waiting",'
                    f'"name":"waiting for rank {rank}","ts":{start},"dur":{wait},"args":{{{args},"rank":{rank}}}}}'
                )


def _waited_for(table: Arrivals, spans: Spans) -> Whole:
    """The rank for which each collective of `spans` waits; of other spans it says nothing."""
    if not len(table.number):
        return np.zeros(len(spans), np.int64)
    row = np.minimum(np.searchsorted(table.number, spans["collective"]), len(table.number) - 1)
    return table.ranks[table.last_rank[row]]


def _counts(counter: Counter, origin: int) -> Iterator[str]:
    unit = "value" if counter.name in NOT_MEMORY else "bytes"
    begin = _open({"ph": "C", "pid": counter.rank, "name": counter.name})
    for time, value in zip(_micro(counter.time - origin), counter.value.tolist(), strict=True):
        yield f'{begin},"ts":{time},"args":{{"{unit}":{value!r}}}}}'


def _flows(rows: Sequence[_Rows], table: Arrivals, threads: dict[int, int], origin: int) -> Iterator[str]:
    """Arrows from the rank that came last to each that waited for it, at the moment when it came.

    Each has its own id: chrome://tracing ends a flow at its first end. They come behind all slices: at one moment
    Perfetto takes events in the order of the file.
    """
    tids = _tids(rows, table, threads)
    for low in range(0, len(table.number), CHUNK):
        part = slice(low, low + CHUNK)
        tid, last, known = tids[part], table.last[part, None], table.complete[part, None]
        source = table.last_rank[part, None]
        target = known & (table.arrival[part] <= last) & (last <= table.end[part]) & (tid > 0)
        target &= (np.arange(len(table.ranks)) != source) & (np.take_along_axis(tid, source, axis=1) > 0)
        times = _micro(np.where(known, last - origin, 0)[:, 0])
        for row, column in np.argwhere(target).tolist():
            number, come = (low + row) * len(table.ranks) + column + 1, source[row, 0]
            same = f'"cat":"arrival","name":"last to come","id":{number},"ts":{times[row]}'
            yield f'{{"ph":"s","pid":{table.ranks[come]},"tid":{tid[row, come]},{same}}}'
            yield f'{{"ph":"f","bp":"e","pid":{table.ranks[column]},"tid":{tid[row, column]},{same}}}'


def _tids(rows: Sequence[_Rows], table: Arrivals, threads: dict[int, int]) -> Whole:
    """The tid of each collective's slice on each rank, 0 where there is none: shape (collectives, ranks)."""
    tids = np.zeros((len(table.number), len(table.ranks)), np.int64)
    keys, values = np.array(sorted(threads.items()), dtype=np.int64).reshape(-1, 2).T
    for r in rows:
        found = is_collective(r.spans)
        if found.any():
            row = np.searchsorted(table.number, r.spans["collective"][found])
            tids[row, np.searchsorted(table.ranks, r.rank)] = values[np.searchsorted(keys, r.thread[found])]
    return tids


def _micro(times: Whole) -> list[str]:
    """Nanoseconds as µs, which are read exactly in the first ten days by who rounds doubles and by who truncates."""
    missed = np.trunc(times / 1000 * 1000.0) != times
    whole, rest = np.divmod(times, 1000)
    return [
        (f"{a}.{b:03d}3" if c else f"{a}.{b:03d}" if b else str(a))
        for a, b, c in zip(whole.tolist(), rest.tolist(), missed.tolist(), strict=True)
    ]


def _open(event: dict[str, Any]) -> str:
    """The beginning of an event, to be gone on with."""
    return _json(event)[:-1]


def _json(value: Any) -> str:
    return json.dumps(_clean(value), ensure_ascii=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    """Without control characters and halves of characters, which would be escaped as \\u."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", " ", value) if isinstance(value, str) else value
