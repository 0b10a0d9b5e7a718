"""Write the report as OpenMetrics text for a scraper.

node_exporter's textfile collector reads the text too (save it as `*.prom`).

The format: OpenMetrics 1.0, openmetrics.io. node_exporter reads the older Prometheus format, but accepts this text too:
no family has a type that it does not know (facts in words are a gauge of 1), and no help text contains a quote.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from meshwise.spec.errors import UsageError
from meshwise.timeline.run_report import Report
from meshwise.timeline.timeline import Timeline

Labels = dict[str, str]
Sample = tuple[Labels, float | None]
UNITS = ("seconds", "bytes", "ratio")

Row = tuple[str, str, str, Sequence[Sample]]
"""Name, type (counter, gauge or summary), help and samples of a metric family. Samples must be finite to be written."""
Family = tuple[str, str, str, Callable[[Any], float | None]]
"""Name, type and help of a metric family, and a function that reads its value from an object such as a rank."""

OF_GOODPUT: Sequence[Family] = (
    ("goodput_seconds", "counter", "Wall time by what it was spent on, mean over ranks.", lambda p: p.seconds),
    ("goodput_ratio", "gauge", "Share of the wall time by what it was spent on.", lambda p: p.share),
)
OVERLAPS = "Communication that overlaps with computing: it is free."
OF_RANK: Sequence[Family] = (
    ("hidden_communication_seconds", "counter", OVERLAPS, lambda r: r.hidden_seconds),
    ("rank_steps", "counter", "Training steps of a rank.", lambda r: r.steps),
    ("rank_step_seconds", "gauge", "Median time of a rank's step.", lambda r: r.step_seconds if r.steps else None),
    ("straggler_seconds", "counter", "What the delays of a rank cost the run.", lambda r: r.straggler_seconds),
    ("last_steps", "counter", "In how many steps a rank was last.", lambda r: r.last_steps),
    ("last_arrivals", "counter", "At how many sync points a rank was last.", lambda r: r.last_arrivals),
    ("sync_points", "counter", "How often ranks waited for each other.", lambda r: r.sync_points),
    ("rank_complete", "gauge", "1 where a rank recorded how it ended, 0 where it was cut off.", lambda r: r.complete),
    ("dropped_spans", "counter", "Spans of a rank that are missing.", lambda r: r.dropped),
    ("overhead_seconds", "counter", "What writing the timeline cost, of one core.", lambda r: r.overhead_seconds),
)
BUS = "Bus bandwidth of a collective, by the definition of nccl-tests."
OF_COLLECTIVE: Sequence[Family] = (
    ("collectives", "counter", "Collectives by name and size.", lambda c: c.count),
    ("collective_seconds", "gauge", "Median time of a collective from the last arrival on.", lambda c: c.seconds),
    ("bus_bandwidth_bytes_per_second", "gauge", BUS, lambda c: c.bus_bandwidth),
)
OF_FINDING: Sequence[Family] = (
    ("finding_ratio", "gauge", "Share of a step, or of the run, that a finding is about.", lambda f: f.share),
    ("finding_seconds", "gauge", "Seconds a step, or in all, that a finding is about.", lambda f: f.seconds),
)


def render(report: Report, timeline: Timeline) -> str:
    """Return the numbers of the report as OpenMetrics text, which ends in `# EOF`.

    Times are in seconds, sizes in bytes, and shares from 0 to 1. Raises UsageError if prometheus_client is not
    installed.
    """
    try:
        from prometheus_client.metrics_core import Metric
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError:
        raise UsageError("--openmetrics needs prometheus_client. Use pip install 'meshwise[openmetrics]'") from None
    rows = itertools.chain(_of_run(report), _of_ranks(report), _of_collectives(report), _of_findings(report))
    metrics = [metric for row in rows if (metric := _filled(Metric, *row)).samples]
    text: bytes = generate_latest(SimpleNamespace(collect=lambda: metrics))  # type: ignore[no-untyped-call]
    return text.decode()


def _filled(metric_type: Callable[..., Any], name: str, type: str, help: str, samples: Sequence[Sample]) -> Any:
    unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), "")
    metric = metric_type(f"meshwise_{name}", help, type, unit)
    counter = type == "counter"
    for labels, value in samples:
        if value is not None and math.isfinite(value):
            value = max(value, 0) if counter else value  # a rounded difference may be just below 0
            words = {label: word.encode("utf-8", "replace").decode() for label, word in labels.items()}
            metric.add_sample(metric.name + "_total" * counter, words, value)
    return metric


def _of_run(report: Report) -> Iterator[Row]:
    about = {"job": report.title} | {name: getattr(report, name) for name in ("status", "source", "folder", "verdict")}
    yield "run_info", "gauge", "What was run, how it ended, and what limited it.", [(about, 1)]
    yield "steps", "counter", "Training steps that count.", [({}, report.steps)]
    quantiles = {"0.5": report.step_seconds, "0.95": report.step_seconds_p95} if report.steps else {}
    steps: list[Sample] = [({"quantile": quantile}, seconds) for quantile, seconds in quantiles.items()]
    yield "step_seconds", "summary", "Time of a step without evaluating and saving, mean over ranks.", steps
    rate: list[Sample] = [({}, report.samples_per_second)]
    yield "samples_per_second", "gauge", "Samples of the global batches, a second of training.", rate
    yield "wall_seconds", "counter", "Wall time of all sessions.", [({}, report.wall_seconds)]
    parts = [({"part": part.name}, part) for part in report.goodput]
    yield from _each(OF_GOODPUT, parts)
    waiting = [({"part": part.name}, part.seconds) for part in report.waiting]
    yield "waiting_seconds", "counter", "The part of the wall time that is waiting, by what for.", waiting
    clocks = [({"rank": str(clock.rank)}, clock.error_seconds) for clock in report.clocks]
    yield "clock_error_seconds", "gauge", "Error of a rank's clock against rank 0's, ±.", clocks


def _of_ranks(report: Report) -> Iterator[Row]:
    ranks = [({"rank": str(r.rank)}, r) for r in report.ranks]
    about: list[Sample] = [({**labels, "device": r.device, "host": r.host}, 1) for labels, r in ranks]
    yield "rank_info", "gauge", "The device and the host of a rank.", about
    phases = [({**labels, "phase": kind}, seconds) for labels, r in ranks for kind, seconds in r.seconds.items()]
    yield "phase_seconds", "counter", "Time of a rank by what it was spent on; it adds up.", phases
    memory = [({**labels, "memory": name}, size) for labels, r in ranks for name, size in r.memory.items()]
    yield "memory_peak_bytes", "gauge", "Most memory in use, by what was counted.", memory
    yield from _each(OF_RANK, ranks)


def _of_collectives(report: Report) -> Iterator[Row]:
    return _each(OF_COLLECTIVE, [({"collective": c.name, "bytes": str(c.bytes)}, c) for c in report.collectives])


def _of_findings(report: Report) -> Iterator[Row]:
    named = []
    for number, found in enumerate(report.findings, 1):
        rank = "" if found.rank is None else str(found.rank)
        named.append(({"number": str(number), "kind": found.kind, "rank": rank, "phase": found.phase or ""}, found))
    return _each(OF_FINDING, named)


def _each(families: Sequence[Family], named: Sequence[tuple[Labels, Any]]) -> Iterator[Row]:
    """Yield one row per metric family, with one sample per pair of `named`.

    named: pairs (labels, object). Each family reads its value from the object, which may be a rank of the report.
    """
    for name, type, help, read in families:
        yield name, type, help, [(labels, read(thing)) for labels, thing in named]
