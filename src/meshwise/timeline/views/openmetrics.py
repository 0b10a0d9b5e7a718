"""The report as OpenMetrics text: for a scraper, or for node_exporter's textfile collector (save it as `*.prom`).

The format: OpenMetrics 1.0, openmetrics.io. node_exporter reads the older Prometheus format, and takes this too: no
family is of a type that it does not know (what is said in words is a gauge of 1), and no help holds a quote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwise.timeline.run_report import Finding, RankReport, Report

Labels = dict[str, str]
Sample = tuple[Labels, float | None]
COUNTER, GAUGE, SUMMARY = "counter", "gauge", "summary"


@dataclass(frozen=True)
class _Family:
    """Samples of one name. A counter's are written with `_total`; those without a finite value are left out."""

    name: str
    type: str
    help: str
    samples: Sequence[Sample]

    @property
    def unit(self) -> str:
        return next((unit for unit in ("seconds", "bytes", "ratio") if self.name.endswith(f"_{unit}")), "")


def openmetrics(report: Report) -> str:
    """The numbers of the report, as text that ends in `# EOF`. Times in seconds, sizes in bytes, shares from 0 to 1."""
    families = [*_of_run(report), *_of_ranks(report.ranks), *_of_collectives(report), *_of_findings(report.findings)]
    lines: list[str] = []
    for family in families:
        samples = [(labels, value) for labels, value in family.samples if value is not None and math.isfinite(value)]
        if samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.type}"]
            lines += [f"# UNIT {family.name} {family.unit}"] if family.unit else []
            lines += [_line(family, labels, value) for labels, value in samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _of_run(report: Report) -> Iterator[_Family]:
    about = {
        "job": report.title,
        "status": report.status,
        "source": report.source,
        "folder": report.folder,
        "verdict": report.verdict,
    }
    yield _Family("meshwise_run_info", GAUGE, "What was run, how it ended, and what limited it.", [(about, 1)])
    yield _Family("meshwise_steps", COUNTER, "Training steps that count.", [({}, report.steps)])
    quantiles: list[Sample] = [
        ({"quantile": "0.5"}, report.step_seconds),
        ({"quantile": "0.95"}, report.step_seconds_p95),
    ]
    steps = quantiles if report.steps else []
    yield _Family(
        "meshwise_step_seconds", SUMMARY, "Time of a step without evaluating and saving, mean over ranks.", steps
    )
    rate: list[Sample] = [({}, report.samples_per_second)]
    yield _Family("meshwise_samples_per_second", GAUGE, "Samples of the global batches, a second of training.", rate)
    yield _Family("meshwise_wall_seconds", COUNTER, "Wall time of all sessions.", [({}, report.wall_seconds)])
    goodput = [({"part": part.name}, part.seconds) for part in report.goodput]
    yield _Family("meshwise_goodput_seconds", COUNTER, "Wall time by what it went into, mean over ranks.", goodput)
    shares = [({"part": part.name}, part.share) for part in report.goodput]
    yield _Family("meshwise_goodput_ratio", GAUGE, "Share of the wall time by what it went into.", shares)
    waiting = [({"part": part.name}, part.seconds) for part in report.waiting]
    yield _Family("meshwise_waiting_seconds", COUNTER, "The part of the wall time that is waiting, for what.", waiting)
    clocks = [({"rank": str(clock.rank)}, clock.error_seconds) for clock in report.clocks]
    yield _Family("meshwise_clock_error_seconds", GAUGE, "Error of a rank's clock against rank 0's, ±.", clocks)


def _of_ranks(ranks: Sequence[RankReport]) -> Iterator[_Family]:
    about: list[Sample] = [({**_of(r), "device": r.device, "host": r.host}, 1) for r in ranks]
    yield _Family("meshwise_rank_info", GAUGE, "The device and the host of a rank.", about)
    phases = [({**_of(r), "phase": kind}, seconds) for r in ranks for kind, seconds in r.seconds.items()]
    yield _Family("meshwise_phase_seconds", COUNTER, "Time of a rank by what it was spent on; it adds up.", phases)
    hidden = [(_of(r), r.hidden_seconds) for r in ranks]
    yield _Family("meshwise_hidden_communication_seconds", COUNTER, "Communication under computing: no cost.", hidden)
    steps: list[Sample] = [(_of(r), r.steps) for r in ranks]
    yield _Family("meshwise_rank_steps", COUNTER, "Training steps of a rank.", steps)
    medians = [(_of(r), r.step_seconds) for r in ranks if r.steps]
    yield _Family("meshwise_rank_step_seconds", GAUGE, "Median time of a rank's step.", medians)
    late = [(_of(r), r.straggler_seconds) for r in ranks]
    yield _Family("meshwise_straggler_seconds", COUNTER, "What the delays of a rank cost the run.", late)
    last: list[Sample] = [(_of(r), r.last_arrivals) for r in ranks]
    yield _Family("meshwise_last_arrivals", COUNTER, "At how many sync points a rank was last.", last)
    sync_points: list[Sample] = [(_of(r), r.sync_points) for r in ranks]
    yield _Family("meshwise_sync_points", COUNTER, "How often ranks waited for each other.", sync_points)
    memory = [({**_of(r), "memory": name}, size) for r in ranks for name, size in r.memory.items()]
    yield _Family("meshwise_memory_peak_bytes", GAUGE, "Most memory in use, by what was counted.", memory)
    complete: list[Sample] = [(_of(r), int(r.complete)) for r in ranks]
    yield _Family(
        "meshwise_rank_complete", GAUGE, "1 where a rank said how it ended, 0 where it was cut off.", complete
    )
    dropped: list[Sample] = [(_of(r), r.dropped) for r in ranks]
    yield _Family("meshwise_dropped_spans", COUNTER, "Spans of a rank that are missing.", dropped)
    watching = [(_of(r), r.overhead_seconds) for r in ranks]
    yield _Family("meshwise_overhead_seconds", COUNTER, "What writing the timeline cost, of one core.", watching)


def _of_collectives(report: Report) -> Iterator[_Family]:
    named = [({"collective": c.name, "bytes": str(c.bytes)}, c) for c in report.collectives]
    counts: list[Sample] = [(labels, c.count) for labels, c in named]
    yield _Family("meshwise_collectives", COUNTER, "Collectives by name and size.", counts)
    seconds = [(labels, c.seconds) for labels, c in named]
    help = "Median time of a collective from the last arrival on."
    yield _Family("meshwise_collective_seconds", GAUGE, help, seconds)
    widths = [(labels, c.bus_bandwidth) for labels, c in named]
    help = "Bus bandwidth of a collective, by the definition of nccl-tests."
    yield _Family("meshwise_bus_bandwidth_bytes_per_second", GAUGE, help, widths)


def _of_findings(findings: Sequence[Finding]) -> Iterator[_Family]:
    named = [
        (
            {
                "number": str(number),
                "kind": finding.kind,
                "rank": "" if finding.rank is None else str(finding.rank),
                "phase": finding.phase or "",
            },
            finding,
        )
        for number, finding in enumerate(findings, 1)
    ]
    shares = [(labels, finding.share) for labels, finding in named]
    yield _Family("meshwise_finding_ratio", GAUGE, "Share of a step, or of the run, that a finding is about.", shares)
    seconds = [(labels, finding.seconds) for labels, finding in named]
    yield _Family("meshwise_finding_seconds", GAUGE, "Seconds a step, or in all, that a finding is about.", seconds)


def _of(rank: RankReport) -> Labels:
    return {"rank": str(rank.rank)}


def _line(family: _Family, labels: Labels, value: float) -> str:
    name = f"{family.name}_total" if family.type == COUNTER else family.name
    text = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels.items())
    number = max(value, 0) if family.type == COUNTER else value  # a rounded difference may be just below 0
    return f"{name}{{{text}}} {number!r}" if text else f"{name} {number!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode("utf-8", "replace").decode()
