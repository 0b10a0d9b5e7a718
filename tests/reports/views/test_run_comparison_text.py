"""Two runs beside each other: what is the same, what is clear, what chance makes, and how it is shown."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from meshwise.reports.analyse import report_of
from meshwise.reports.compare_runs import RunComparison, TimeDifference, change, compare_runs, comparison_dict, signed
from meshwise.reports.run_report import Report
from meshwise.reports.spans import KIND, KINDS, RunSession, Timeline
from meshwise.reports.step_table import OF_STEP, StepTable, step_table_of
from meshwise.reports.views.run_text import run_comparison_text
from tests.reports.schedules import Schedule, Works, even, jittered, played
from tests.reports.views.reports import printed

Run = tuple[StepTable, Report]
CALM = Schedule(ranks=2, steps=60)


def run_of(works: Works, name: str, schedule: Schedule = CALM) -> Run:
    timeline = played(schedule, works)
    return step_table_of(timeline), report_of(timeline, f"runs/{name}")


def row(comparison: RunComparison, kind: str) -> TimeDifference:
    return next(difference for difference in comparison.kinds if difference.kind == kind)


def test_a_run_and_itself_differ_in_nothing() -> None:
    run = run_of(jittered(even(), 1), "a")
    comparison = compare_runs(run, run)
    assert comparison.step is not None and comparison.step.ratio == 1.0 and not comparison.step.clear
    assert not any(kind.clear or kind.difference for kind in comparison.kinds)
    assert comparison.verdict == "No clear difference in the time of a step (38 ms to 38 ms)."
    assert comparison.notes == []


def test_what_was_slowed_is_clear_and_leads_the_verdict() -> None:
    slow = run_of(jittered(even(backward=24), 2), "slow")
    comparison = compare_runs(run_of(jittered(even(), 1), "base"), slow)
    backward = row(comparison, "backward")
    assert backward.clear and backward.difference == pytest.approx(4e-3, rel=0.15)
    assert backward.low is not None and backward.high is not None and backward.ratio is not None
    assert 1 < backward.low < backward.ratio < backward.high < 1.4
    assert not row(comparison, "forward").clear
    assert comparison.verdict.startswith("slow is 12 % slower a step (38 ms to 42 ms): backward +4.")
    assert "(clear)" in comparison.verdict
    back = compare_runs(slow, run_of(jittered(even(), 1), "base"))
    assert back.verdict.startswith("base is 10 % faster a step (42 ms to 38 ms): backward -4.")


def test_medians_are_those_of_the_book() -> None:
    first, second = run_of(jittered(even(), 1), "a"), run_of(jittered(even(forward=12), 2), "b")
    comparison = compare_runs(first, second)
    for at, (table, _) in enumerate((first, second)):
        kinds = table.kind_seconds()[table.steady]
        for kind in comparison.kinds:
            assert (kind.first, kind.second)[at] == float(np.median(kinds[:, KIND[kind.kind]]))
        assert comparison.step is not None
        assert (comparison.step.first, comparison.step.second)[at] == float(
            np.median(table.step_seconds()[table.steady])
        )
    assert [kind.kind for kind in comparison.kinds] == [
        kind for kind in KINDS if kind in {k.kind for k in comparison.kinds}
    ]
    assert "evaluate" not in {kind.kind for kind in comparison.kinds}


def test_it_says_the_same_every_time() -> None:
    runs = run_of(jittered(even(), 1), "a"), run_of(jittered(even(), 2), "b")
    assert compare_runs(*runs) == compare_runs(*runs)


def test_a_kind_that_only_one_run_has() -> None:
    without, with_data = run_of(even(data=0), "without"), run_of(jittered(even(data=5), 3), "with")
    data = row(compare_runs(without, with_data), "data")
    assert (data.first, data.ratio, data.low, data.high, data.clear) == (0.0, None, None, None, True)
    back = row(compare_runs(with_data, without), "data")
    assert back.ratio == 0.0 and back.second == 0.0 and back.clear
    assert "transfer" not in {kind.kind for kind in compare_runs(without, with_data).kinds}
    assert "d data" in printed(run_comparison_text(compare_runs(without, with_data)))


def test_a_short_run_says_nothing_of_chance() -> None:
    short = run_of(even(backward=40), "short", Schedule(ranks=2, steps=4))
    comparison = compare_runs(run_of(even(), "long"), short)
    assert comparison.step is not None and comparison.step.low is None
    assert not comparison.step.clear and not any(kind.clear for kind in comparison.kinds)
    assert comparison.verdict.startswith("No clear difference in the time of a step (37 ms to 57 ms): backward +20 ms")
    assert "short has 4 steps: too few to tell a difference from chance." in comparison.notes


def test_runs_without_steps_are_compared_as_a_whole() -> None:
    timeline = Timeline(sessions=(RunSession(0, 2 * 10**9, "failed"),), facts={"job": "gone"})
    empty = step_table_of(timeline), report_of(timeline, "runs/empty")
    run = run_of(even(), "full")
    comparison = compare_runs(run, empty)
    assert comparison.step is None and comparison.kinds == []
    assert comparison.verdict == "Nothing to compare step by step: gone recorded no step."
    assert {figure.name: figure.second for figure in comparison.figures}["wall time"] == 2.0
    assert "Nothing to compare" in printed(run_comparison_text(comparison))
    assert compare_runs(empty, empty).verdict.endswith("the first and the second recorded no step.")


def test_different_numbers_of_ranks_and_devices_are_noted() -> None:
    three, two = run_of(even(), "three", Schedule(ranks=3)), run_of(even(), "two", Schedule(ranks=2))
    on_cuda = [dataclasses.replace(rank, device=f"cuda:{rank.rank}") for rank in two[1].ranks]
    comparison = compare_runs(
        three, (two[0], dataclasses.replace(two[1], ranks=on_cuda, missing=["rank 2 left no log."]))
    )
    assert comparison.ranks == (3, 2)
    assert comparison.notes == [
        "The runs have 3 and 2 ranks: their steps differ. Compare samples/s.",
        "two is not complete: rank 2 left no log.",
    ]
    assert "kind of device cpu → cuda" in comparison.differs


def test_figures_of_the_runs_as_a_whole() -> None:
    first, second = run_of(even(), "a"), run_of(even(), "b")
    memory = [dataclasses.replace(rank, memory={"resident": 2.0**30 * (1 + rank.rank)}) for rank in first[1].ranks]
    report = dataclasses.replace(first[1], samples_per_second=100.0, ranks=memory)
    figures = {f.name: f for f in compare_runs((first[0], report), second).figures}
    assert (figures["throughput"].first, figures["throughput"].second) == (100.0, None)
    assert (figures["resident memory"].first, figures["resident memory"].unit) == (2.0**31, "bytes")
    assert figures["useful"].first == report.goodput[0].share
    assert "saving" not in figures  # neither did


def with_noise(run: Run, rng: np.random.Generator, memory: float) -> Run:
    """The run with steps that vary by chance, each like the one before it by `memory`."""
    table, report = run
    noise = rng.normal(0, 0.1, len(table.step))
    for at in range(1, len(noise)):
        noise[at] = memory * noise[at - 1] + np.sqrt(1 - memory**2) * noise[at]
    return dataclasses.replace(table, seconds=table.seconds * np.exp(noise)[:, None, None]), report


@pytest.mark.usefixtures("takes_seconds")
@pytest.mark.parametrize(("memory", "most"), [(0.0, 6), pytest.param(0.7, 9, marks=pytest.mark.slow)])
def test_chance_is_seldom_called_clear(memory: float, most: int) -> None:
    rng = np.random.default_rng(7)
    run = run_of(even(), "a", Schedule(ranks=2, steps=200))
    found = [compare_runs(with_noise(run, rng, memory), with_noise(run, rng, memory)).step for _ in range(40)]
    assert sum(step.clear for step in found if step is not None) <= most


@pytest.mark.usefixtures("takes_seconds")
def test_a_difference_beyond_chance_is_called_clear() -> None:
    rng = np.random.default_rng(8)
    runs = [run_of(even(forward=ms), str(ms), Schedule(ranks=2, steps=200)) for ms in (10, 14)]
    found = [compare_runs(*(with_noise(run, rng, 0.3) for run in runs)).step for _ in range(20)]
    assert sum(step.clear for step in found if step is not None) >= 18


def test_it_is_plain_json() -> None:
    record = comparison_dict(compare_runs(run_of(even(data=0), "a"), run_of(even(), "b")))
    assert json.loads(json.dumps(record, allow_nan=False))["step"]["kind"] == "step"
    assert record["meshwise_comparison"] == 1


def test_names_are_the_shortest_that_tell_runs_apart() -> None:
    run = run_of(even(), "same")
    other = run[0], dataclasses.replace(run[1], title="another job")
    elsewhere = run[0], dataclasses.replace(run[1], folder="old/same")
    assert (compare_runs(run, other).first, compare_runs(run, other).second) == ("schedule", "another job")
    assert compare_runs(run, elsewhere).second == "old/same"
    assert compare_runs(run, run).second == "the second"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.12, "12 % slower"), (0.969, "3.1 % faster"), (2.5, "2.5 times as slow"), (1.0, "0.0 % slower")],
)
def test_how_a_change_is_said(ratio: float, text: str) -> None:
    assert change(ratio) == text


def test_how_a_difference_is_said() -> None:
    assert [signed(seconds) for seconds in (3.1e-3, -85e-6, 0.0)] == ["+3.1 ms", "-85 µs", "0 s"]


def test_the_whole_text_of_two_runs() -> None:
    text = printed(
        run_comparison_text(
            compare_runs(run_of(jittered(even(), 1), "base"), run_of(jittered(even(backward=24), 2), "slow"))
        )
    )
    lines = text.splitlines()
    assert lines[:2] == ["A  base · 2 ranks, 60 steps", "B  slow · 2 ranks, 60 steps"]
    assert lines[2].startswith("slow is 12 % slower a step (38 ms to 42 ms): backward +4.")
    table = lines[lines.index("") + 1 :]
    assert table[0] == "a step                A       B    B - A  B / A            95 %"
    assert [line[:15].rstrip() for line in table[1:8]] == [
        "d data", "f forward", "b backward", "═ communication", "░ waiting", "o optimizer", "the step",
    ]  # fmt: skip
    assert table[3].endswith("clear") and table[2].endswith("within noise")
    assert len({len(line) for line in table[1:8]}) == 1
    assert "the run" in text and "useful" in text


@pytest.mark.parametrize("width", [30, 46, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_and_nothing_is_left_out(width: int, encoding: str) -> None:
    comparison = compare_runs(run_of(jittered(even(), 1), "base"), run_of(jittered(even(backward=24), 2), "slow"))
    text = printed(run_comparison_text(comparison, width), width, encoding)
    assert max(map(len, text.splitlines())) <= width
    assert encoding == "utf-8" or text.isascii()
    wide = printed(run_comparison_text(comparison), 80, encoding).splitlines()
    backward = next(line for line in wide if line.startswith("b backward"))
    assert set(backward.split()) <= set(text.split())


def test_every_kind_of_a_step_can_be_shown() -> None:
    assert {KINDS[code] for code in OF_STEP} == {*KINDS} - {"evaluate", "checkpoint"}


def test_arguments_and_last_metrics_of_both_runs_are_shown() -> None:
    table, report = run_of(even(), "a")
    facts = [
        {"request": {"args": ["lr=0.1"]}, "metrics": {"accuracy": 0.9, "loss": 0.25}},
        {"request": {"args": ["lr=0.2"]}, "metrics": {"accuracy": 0.95}},
    ]
    runs = [(table, dataclasses.replace(report, facts=dict(report.facts) | of_run)) for of_run in facts]
    comparison = compare_runs(runs[0], runs[1])
    assert "lr 0.1 → 0.2" in comparison.differs
    figures = {figure.name: (figure.first, figure.second) for figure in comparison.figures if figure.unit == "metric"}
    assert figures == {"last accuracy": (0.9, 0.95), "last loss": (0.25, None)}
    assert "last accuracy" in printed(run_comparison_text(comparison))
