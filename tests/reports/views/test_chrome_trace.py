"""The Chrome trace: every event is well formed, slices nest, arrows hit slices, and no span is lost."""

from __future__ import annotations

import copy
import gzip
import json
import math
import re
import shutil
import subprocess
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.analyse import report_of
from meshwise.reports.arrivals import ABSENT, arrival_table
from meshwise.reports.spans import KIND, KINDS, LANE, LANES, SPAN, Clock, Counter, Rank, RunSession, Timeline
from meshwise.reports.views import chrome_trace
from meshwise.reports.views.chrome_trace import trace_text

Event = dict[str, Any]
NEEDED = {
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "M": {"pid", "name", "args"},
    "C": {"pid", "name", "ts", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
}


def nanoseconds(number: float) -> int:
    """As Perfetto reads a number of µs: it cuts off (json_utils.cc: CoerceToTs)."""
    return int(number * 1000.0)


def faults(trace: dict[str, Any]) -> list[str]:
    """All that is wrong with a trace, in words."""
    events: list[Event] = trace["traceEvents"]
    found = [fault for event in events for fault in _of_event(event)]
    if found:
        return found
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            slices[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    for thread, intervals in slices.items():
        found += [f"{thread}: {a} and {b} cross" for a, b in _crossing(intervals)]
    return found + _of_names(events) + _of_flows(events, slices)


def _of_event(event: Event) -> list[str]:
    missing = NEEDED.get(event["ph"], {"no such ph"}) - set(event)
    if missing:
        return [f"{event}: no {sorted(missing)}"]
    numbers = [event[key] for key in ("ts", "dur", "id", "pid", "tid") if key in event]
    if event["ph"] == "C":
        numbers += [abs(value) for value in event["args"].values()]
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int | float) or not 0 <= n < math.inf]
    return [f"{event}: {wrong}"] if wrong else [f"{event}: no name"] if not event["name"].strip() else []


def _crossing(intervals: list[tuple[int, int]]) -> list[tuple[Any, Any]]:
    """Pairs of which neither is before, behind or in the other, in the order of the file, as Perfetto stacks them."""
    found, stack = [], []
    for interval in sorted(intervals, key=lambda interval: interval[0]):
        while stack and stack[-1][1] <= interval[0]:
            stack.pop()
        if stack and interval[1] > stack[-1][1]:
            found.append((stack[-1], interval))
        stack.append(interval)
    return found


def _of_names(events: list[Event]) -> list[str]:
    named = {(e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    found = []
    for pid, tid in {(e["pid"], e.get("tid")) for e in events if e["ph"] != "M"}:
        for name, thread in (("process_name", None), ("process_sort_index", None)) + (
            (("thread_name", tid), ("thread_sort_index", tid)) if tid is not None else ()
        ):
            if (name, pid, thread) not in named:
                found.append(f"no {name} of {pid}, {thread}")
    return found


def _of_flows(events: list[Event], slices: dict[tuple[int, int], list[tuple[int, int]]]) -> list[str]:
    found, begun, ended = [], Tally[int](), Tally[int]()
    for event in events:
        if event["ph"] in "sf":
            (begun if event["ph"] == "s" else ended)[event["id"]] += 1
            time = nanoseconds(event["ts"])
            if event["ph"] == "f" and not begun[event["id"]]:
                found.append(f"flow {event['id']} ends before it begins")
            if not any(start <= time <= end for start, end in slices[event["pid"], event["tid"]]):
                found.append(f"flow {event['id']} is in no slice")
    found += [f"flow {id_} begins {n} times" for id_, n in begun.items() if n != 1]
    return found + [f"flow {id_} has one end only" for id_ in begun.keys() ^ ended.keys()]


def traced(timeline: Timeline, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(b"".join(trace_text(report_of(timeline, steps=steps), timeline)))
    return trace


def table(*rows: tuple[int, str, str, int, int, int, int, int]) -> np.ndarray[Any, Any]:
    """Spans of (rank, kind, lane, name, start, end, step, collective)."""
    spans = np.zeros(len(rows), SPAN)
    for span, (rank, kind, lane, name, start, end, step, collective) in zip(spans, rows, strict=True):
        span["rank"], span["kind"], span["lane"], span["name"] = rank, KIND[kind], LANE[lane], name
        span["start"], span["end"], span["step"], span["collective"] = start, end, step, collective
        span["bytes"] = 4096 if kind == "communication" else 0
    return spans[np.lexsort((-spans["end"], spans["start"], spans["rank"]))]


def two_ranks() -> Timeline:
    """Two steps in which rank 1 comes late to two buckets that are in flight together; times in ns."""
    rows: list[tuple[int, str, str, int, int, int, int, int]] = []
    for step in (1, 2):
        for rank, late in ((0, 0), (1, 300_029)):
            t = 1_000_000 * step + 7
            rows += [
                (rank, "forward", "main", 0, t, t + 200_001, step, -1),
                (rank, "backward", "main", 0, t + 200_001, t + 900_000, step, -1),
                (rank, "communication", "communication", 1, t + 250_000 + late, t + 700_000, step, 2 * step),
                (rank, "communication", "communication", 1, t + 300_000 + late, t + 800_000, step, 2 * step + 1),
            ]
    ends = RunSession(0, 3_000_000, "finished")
    ranks = (Rank(0, "cpu", "here", 3_000_000, True), Rank(1, "cpu", "there", 3_000_000, True))
    time, step, none = np.array([1_500_000, 2_500_000]), np.array([1, 2]), np.array([-1, -1])
    counters = (
        Counter(0, "resident", time, step, none, np.array([1e6, 2e6])),
        Counter(0, "loss", time, step, none, np.array([0.5, np.nan])),
    )
    clocks = (Clock(0), Clock(1, error=12_000.0, samples=8))
    return Timeline(table(*rows), ("", "all-reduce"), counters, ranks, clocks, (ends,), facts={"job": "a job"})


def of_kind(trace: dict[str, Any], ph: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def waitings(trace: dict[str, Any]) -> list[Event]:
    return [event for event in of_kind(trace, "X") if "rank" in event["args"]]


def test_ranks_are_processes_and_lanes_are_threads() -> None:
    trace = traced(two_ranks())
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in of_kind(trace, "M") if e["name"].endswith("_name")}
    assert names[0, None] == "rank 0 · cpu · here" and names[1, None] == "rank 1 · cpu · there"
    threads = [name for (pid, tid), name in sorted(names.items(), key=str) if pid == 1 and tid is not None]
    assert threads == ["main", "communication", "communication 1"]
    assert not {tid for _, tid in names} & {0, 1}, "Perfetto takes a thread with its process's number for the main one"
    assert not faults(trace)


def test_buckets_in_flight_together_wait_for_the_late_rank_on_lanes_of_their_own() -> None:
    trace = traced(two_ranks())
    assert len(of_kind(trace, "X")) == 16 + 4
    found = waitings(trace)
    assert {(e["pid"], e["name"], e["args"]["collective"]) for e in found} == {
        (0, "waiting for rank 1", number) for number in (2, 3, 4, 5)
    }
    assert [nanoseconds(e["dur"]) for e in found] == [300_029] * 4
    parents = {
        (e["pid"], e["tid"], e["ts"]): e for e in of_kind(trace, "X") if e["name"] == "communication: all-reduce"
    }
    for event in found:
        parent = parents[event["pid"], event["tid"], event["ts"]]
        assert parent["args"] == {
            "step": event["args"]["step"],
            "bytes": 4096,
            "collective": event["args"]["collective"],
        }


def test_arrows_go_from_who_came_last_to_who_waited() -> None:
    trace = traced(two_ranks())
    begins = {e["id"]: e for e in of_kind(trace, "s")}
    ends = {e["id"]: e for e in of_kind(trace, "f")}
    assert len(begins) == len(ends) == 4
    assert {(begins[i]["pid"], ends[i]["pid"]) for i in begins} == {(1, 0)}
    assert [nanoseconds(e["ts"]) for e in begins.values()] == [
        1_000_000 * step + 7 + at + 300_029 for step in (1, 2) for at in (250_000, 300_000)
    ]


def test_counters_keep_their_names_and_what_is_no_number_is_left_out() -> None:
    trace = traced(two_ranks())
    assert [(e["name"], e["ts"], e["args"]) for e in of_kind(trace, "C")] == [
        ("resident", 1500, {"bytes": 1e6}),
        ("resident", 2500, {"bytes": 2e6}),
        ("loss", 1500, {"value": 0.5}),
    ]


def test_the_clocks_errors_are_said() -> None:
    trace = traced(two_ranks())
    said = trace["otherData"]
    assert said["job"] == "a job"
    assert said["times across ranks (± µs)"] == pytest.approx(12) == said["clock of rank 1 (± µs)"]


def test_only_some_steps() -> None:
    trace = traced(two_ranks(), (2, 2))
    assert len(of_kind(trace, "X")) == 8 + 2
    assert {e["args"]["step"] for e in of_kind(trace, "X")} == {2}
    assert len(of_kind(trace, "s")) == 2 and len(of_kind(trace, "C")) == 1
    assert min(e["ts"] for e in of_kind(trace, "X")) == 2000.007  # time 0 stays the run's begin
    assert not faults(trace)


def test_a_collective_that_a_rank_has_no_record_of_has_no_waiting_and_no_arrow() -> None:
    timeline = two_ranks()
    gone = (timeline.spans["collective"] == 5) & (timeline.spans["rank"] == 1)
    trace = traced(Timeline(timeline.spans[~gone], timeline.names, ranks=timeline.ranks))
    assert {e["args"]["collective"] for e in waitings(trace)} == {2, 3, 4}
    assert len(of_kind(trace, "s")) == 3


def test_in_a_broadcast_ranks_wait_for_the_source_alone() -> None:
    rows = [(rank, "communication", "main", 1, start, 100, 1, 0) for rank, start in ((0, 40), (1, 10), (2, 60))]
    ranks = tuple(Rank(rank, "cpu", "here", 100, True) for rank in range(3))
    trace = traced(Timeline(table(*rows), ("", "broadcast"), ranks=ranks))
    assert [(e["pid"], e["name"], nanoseconds(e["dur"])) for e in waitings(trace)] == [(1, "waiting for rank 0", 30)]
    assert [(e["pid"], nanoseconds(e["ts"])) for e in of_kind(trace, "s") + of_kind(trace, "f")] == [(0, 40), (1, 40)]


def test_times_before_the_begin_move_everything() -> None:
    rows = [(0, "data", "main", 0, -5_000, 1_000, 1, -1), (0, "forward", "main", 0, 1_000, 2_000, 1, -1)]
    trace = traced(Timeline(table(*rows)))
    assert [e["ts"] for e in of_kind(trace, "X")] == [0, 6]
    assert trace["otherData"]["time 0 (s before the run's begin)"] == 5e-6


def test_a_timeline_without_spans_is_a_trace() -> None:
    assert traced(Timeline())["traceEvents"] == []


def test_compressed_it_is_the_same() -> None:
    packed = b"".join(chrome_trace.render(report_of(two_ranks()), two_ranks()))
    assert json.loads(gzip.decompress(packed)) == traced(two_ranks())


NAMES = st.text(max_size=8) | st.sampled_from(['"}', "\\", "a\nb", "\x00", "µs · 10 %", "</script>", "\u2028", "🦕"])
Row = tuple[int, str, str, int, int, int, int, int]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans of one to three ranks that overlap as they like; each collective on all ranks or on some, once each."""
    ranks = draw(st.integers(1, 3))
    names = ("", "all-reduce", "broadcast", *draw(st.lists(NAMES, min_size=1, max_size=3)))
    moment = st.integers(-20, 80) | st.integers(0, 10**15)
    rows: list[Row] = []
    for rank in range(ranks):
        for _ in range(draw(st.integers(0, 8))):
            start, end = sorted((draw(moment), draw(moment)))
            name, lane = draw(st.integers(0, len(names) - 1)), draw(st.sampled_from(LANES))
            kind = draw(st.sampled_from(KINDS))
            rows.append(
                (rank, kind, lane, name, start, draw(st.sampled_from((start, end))), draw(st.integers(0, 3)), -1)
            )
    for number in range(draw(st.integers(0, 5))):
        lane, name, step = draw(st.sampled_from(("main", "communication"))), draw(st.integers(1, 3)), 1 + number % 3
        for rank in range(ranks):
            start, end = sorted((draw(moment), draw(moment)))
            if draw(st.integers(0, 5)):
                rows.append((rank, "communication", lane, name, start, end, step, number))
    told = [
        Counter(rank, "c" + draw(NAMES), np.array([3]), np.array([1]), np.array([-1]), np.array([draw(st.floats())]))
        for rank in range(ranks)
    ]
    return Timeline(table(*rows), names, tuple(told), tuple(Rank(r, draw(NAMES), "h", 80, True) for r in range(ranks)))


def clean(name: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", " ", name)


def spans_in(trace: dict[str, Any], origin: int) -> Tally[tuple[Any, ...]]:
    lanes = {
        (e["pid"], e["tid"]): re.sub(r" \d+$", "", e["args"]["name"])
        for e in of_kind(trace, "M")
        if e["name"] == "thread_name"
    }
    found = Tally[tuple[Any, ...]]()
    for e in of_kind(trace, "X"):
        if "rank" not in e["args"]:
            start = nanoseconds(e["ts"]) + origin
            end, args = start + nanoseconds(e["dur"]), e["args"]
            facts = args["step"], args.get("bytes", 0), args.get("collective", -1)
            found[e["pid"], lanes[e["pid"], e["tid"]], e["cat"], e["name"], start, end, *facts] += 1
    return found


def spans_of(timeline: Timeline) -> Tally[tuple[Any, ...]]:
    found = Tally[tuple[Any, ...]]()
    for s in timeline.spans:
        kind, name = KINDS[s["kind"]], timeline.names[s["name"]]
        facts = [int(s[key]) for key in ("start", "end", "step", "bytes", "collective")]
        found[int(s["rank"]), LANES[s["lane"]], kind, f"{kind}: {clean(name)}" if name else kind, *facts] += 1
    return found


def waits_of(timeline: Timeline) -> Tally[tuple[int, int, int]]:
    """(rank, collective, ns) of each waiting, in order; the rule's oracle is in test_attribution.py."""
    table, found = arrival_table(timeline.spans, timeline.names), Tally[tuple[int, int, int]]()
    for s in timeline.spans[timeline.spans["collective"] >= 0]:
        (until,) = table.until_of(np.array([s["rank"]]), np.array([s["collective"]])).tolist()
        if until != ABSENT and min(until, s["end"]) > s["start"]:
            found[int(s["rank"]), int(s["collective"]), int(min(until, s["end"]) - s["start"])] += 1
    return found


@given(timeline=timelines())
def test_any_timeline_is_a_trace_without_fault_that_holds_all_spans(timeline: Timeline) -> None:
    trace = traced(timeline)
    assert not faults(trace)
    origin = -round(trace["otherData"]["time 0 (s before the run's begin)"] * 1e9)
    assert spans_in(trace, origin) == spans_of(timeline)
    found = Tally((e["pid"], e["args"]["collective"], nanoseconds(e["dur"])) for e in waitings(trace))
    assert found == waits_of(timeline)
    assert len(of_kind(trace, "X")) == found.total() + len(timeline.spans)
    assert "\\u" not in json.dumps(trace, ensure_ascii=False)


@given(st.integers(0, 10**15))
def test_times_are_read_to_the_nanosecond_by_who_cuts_off_and_by_who_rounds(time: int) -> None:
    text = json.dumps(chrome_trace._micro(np.array([time]))[0])
    assert nanoseconds(json.loads(text)) == time
    assert round(json.loads(text) * 1000) == time


def _drop(ph: str, key: str) -> Callable[[list[Event]], object]:
    return lambda events: next(e for e in events if e["ph"] == ph).pop(key)


def _set(ph: str, key: str, value: Any) -> Callable[[list[Event]], object]:
    return lambda events: next(e for e in events if e["ph"] == ph).__setitem__(key, value)


def _without(name: str) -> Callable[[list[Event]], object]:
    return lambda events: events.remove(next(e for e in events if e["name"] == name))


def _last(ph: str, key: str, value: Any) -> Callable[[list[Event]], object]:
    return lambda events: [e for e in events if e["ph"] == ph][-1].__setitem__(key, value)


PLANTED: dict[str, tuple[Callable[[list[Event]], object], str]] = {
    "a slice without a duration": (_drop("X", "dur"), "no ['dur']"),
    "an event of no known kind": (_set("X", "ph", "Q"), "no such ph"),
    "a time before 0": (_set("X", "ts", -1.0), "-1.0"),
    "a time that is no number": (_set("C", "ts", math.nan), "nan"),
    "a time as text": (_set("s", "ts", "12"), "'12'"),
    "a counter that is no number": (_set("C", "args", {"bytes": math.inf}), "inf"),
    "a slice without a name": (_set("X", "name", " "), "no name"),
    "slices that cross": (_set("X", "dur", 500.0), "cross"),
    "slices that cross by a nanosecond": (_set("X", "dur", 200.0025), "cross"),
    "all collectives on one lane": (
        lambda events: [e.update(tid=11) for e in events if e["ph"] == "X" and e["cat"] == "communication"],
        "cross",
    ),
    "a process without a name": (_without("process_name"), "no process_name"),
    "a thread without a name": (_without("thread_name"), "no thread_name"),
    "a thread without an order": (_without("thread_sort_index"), "no thread_sort_index"),
    "an arrow that never ends": (lambda events: events.pop(), "one end only"),
    "an arrow that never begins": (lambda events: events.pop(-2), "ends before it begins"),
    "two arrows of one id": (_last("s", "id", 3), "begins 2 times"),
    "an arrow from nowhere": (_last("s", "ts", 0.5), "in no slice"),
    "an arrow to nowhere": (_last("f", "ts", 9e9), "in no slice"),
    "an arrow on another rank": (_last("f", "pid", 7), "in no slice"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_catches(name: str) -> None:
    trace = traced(two_ranks())
    bad = copy.deepcopy(trace)
    plant, said = PLANTED[name]
    plant(bad["traceEvents"])
    assert not faults(trace)
    assert any(said in fault for fault in faults(bad)), faults(bad)


def test_perfettos_own_reader_finds_the_slices_and_no_fault(tmp_path: Path) -> None:
    shell = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if shell is None:
        pytest.skip("needs Perfetto's trace_processor_shell on PATH")
    (tmp_path / "trace.json").write_bytes(b"".join(trace_text(report_of(two_ranks()), two_ranks())))
    count = len(of_kind(traced(two_ranks()), "X"))
    query = tmp_path / "query.sql"
    query.write_text(
        "select (select count(*) from slice), (select count(*) from flow), "
        "(select coalesce(sum(value), 0) from stats where severity in ('error', 'data_loss'));"
    )
    done = subprocess.run([shell, "-q", query, tmp_path / "trace.json"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == f"{count},4,0"
