"""Who was late, where, and what it cost: on schedules that are known, and on a hundred in which nobody was."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.analyse import report_of
from meshwise.reports.run_report import Report
from meshwise.reports.spans import KIND, KINDS
from meshwise.reports.step_table import SyncPoints, decisive, step_table_of, straggler_ranks, tail_bound
from tests.reports.schedules import PHASES, Schedule, delayed, even, jittered, played, shifted


def straggler_findings(report: Report) -> list[tuple[int | None, str | None]]:
    return [(finding.rank, finding.phase) for finding in report.findings if finding.kind == "straggler"]


@pytest.mark.parametrize("phase", PHASES)
def test_twenty_more_milliseconds_are_found_with_their_rank_phase_and_cost(phase: str) -> None:
    works = delayed(jittered(even(), seed=1), rank=1, phase=phase, ms=20)
    timeline = played(Schedule(ranks=3, steps=60), works)
    met = step_table_of(timeline).sync_points
    # An optimizer is late for the next step's meeting: the first has none before it.
    assert (met.rank == 1).mean() >= 0.95 and (met.phase[met.rank == 1] == KIND[phase]).mean() >= 0.95
    assert met.cost[met.rank == 1].sum() / 60 == pytest.approx(0.020, rel=0.2)
    report = report_of(timeline)
    assert straggler_findings(report) == [(1, phase)]
    (finding,) = [finding for finding in report.findings if finding.kind == "straggler"]
    assert finding.seconds == pytest.approx(0.020, rel=0.2)
    assert report.verdict.startswith("Rank 1 is a straggler") and f"in {phase}" in report.verdict


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        ("data=3", "If this rank stays slow: --set shares=1.7,1,1.7."),
        ("data=3, shares=(1, 1, 2)", "If this rank stays slow: --set shares=1.7,1,3.3."),
        ("data=3, tensor=2", None),
        ("", None),
    ],
)
def test_a_rank_that_computes_slowly_should_take_less(plan: str, advice: str | None) -> None:
    timeline = played(Schedule(ranks=3, steps=60), delayed(even(), rank=1, phase="forward", ms=20))
    timeline = dataclasses.replace(timeline, facts={**timeline.facts, "plan": plan})
    (finding,) = [finding for finding in report_of(timeline).findings if finding.kind == "straggler"]
    assert finding.advice.endswith(advice) if advice else "shares" not in finding.advice


def test_the_walls_of_the_backward_do_not_show_it() -> None:
    """Why arrivals are compared: the all-reduce makes every backward as long as the late one."""
    timeline = played(Schedule(ranks=3, steps=20), delayed(even(), rank=1, phase="backward", ms=20))
    spans = timeline.spans[timeline.spans["kind"] == KIND["backward"]]
    walls = [np.median((spans["end"] - spans["start"])[spans["rank"] == rank]) for rank in range(3)]
    assert max(walls) - min(walls) < 1000


def test_a_rank_that_is_late_while_the_links_are_busy_costs_less_than_its_lateness() -> None:
    """30 ms of communication hide most of 20 late ms in the last quarter of the backward: the replay knows."""
    schedule = Schedule(ranks=3, steps=30, buckets=(0.25, 1.0), transmit=30)
    timeline = played(schedule, delayed(even(), rank=2, phase="backward", ms=20))
    met = step_table_of(timeline).sync_points
    # Rank 2's buckets come at 10 and 40 ms instead of 5 and 20: the chain ends at 10 + 60 instead of 5 + 60.
    assert set(met.rank.tolist()) == {2} and met.cost.mean() == pytest.approx(0.005, rel=1e-6)


def test_two_late_ranks_are_both_found() -> None:
    def works(step: int, rank: int) -> dict[str, float]:
        extra = {1: "data", 3: "forward"}.get(rank) if step % 2 == rank // 2 else None
        found = jittered(even(), seed=3)(step, rank)
        return found | {extra: found[extra] + 25} if extra else found

    report = report_of(played(Schedule(ranks=4, steps=200), works))
    assert sorted(straggler_findings(report)) == [(1, "data"), (3, "forward")]


@pytest.mark.usefixtures("takes_seconds")
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_hundred_clean_runs_name_nobody(ranks: int) -> None:
    """The stated rate is one in a thousand runs (`late.CHANCE`), and what chance does costs less than 2 %."""
    named = [
        straggler_findings(report_of(played(Schedule(ranks=ranks, steps=25), jittered(even(), seed=seed, spread=0.1))))
        for seed in range(100)
    ]
    assert sum(map(len, named)) == 0


def test_a_lateness_within_the_error_of_the_clocks_is_not_told() -> None:
    timeline = played(Schedule(ranks=2, steps=40), delayed(even(1, 1, 1, 1), rank=1, phase="forward", ms=0.2))
    assert straggler_findings(report_of(timeline)) == [(1, "forward")]
    wide = type(timeline.clocks[0])
    unsure = type(timeline)(**{**vars(timeline), "clocks": (wide(0), wide(1, error=150_000.0))})
    assert straggler_findings(report_of(unsure)) == []


def test_a_late_rank_is_named_even_where_the_clocks_are_off() -> None:
    """30 ms of skew would turn the late rank into the one that waits, if arrivals were compared across clocks."""
    timeline = played(Schedule(ranks=2, steps=30), delayed(even(), rank=1, phase="forward", ms=20))
    for skew in (0, -30_000_000, 30_000_000):
        assert set(step_table_of(shifted(timeline, 1, skew)).sync_points.rank.tolist()) == {1}


def test_one_rank_has_no_meetings_and_a_report() -> None:
    report = report_of(played(Schedule(ranks=1, steps=12), even()))
    assert report.ranks[0].sync_points == 0 and report.verdict.startswith("Compute-bound")


@pytest.mark.parametrize(
    ("works", "kind", "share"),
    [(even(data=20), "input", 20 / 55), (even(), "compute", 33 / 37), (even(forward=1, backward=2), "compute", 6 / 11)],
)
def test_the_verdict_names_what_takes_the_time(works: object, kind: str, share: float) -> None:
    report = report_of(played(Schedule(ranks=2, steps=12), works))  # type: ignore[arg-type]
    found = {finding.kind: finding for finding in report.findings}
    assert kind in found and found[kind].share == pytest.approx(share, rel=0.02)
    assert f"{found[kind].share:.0%}".replace("%", " %") in found[kind].sentence


def test_slow_links_are_told_from_slow_ranks() -> None:
    report = report_of(played(Schedule(ranks=3, steps=30, buckets=(1.0,), transmit=40), jittered(even(), seed=2)))
    assert report.findings[0].kind == "communication" and straggler_findings(report) == []
    assert report.kinds["communication"] / 30 == pytest.approx(0.040, rel=0.01)
    (all_reduce,) = report.collectives
    assert all_reduce.seconds == pytest.approx(0.040, rel=0.01)
    assert all_reduce.bus_bandwidth == pytest.approx(2 * 2 / 3 * 4096 / all_reduce.seconds)


@pytest.mark.parametrize("late", [0.0, 20.0])
def test_slow_sending_is_no_ranks_fault(late: float) -> None:
    schedule = Schedule(ranks=3, steps=30, buckets=(1.0,), transmit=40)
    report = report_of(played(schedule, delayed(even(), rank=2, phase="forward", ms=late)))
    (found,) = [finding for finding in report.findings if finding.kind == "communication"]
    assert "sending is slow" in found.sentence
    assert ("without the cost of rank 2" in found.sentence) == (late > 0)


def test_a_rank_that_leaves_every_collective_later_has_a_slow_link_and_is_not_late() -> None:
    schedule = Schedule(ranks=3, steps=30, buckets=(1.0,), transmit=20, tails=(0.0, 0.0, 30.0))
    report = report_of(played(schedule, jittered(even(), seed=2, spread=0.01)))
    found = [finding.kind for finding in report.findings]
    assert found == ["communication", "compute"]
    # Ranks 0 and 1 come 30 ms before rank 2, which works no longer than they do: 50 ms of communication on each.
    assert [rank.seconds["communication"] / 30 for rank in report.ranks] == pytest.approx([0.050] * 3, rel=0.05)
    assert report.kinds["waiting"] / 30 < 0.001


def test_one_stall_of_the_rank_with_the_slow_link_is_not_taken_for_lateness() -> None:
    """It comes last in every step because of its link: that must not lend weight to what happened once."""
    stalled = delayed(even(), rank=2, phase="forward", ms=200)
    schedule = Schedule(ranks=3, steps=30, buckets=(1.0,), transmit=20, tails=(0.0, 0.0, 30.0))
    works = jittered(lambda step, rank: (stalled if step == 15 else even())(step, rank), seed=4, spread=0.01)
    assert straggler_findings(report_of(played(schedule, works))) == []


def test_lateness_does_not_count_what_a_slow_link_adds() -> None:
    schedule = Schedule(ranks=3, steps=30, buckets=(1.0,), transmit=20, tails=(0.0, 0.0, 30.0))
    report = report_of(played(schedule, delayed(even(), rank=2, phase="forward", ms=20)))
    late, communication = (next(f for f in report.findings if f.kind == k) for k in ("straggler", "communication"))
    assert (late.rank, late.phase) == (2, "forward") and late.seconds == pytest.approx(0.020, rel=0.05)
    assert "by 20 ms" in late.sentence and communication.seconds == pytest.approx(0.050, rel=0.05)
    assert "not a rank" not in communication.sentence


def test_ranks_that_are_late_by_turns_are_uneven_not_late() -> None:
    def works(step: int, rank: int) -> dict[str, float]:
        found = even()(step, rank)
        return found | {"forward": found["forward"] + 15} if step % 3 == rank else found

    report = report_of(played(Schedule(ranks=3, steps=60), works))
    assert straggler_findings(report) == [] and report.findings[0].kind == "imbalance"


def test_a_rank_is_late_although_others_are_last_in_meetings_that_cost_nothing() -> None:
    meetings = [(step, 1, 0.02) for step in range(24)] + [(step, 0, 1e-5) for step in range(0, 24, 2)]
    step, rank, cost = (np.array(each) for each in zip(*sorted(meetings), strict=True))
    assert straggler_ranks(rank[decisive(SyncPoints(step, rank, cost, rank, cost))], np.arange(2)) == [1]


@given(st.integers(2, 400), st.floats(0.1, 0.9), st.data())
def test_the_bound_on_the_tail_holds(total: int, fair: float, data: st.DataObject) -> None:
    times = data.draw(st.integers(0, total))
    chance = np.random.default_rng(total).binomial(total, fair, 4000)
    assert (chance >= times).mean() <= tail_bound(total, times, fair) + 0.03
    assert 0 <= tail_bound(total, times, fair) <= 1


def test_sums_over_the_run_are_those_of_the_ranks() -> None:
    report = report_of(played(Schedule(ranks=4, steps=33), jittered(even(), seed=5)))
    for kind in KINDS:
        mean = sum(rank.seconds[kind] for rank in report.ranks) / 4
        assert report.kinds[kind] == pytest.approx(mean)


def test_rare_stalls_that_take_much_of_the_time_are_told() -> None:
    def works(step: int, rank: int) -> dict[str, float]:
        found = even()(step, rank)
        return found | {"forward": 600.0} if step in (20, 50) else found

    report = report_of(played(Schedule(ranks=2, steps=80), works))
    assert report.findings[0].kind == "stalls"
    assert "3 times the median" in report.verdict and ("step 20" in report.verdict or "step 50" in report.verdict)


def test_only_the_largest_part_binds() -> None:
    report = report_of(played(Schedule(ranks=2, steps=20, buckets=(1.0,), transmit=8), even()))
    (found,) = [finding for finding in report.findings if finding.kind == "communication"]
    assert found.sentence.startswith("Communication: 19 %")


def test_with_one_log_of_two_communication_is_not_told_from_waiting() -> None:
    timeline = played(Schedule(ranks=2, steps=20, buckets=(1.0,), transmit=30), even())
    alone = dataclasses.replace(timeline, spans=timeline.of_rank(0), ranks=timeline.ranks[:1])
    (found,) = [finding for finding in report_of(alone).findings if finding.kind == "communication"]
    assert "waiting for ranks that left no log" in found.sentence


def test_a_rank_that_is_last_in_three_steps_of_five_makes_no_headline() -> None:
    """Of two ranks, one is last in half of the steps by chance alone."""

    def works(step: int, rank: int) -> dict[str, float]:
        return even()(step, rank) | ({"forward": 30.0} if rank == (step % 5 < 3) else {})

    report = report_of(played(Schedule(ranks=2, steps=500), works))
    assert straggler_findings(report) == [] and "Rank" not in report.headline
    (found,) = [finding for finding in report.findings if finding.kind == "late"]
    assert found.sentence.startswith("Rank 1 is often late in forward: last in 60 % of the steps")
    assert [rank.last_steps for rank in report.ranks] == pytest.approx([200, 300], abs=2)


def test_last_counts_steps_where_ranks_meet_several_times_in_each() -> None:
    report = report_of(played(Schedule(ranks=2, steps=40), delayed(even(), rank=1, phase="forward", ms=20)))
    assert report.ranks[1].last_steps == 40 and sum(rank.last_steps for rank in report.ranks) <= 40
