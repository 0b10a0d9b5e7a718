"""OpenMetrics: read back by Prometheus' own parsers, every value is the report's."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.errors import UsageError
from meshwise.timeline.analyse import report_of
from meshwise.timeline.run_report import Finding, GoodputPart, Report
from meshwise.timeline.timeline import Timeline
from meshwise.timeline.views.openmetrics import render
from tests.timeline.schedules import Schedule, delayed, even, played

Values = dict[str, float]
"""By sample, as `name{label="value"}` with the labels sorted."""


pytest.importorskip("prometheus_client")


def text_of(report: Report) -> str:
    return render(report, Timeline())


def read(text: str) -> Values:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return values(parser.text_string_to_metric_families(text))


def read_as_node_exporter_does(text: str) -> Values:
    parser = pytest.importorskip("prometheus_client.parser")
    return values(parser.text_string_to_metric_families(text))


def values(families: Any) -> Values:
    found: Values = {}
    for family in families:
        for sample in family.samples:
            key = named(sample.name, **sample.labels)
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def named(name: str, **labels: object) -> str:
    return f"{name}{sorted((key, str(value)) for key, value in labels.items())}"


@pytest.fixture(scope="module")
def report() -> Report:
    """Three ranks, of which rank 2 comes late, with memory, a rate and clocks that are off."""
    made = report_of(played(Schedule(steps=30), delayed(even(), 2, "forward", 8)))
    ranks = [
        dataclasses.replace(
            r, memory={"allocated": 2.0**30 + r.rank, "resident": 4.5e9}, dropped=r.rank, overhead_seconds=0.5
        )
        for r in made.ranks
    ]
    clocks = [dataclasses.replace(clock, error_seconds=1.5e-5 * clock.rank) for clock in made.clocks]
    return dataclasses.replace(made, ranks=ranks, clocks=clocks, samples_per_second=1234.5)


def expected(report: Report) -> Values:
    """Every sample that must be there, from the report alone."""
    about = {key: getattr(report, key) for key in ("status", "source", "folder", "verdict")}
    found = {
        named("meshwise_run_info", job=report.title, **about): 1,
        named("meshwise_steps_total"): report.steps,
        named("meshwise_step_seconds", quantile="0.5"): report.step_seconds,
        named("meshwise_step_seconds", quantile="0.95"): report.step_seconds_p95,
        named("meshwise_samples_per_second"): report.samples_per_second,
        named("meshwise_wall_seconds_total"): report.wall_seconds,
    }
    for part in report.goodput:
        found[named("meshwise_goodput_seconds_total", part=part.name)] = part.seconds
        found[named("meshwise_goodput_ratio", part=part.name)] = part.share
    for part in report.waiting:
        found[named("meshwise_waiting_seconds_total", part=part.name)] = part.seconds
    for clock in report.clocks:
        found[named("meshwise_clock_error_seconds", rank=clock.rank)] = clock.error_seconds
    for r in report.ranks:
        found[named("meshwise_rank_info", rank=r.rank, device=r.device, host=r.host)] = 1
        found |= {named("meshwise_phase_seconds_total", rank=r.rank, phase=kind): s for kind, s in r.seconds.items()}
        found |= {named("meshwise_memory_peak_bytes", rank=r.rank, memory=name): s for name, s in r.memory.items()}
        plain = {
            "hidden_communication_seconds_total": r.hidden_seconds,
            "rank_steps_total": r.steps,
            "rank_step_seconds": r.step_seconds,
            "straggler_seconds_total": r.straggler_seconds,
            "last_steps_total": r.last_steps,
            "last_arrivals_total": r.last_arrivals,
            "sync_points_total": r.sync_points,
            "rank_complete": r.complete,
            "dropped_spans_total": r.dropped,
            "overhead_seconds_total": r.overhead_seconds,
        }
        found |= {named(f"meshwise_{name}", rank=r.rank): value for name, value in plain.items()}
    for c in report.collectives:
        labels = {"collective": c.name, "bytes": c.bytes}
        found[named("meshwise_collectives_total", **labels)] = c.count
        found[named("meshwise_collective_seconds", **labels)] = c.seconds
        found[named("meshwise_bus_bandwidth_bytes_per_second", **labels)] = c.bus_bandwidth
    for number, f in enumerate(report.findings, 1):
        rank = "" if f.rank is None else f.rank
        labels = {"number": number, "kind": f.kind, "rank": rank, "phase": f.phase or ""}
        found[named("meshwise_finding_ratio", **labels)] = f.share
        found[named("meshwise_finding_seconds", **labels)] = f.seconds
    return {key: float(value) for key, value in found.items() if value is not None}


def test_every_value_is_the_reports_and_none_is_missing(report: Report) -> None:
    assert read(text_of(report)) == expected(report)
    assert len(report.ranks) == 3 and report.collectives and report.findings  # so that the above says something


def test_the_late_rank_shows(report: Report) -> None:
    found = read(text_of(report))
    assert found[named("meshwise_straggler_seconds_total", rank=2)] == pytest.approx(30 * 8e-3, rel=0.1)
    assert found[named("meshwise_straggler_seconds_total", rank=0)] == 0
    assert found[named("meshwise_phase_seconds_total", rank=0, phase="forward")] == pytest.approx(30 * 10e-3)


def test_node_exporter_reads_the_same(report: Report) -> None:
    text = text_of(report)
    assert read_as_node_exporter_does(text) == expected(report)
    types = {line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert types <= {"counter", "gauge", "summary", "histogram", "untyped"}, "others stop its parser"
    assert not [line for line in text.splitlines() if line.startswith("# HELP") and ('"' in line or "\\" in line)]


def test_it_ends_as_it_must(report: Report) -> None:
    assert text_of(report).endswith("\n# EOF\n")
    assert text_of(report).count("# EOF") == 1


def test_units_are_said(report: Report) -> None:
    lines = text_of(report).splitlines()
    assert "# TYPE meshwise_phase_seconds counter" in lines and "# UNIT meshwise_phase_seconds seconds" in lines
    assert "# UNIT meshwise_memory_peak_bytes bytes" in lines and "# UNIT meshwise_goodput_ratio ratio" in lines


def test_a_run_without_steps_says_what_it_can() -> None:
    found = read(text_of(report_of(Timeline())))
    assert found[named("meshwise_steps_total")] == 0
    assert not [key for key in found if "step_seconds" in key or "samples_per_second" in key]


def test_what_is_unknown_is_left_out(report: Report) -> None:
    goodput = [GoodputPart("useful", math.nan, math.inf), GoodputPart("lost", -1e-17, 0.0)]
    found = read(text_of(dataclasses.replace(report, goodput=goodput, samples_per_second=None)))
    assert not [key for key in found if "useful" in key or "samples_per_second" in key]
    assert found[named("meshwise_goodput_seconds_total", part="lost")] == 0  # a counter is never below


def test_two_findings_of_one_kind_are_both_there(report: Report) -> None:
    twice = [Finding("memory", "Memory grows.", "It grows.", "Keep less.", 0.0, 0.0, 1)] * 2
    assert len([k for k in read(text_of(dataclasses.replace(report, findings=twice))) if "finding" in k]) == 4


WEIRD = st.text(max_size=10) | st.sampled_from(['"', "\\", "\n", '\\"', "\\n", 'a="b",', "} 1", "# EOF", "{", "µs 🦕"])


@given(title=WEIRD, verdict=WEIRD, phase=WEIRD)
def test_any_text_is_a_label(report: Report, title: str, verdict: str, phase: str) -> None:
    ranks = [dataclasses.replace(report.ranks[0], seconds={phase: 1.5})]
    odd = dataclasses.replace(report, title=title, verdict=verdict, ranks=ranks)
    assert read(text_of(odd)) == expected(odd)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("# EOF\n", ""),
        lambda text: text.replace("meshwise_steps_total", "meshwise_steps"),
        lambda text: text.replace("# UNIT meshwise_wall_seconds seconds", "# UNIT meshwise_wall_seconds bytes"),
        lambda text: text.replace('quantile="0.5"', 'quantile="5"'),
        lambda text: text.replace("meshwise_wall_seconds_total ", "meshwise_wall_seconds_total -"),
    ],
    ids=["no end", "a counter without _total", "a wrong unit", "a quantile above 1", "a counter below 0"],
)
def test_the_parser_catches(report: Report, spoil: Callable[[str], str]) -> None:
    text = text_of(report)
    assert spoil(text) != text
    with pytest.raises((ValueError, AssertionError)):
        read(spoil(text))


def test_without_prometheus_client_the_remedy_is_named(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", None)
    with pytest.raises(UsageError, match=r"pip install 'meshwise\[openmetrics\]'"):
        text_of(report)
