"""Every moment of a rank is one thing: against a brute-force oracle that looks at each nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.arrivals import ABSENT, OUTSIDE, arrival_table, attribution_of
from meshwise.reports.spans import KIND, KINDS, LANE, LANES, SPAN, Spans
from meshwise.reports.step_table import HIDDEN, step_table_of
from tests.reports.schedules import PHASES, Schedule, even, played

NAMES = ("", "all-reduce", "broadcast")
MOMENTS = 60
Row = tuple[str, str, int, int, int, int]  # kind, lane, name, start, end, collective


@st.composite
def two_ranks(draw: st.DrawFn) -> list[list[Row]]:
    """Spans of two ranks that overlap as they like; the same collectives on both, or one missing on the second."""
    ranks: list[list[Row]] = [[], []]
    for kind in ("data", "transfer", "forward", "backward", "optimizer", "evaluate", "checkpoint", "idle", "waiting"):
        for rows in ranks:
            for start, end in draw(st.lists(_interval(), max_size=2)):
                rows.append((kind, draw(st.sampled_from(LANES)), 0, start, end, -1))
    for number in range(draw(st.integers(0, 4))):
        name, lane = draw(st.sampled_from((1, 2))), draw(st.sampled_from(("main", "communication")))
        for rank, rows in enumerate(ranks):
            if rank == 0 or draw(st.booleans()):
                start, end = draw(_interval())
                rows.append(("communication", lane, name, start, end, number))
    return ranks


def _interval() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)).map(lambda pair: (min(pair), max(pair)))


def table(ranks: list[list[Row]]) -> Spans:
    rows = [
        (rank, KIND[kind], LANE[lane], name, 1, start, end, 0, number)
        for rank, spans in enumerate(ranks)
        for kind, lane, name, start, end, number in spans
    ]
    spans = np.array(rows, SPAN)
    return spans[np.lexsort((-spans["end"], spans["start"], spans["rank"]))]


def oracle(ranks: list[list[Row]], rank: int) -> tuple[list[str], int]:
    """What rank's each moment is, from its first beginning to its last end, and how many hide communication."""
    mine = [row for row in ranks[rank] if row[4] > row[3] and row[1] != "blocks"]
    if not mine:
        return [], 0
    whole = range(min(row[3] for row in mine), max(row[4] for row in mine))
    found, hidden = [], 0
    for moment in whole:
        kind, hides = _kind_at(ranks, rank, moment)
        found.append(kind)
        hidden += hides
    return found, hidden


def _kind_at(ranks: list[list[Row]], rank: int, moment: int) -> tuple[str, bool]:
    mine = [row for row in ranks[rank] if row[4] > row[3] and row[1] != "blocks"]
    here = [row for row in mine if row[3] <= moment < row[4]]
    at_once = {
        _part(ranks, rank, row, moment) for row in here if row[0] == "communication" and row[1] != "communication"
    }
    beside = {
        _part(ranks, rank, row, moment) for row in here if row[0] == "communication" and row[1] == "communication"
    }
    for kind in ("waiting", "communication"):
        if kind in at_once:
            return kind, False
    begun = [row[3] for row in mine if row[0] == "communication" and row[1] == "communication"]
    computing = {row[0] for row in here if row[0] != "backward" or moment < _handed_over(row, begun)}
    for kind in ("forward", "backward", "optimizer", "evaluate", "checkpoint", "transfer"):
        if kind in computing:
            return kind, bool(beside)
    for kind in ("waiting", "communication"):
        if kind in beside:
            return kind, False
    kinds = {row[0] for row in here}
    return next((kind for kind in ("backward", "data", "waiting") if kind in kinds), "idle"), False


def _handed_over(row: Row, begun: list[int]) -> int:
    return max((at for at in begun if row[3] <= at < row[4]), default=row[4])


def _part(ranks: list[list[Row]], rank: int, row: Row, moment: int) -> str:
    """Waiting until the last rank has come (a broadcast: its source), but not for what it left the collective before
    later; communication from there."""
    # a rank without any collective is not among those that communicate
    members = [at for at, spans in enumerate(ranks) if any(r[5] >= 0 for r in spans)]
    came = {at: r[3] for at in members for r in ranks[at] if r[5] == row[5]}
    if len(came) < len(members):
        return "communication"
    source = members[0] if row[2] == 2 else max(members, key=lambda at: came[at])
    for before in sorted({r[5] for spans in ranks for r in spans if 0 <= r[5] < row[5]}, reverse=True):
        left = {at: max((r[4] for r in ranks[at] if 0 <= r[5] <= before), default=None) for at in members}
        if left[source] is None or left[source] <= came[source]:
            later = max(left[source] - left[rank], 0) if None not in left.values() else 0
            return "waiting" if moment < came[source] - later else "communication"
    return "waiting" if moment < came[source] else "communication"


@given(two_ranks())
def test_accounts_equal_the_oracle_that_looks_at_each_moment(ranks: list[list[Row]]) -> None:
    spans = table(ranks)
    arrivals = arrival_table(spans, NAMES)
    for rank in (0, 1):
        moments, hidden = oracle(ranks, rank)
        account = attribution_of(spans[spans["rank"] == rank], arrivals)
        sums = account.sums(account.start[:1])[0] * 1e9 if len(account.start) else np.zeros(HIDDEN + 1)
        expected = {kind: moments.count(kind) for kind in KINDS}
        assert {kind: round(sums[code]) for kind, code in KIND.items()} == expected
        assert round(sums[HIDDEN]) == hidden and sums[OUTSIDE] == 0


def test_a_rank_that_has_no_record_of_a_collective_leaves_it_without_a_last_arrival() -> None:
    spans = table(
        [
            [("communication", "main", 1, 0, 5, 0), ("communication", "main", 1, 6, 9, 1)],
            [("communication", "main", 1, 2, 5, 0)],
        ]
    )
    arrivals = arrival_table(spans, NAMES)
    assert arrivals.until_of(np.zeros(3, int), np.array([0, 1, 7])).tolist() == [2, ABSENT, ABSENT]
    assert arrivals.until_of(np.array([1, 2]), np.array([0, 0])).tolist() == [2, ABSENT]
    assert arrivals.together.tolist() == [True, False]


def test_a_rank_that_left_the_last_collective_later_is_waited_for_no_longer_than_it_worked_longer() -> None:
    spans = table(
        [
            [("communication", "main", 1, 0, 10, 0), ("communication", "main", 1, 15, 40, 1)],
            [("communication", "main", 1, 0, 18, 0), ("communication", "main", 1, 25, 40, 1)],
        ]
    )
    arrivals = arrival_table(spans, NAMES)
    # Rank 1 left 8 later, through its link, and worked 7 instead of 5.
    assert arrivals.until_of(np.array([0, 1]), np.array([1, 1])).tolist() == [17, 25]
    seconds = attribution_of(spans[spans["rank"] == 0], arrivals).sums(np.zeros(1, np.int64))[0] * 1e9
    assert seconds[KIND["waiting"]] == pytest.approx(2) and seconds[KIND["communication"]] == pytest.approx(10 + 23)


@pytest.mark.parametrize("buckets", [(1.0,), (0.25, 0.5, 1.0), (0.9,)])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_known_schedules_come_back_to_the_nanosecond(ranks: int, buckets: tuple[float, ...]) -> None:
    schedule = Schedule(ranks=ranks, steps=7, buckets=buckets, transmit=4, gap=1)
    table = step_table_of(played(schedule, even()))
    seconds = table.seconds.sum(axis=0) / 7 * 1000  # ms a step
    handed = 20 * buckets[-1]
    chain = 0.0
    for part in buckets:
        chain = max(chain, 20 * part) + 4
    for rank in range(ranks):
        found = {kind: seconds[rank, code] for kind, code in KIND.items()}
        assert [found[phase] for phase in ("data", "forward", "optimizer")] == pytest.approx([2, 10, 3])
        assert found["communication"] == pytest.approx(chain - handed)
        assert found["backward"] == pytest.approx(max(chain, 20) - (chain - handed))
        assert found["waiting"] == 0
        assert found["idle"] == pytest.approx(2 - 1 / 7)  # nothing is before the first span
    assert table.step.tolist() == list(range(1, 8)) and set(PHASES) < set(KINDS)
