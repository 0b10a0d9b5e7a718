"""Where the time went, against a count of single ticks."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.timeline import phases
from meshwise.timeline.phases import PhaseClock, exposed_communication, phase_seconds
from meshwise.timeline.spans import Span

TICKS = 24
interval = st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(lambda pair: (min(pair), max(pair)))
intervals = st.lists(interval, max_size=6)
kinds = st.sampled_from(["forward", "backward", "communication", "evaluate", "optimizer"])
spans = st.lists(st.builds(lambda kind, ends: Span(kind, *ends, step=1), kinds, interval), max_size=8)


def ticks(pieces: list[tuple[int, int]]) -> set[int]:
    """The ticks [t, t + 1) that lie in some interval."""
    return {tick for start, end in pieces for tick in range(start, end)}


def assert_disjoint(pieces: list[tuple[int, int]]) -> None:
    assert all(start < end for start, end in pieces)
    assert all(a[1] <= b[0] for a, b in pairwise(pieces))


@given(intervals)
def test_a_union_has_the_same_ticks_in_disjoint_pieces(pieces: list[tuple[int, int]]) -> None:
    merged = phases.union(pieces)
    assert ticks(merged) == ticks(pieces)
    assert_disjoint(merged)
    assert phases.length(merged) == len(ticks(pieces))


@given(intervals, intervals)
def test_what_is_subtracted_is_gone_and_nothing_else(
    first: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    left = phases.subtract(phases.union(first), phases.union(holes))
    assert ticks(left) == ticks(first) - ticks(holes)
    assert_disjoint(left)


@given(intervals, intervals)
def test_an_intersection_has_the_ticks_of_both(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    both = phases.intersect(phases.union(first), phases.union(second))
    assert ticks(both) == ticks(first) & ticks(second)
    assert_disjoint(both)


def exposed_ticks(recorded: list[Span]) -> set[int]:
    """Ticks in which a bucket travels and no backward computes; a backward computes until its last bucket starts."""
    travelling = ticks([(s.start, s.end) for s in recorded if s.kind == "communication"])
    computing = set()
    for backward in (s for s in recorded if s.kind == "backward"):
        starts = [s.start for s in recorded if s.kind == "communication" and backward.start <= s.start < backward.end]
        computing |= set(range(backward.start, max(starts, default=backward.end)))
    return travelling - computing


@given(spans)
def test_exposed_communication_is_what_no_backward_hides(recorded: list[Span]) -> None:
    assert ticks(exposed_communication(recorded)) == exposed_ticks(recorded)


@given(spans)
def test_seconds_of_a_phase_are_its_ticks_less_the_exposed_ones_in_a_backward(recorded: list[Span]) -> None:
    expected: dict[str, set[int]] = defaultdict(set)
    for span in recorded:
        expected[span.kind] |= set(range(span.start, span.end))
    exposed = exposed_ticks(recorded)
    for kind in ("backward", "evaluate"):
        if kind in expected:
            expected[kind] -= exposed
    if "communication" in expected:
        expected["communication"] = exposed
    assert {kind: round(s * 1e9) for kind, s in phase_seconds(recorded).items()} == {
        kind: len(found) for kind, found in expected.items()
    }


def test_a_bucket_that_travels_under_the_backward_costs_nothing_but_the_last_one_does() -> None:
    recorded = [
        Span("backward", 0, 100, 1),
        Span("communication", 20, 50, 1),
        Span("communication", 60, 130, 1),  # the last bucket: from here on the backward only waits
        Span("optimizer", 130, 150, 1),
    ]
    seconds = {kind: round(s * 1e9) for kind, s in phase_seconds(recorded).items()}
    assert seconds == {"backward": 60, "communication": 70, "optimizer": 20}
    assert sum(seconds.values()) == 150


def test_nested_spans_of_a_kind_count_once() -> None:
    assert phase_seconds([Span("data", 0, 10, 1), Span("data", 2, 5, 1)]) == {"data": pytest.approx(10e-9)}


def test_a_clock_adds_up_over_flushes() -> None:
    clock = PhaseClock()
    clock.add([Span("data", 0, 10, 1), Span("forward", 10, 40, 1)])
    clock.add([Span("data", 40, 45, 2)])
    clock.add([])
    assert clock.seconds == {"data": pytest.approx(15e-9), "forward": pytest.approx(30e-9)}
