"""What the report says limited a run: its headline, what the collectives sent, and devices that are slower than one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwise.reports.analyse import report_of
from meshwise.reports.compare_runs import compare_runs
from meshwise.reports.run_report import Report
from meshwise.reports.spans import Timeline, collective_name
from meshwise.reports.step_table import step_table_of
from meshwise.spec.units import seconds_text
from tests.reports.schedules import Schedule, delayed, even, jittered, played

BUCKETS = 10


def named(timeline: Timeline, of: str) -> Timeline:
    """The same run: all collectives of a step but its last send `of` (64 B), the last one gradients (4 MiB)."""
    spans = timeline.spans.copy()
    collective = spans["collective"] >= 0
    last = collective & (spans["collective"] % BUCKETS == BUCKETS - 1)
    spans["name"][collective], spans["bytes"][collective] = 1, 64
    spans["name"][last], spans["bytes"][last] = 2, 4 << 20
    names = ("", collective_name("all-reduce", of), collective_name("all-reduce", "gradients"))
    return dataclasses.replace(timeline, spans=spans, names=names)


def small_collectives(transmit: float, of: str = "batch norm") -> Report:
    schedule = Schedule(ranks=2, buckets=tuple(np.linspace(0.1, 1.0, BUCKETS)), transmit=transmit)
    return report_of(named(played(schedule, jittered(even(), 3)), of))


def test_what_takes_most_of_the_time_is_named_not_what_moves_most() -> None:
    report = small_collectives(8.0)
    first = report.collectives[0]
    assert (first.name, first.of, first.bytes) == ("all-reduce", "batch norm", 64)
    assert first.share == pytest.approx(0.9, abs=0.05)
    assert sum(c.share for c in report.collectives) == pytest.approx(1)
    found = next(finding for finding in report.findings if finding.kind == "communication")
    assert "9 of 10 collectives a step are of batch norm, of at most 64 B" in found.sentence
    assert "latency, not bandwidth, is the limit" in found.sentence
    assert "batch_norm=local" in found.advice and "bf16" not in found.advice
    assert "mostly batch norm" in found.headline


def test_mostly_is_more_than_half_and_a_share_of_a_step_is_beside_the_step_that_it_is_of() -> None:
    schedule = Schedule(ranks=2, buckets=tuple(np.linspace(0.1, 1.0, BUCKETS)), transmit=8.0)
    timeline = named(played(schedule, jittered(even(), 3)), "batch norm")
    spans = timeline.spans.copy()
    collective = spans["collective"] >= 0
    spans["name"][collective] = 1 + spans["collective"][collective] % 3
    names = ("", *(collective_name("all-reduce", of) for of in ("the loss", "gradients", "mw.sum")))
    report = report_of(dataclasses.replace(timeline, spans=spans, names=names))
    found = next(finding for finding in report.findings if finding.kind == "communication")
    assert report.collectives[0].share < 0.5 and "mostly" not in found.headline
    step = found.seconds / found.share
    assert f"({seconds_text(found.seconds)} of {seconds_text(step)} on average)" in found.sentence


def test_the_skew_of_the_ranks_is_told_from_communication() -> None:
    schedule = Schedule(ranks=2, buckets=(1.0,), transmit=2.0)
    (found,) = report_of(played(schedule, delayed(even(), 1, "forward", 6.0))).collectives
    assert found.seconds == pytest.approx(2e-3, rel=0.01)
    assert found.skew_seconds == pytest.approx(6e-3, rel=0.01)


def test_devices_that_are_slower_than_one_are_told_so() -> None:
    report = small_collectives(16.0)  # 67 ms are computed by both, the optimizer's step once, and a step takes over 160
    assert report.headline == "2 devices are slower than one."
    assert report.verdict.startswith("2 devices are slower than one: a step takes 17")
    assert "one device would need 36 ms to 67 ms (estimated" in report.verdict


def test_a_step_that_the_ranks_divide_is_a_step_of_them_all() -> None:
    estimates = []
    for of in ("batch norm", "parameters"):
        report = small_collectives(16.0, of)
        estimates.append(next(f for f in report.findings if f.kind == "slower").sentence)
    assert "36 ms to 67 ms" in estimates[0] and "36 ms to 70 ms" in estimates[1]


@pytest.mark.parametrize("transmit", [0.5, 2.0, 4.0])
def test_devices_that_may_be_faster_are_left_in_peace(transmit: float) -> None:
    assert not [finding for finding in small_collectives(transmit).findings if finding.kind == "slower"]


@pytest.mark.parametrize("transmit", [0.5, 2.0, 8.0, 16.0])
@pytest.mark.parametrize("of", ["batch norm", "gradients", "parameters", "mw.sum", ""])
def test_a_headline_has_at_most_ten_words(transmit: float, of: str) -> None:
    report = small_collectives(transmit, of)
    assert report.headline == report.findings[0].headline
    assert all(0 < len(finding.headline.split()) <= 10 for finding in report.findings)


def test_two_runs_say_what_differs_and_a_slower_one_fails() -> None:
    facts = {"plan": "data=2, recompute=full", "world": 2, "request": {"precision": None, "epochs": 3}, "commit": "a1"}
    other = {"plan": "shard=2", "world": 2, "request": {"precision": "bf16", "epochs": 3}, "commit": "b2"}
    runs = []
    for known, backward in ((facts, 20.0), (other, 24.0)):
        timeline = played(Schedule(ranks=2, steps=60), jittered(even(backward=backward), 1))
        timeline = dataclasses.replace(timeline, facts=timeline.facts | known)
        runs.append((step_table_of(timeline), report_of(timeline, "runs/x")))
    found = compare_runs(runs[0], runs[1])
    assert found.differs == [
        "commit a1 → b2",
        "data 2 → default",
        "recompute full → default",
        "precision default → bf16",
        "shard default → 2",
    ]


def test_a_report_says_what_was_run() -> None:
    timeline = played(Schedule(), even())
    facts = timeline.facts | {"plan": "data=2", "command": "meshwise run x.py:job", "commit": "", "metric": "loss 0.1"}
    report = report_of(dataclasses.replace(timeline, facts=facts))
    assert report.about == {"plan": "data=2", "command": "meshwise run x.py:job", "metric": "loss 0.1"}
