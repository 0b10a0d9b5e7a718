"""Compare two runs by kind of time; tell differences from chance.

A ratio's interval comes from a bootstrap over the steps of each run, in blocks of neighboring steps, because neighbors
are alike (Künsch 1989, https://doi.org/10.1214/aos/1176347265). The interval covers how steps vary within these two
runs. It cannot cover how much a run differs from the same run on another day.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.records.run_list import fields_of
from meshwise.reports.run_report import Report
from meshwise.reports.spans import KINDS
from meshwise.reports.step_table import OF_STEP, StepTable
from meshwise.spec.units import seconds_text

SEED = 20260101
RESAMPLES = 1000
STRETCHES = 16
"""A resample of the bootstrap has at least this many random blocks of neighboring steps, if a run has enough steps."""
FEWEST = 5
"""A run with fewer steps is too short to estimate how much its median step time varies by chance."""
MOST_STEPS = 4000
"""Confidence intervals are computed from at most this many steps of a run, evenly spaced."""
CLOCK = 1e-9
"""Resolution of the recorded times in seconds. Smaller differences do not count."""
MOST_NAMED = 3
MOST_METRICS = 10
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class TimeDifference:
    """One kind of time in a step, compared between two runs. `ratio` is `second` / `first`, and its 95 % interval is
    from `low` to `high`. `clear` is True if the difference is more than chance."""

    kind: str
    first: float
    second: float
    difference: float
    ratio: float | None
    low: float | None
    high: float | None
    clear: bool


@dataclass(frozen=True)
class Figure:
    """A number that describes a whole run, such as its throughput, for the first and the second run of a comparison."""

    name: str
    unit: str
    first: float | None
    second: float | None


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs."""

    first: str
    second: str
    ranks: tuple[int, int]
    steps: tuple[int, int]
    verdict: str
    step: TimeDifference | None
    kinds: list[TimeDifference]
    figures: list[Figure]
    notes: list[str]
    differs: list[str]


def compare_runs(first: tuple[StepTable, Report], second: tuple[StepTable, Report]) -> RunComparison:
    """Compare two runs step by step and as a whole. If a run has no steps, the runs are only compared as a whole."""
    (table_a, report_a), (table_b, report_b) = first, second
    names = _names(report_a, report_b)
    steady = table_a.steady.any() and table_b.steady.any()
    differences = _differences(table_a, table_b) if steady else []
    step, kinds = next(iter(differences), None), differences[1:]
    return RunComparison(
        first=names[0],
        second=names[1],
        ranks=(len(report_a.ranks), len(report_b.ranks)),
        steps=(report_a.steps, report_b.steps),
        verdict=_verdict(names, (report_a, report_b), step, kinds),
        step=step,
        kinds=kinds,
        figures=_figures(report_a, report_b),
        notes=_notes(names, report_a, report_b),
        differs=_differs(_settings(report_a), _settings(report_b)),
    )


def comparison_dict(comparison: RunComparison) -> dict[str, Any]:
    """Convert a comparison to a dict for JSON."""
    return {"meshwise_comparison": 1, **dataclasses.asdict(comparison)}


def _settings(report: Report) -> dict[str, str]:
    """Return the settings of a run by name: job, devices, versions, options, fields of the plan and so on."""
    facts = report.facts
    found = {"job": facts.get("job"), "devices": facts.get("world"), "commit": facts.get("commit")}
    kinds = {rank.device.partition(":")[0] for rank in report.ranks}
    found |= {"source": facts.get("source"), "kind of device": ", ".join(sorted(kinds))}
    for group in ("versions", "request"):
        found |= facts.get(group) or {}
    found |= dict(text.partition("=")[::2] for text in found.pop("args", None) or ())
    found |= {"arguments": shlex.join(map(str, facts.get("arguments") or ()))}
    found |= fields_of(str(facts.get("plan") or ""))
    said = {name: str(value) for name, value in found.items() if value not in (None, "", [], False)}
    return {name: text for name, text in said.items() if name not in ("settings", "plan")}  # shown field by field


def _differs(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    names = [*first, *(name for name in second if name not in first)]
    pairs = [(name, first.get(name, "default"), second.get(name, "default")) for name in names]
    return [f"{name} {a} → {b}" for name, a, b in pairs if a != b]


def _names(first: Report, second: Report) -> tuple[str, str]:
    """Return names that distinguish the two runs."""
    for a, b in (
        (first.title, second.title),
        (Path(first.folder).name, Path(second.folder).name),
        (first.folder, second.folder),
    ):
        if a and b and a != b:
            return a, b
    return "the first", "the second"


def _differences(first: StepTable, second: StepTable) -> list[TimeDifference]:
    """Compare the steps of two runs: the whole step, then each kind of time in it."""
    tables = [_table(first), _table(second)]
    there = np.flatnonzero(tables[0].any(axis=0) | tables[1].any(axis=0))
    medians = [np.median(table, axis=0).tolist() for table in tables]
    chance = [_resampled(table, seed) for seed, table in enumerate(tables)]
    names = ["step", *(KINDS[code] for code in OF_STEP)]
    return [
        _difference(names[at], medians[0][at], medians[1][at], chance[0][:, at], chance[1][:, at])
        for at in there.tolist()
    ]


def _table(table: StepTable) -> Seconds:
    """Return the seconds of each step that counts for medians (`StepTable.steady`), of shape (steps, 1 + kinds)."""
    of_step, of_kind = table.step_seconds()[table.steady], table.kind_seconds()[table.steady]
    columns: Seconds = np.concatenate([of_step[:, None], of_kind[:, OF_STEP]], axis=1)
    return columns


def _resampled(table: Seconds, seed: int) -> Seconds:
    """Resample a run by a block bootstrap, and return the median of each column in each resampled run."""
    table = table[:: -(-len(table) // MOST_STEPS)]
    steps = len(table)
    if steps < FEWEST:
        return np.empty((0, table.shape[1]))
    long = max(1, steps // STRETCHES)
    stretches = -(-steps // long)
    begins = np.random.default_rng([SEED, seed]).integers(0, steps, (RESAMPLES, stretches))
    medians = np.empty((RESAMPLES, table.shape[1]))
    for at in range(RESAMPLES):
        rows = ((begins[at][:, None] + np.arange(long)) % steps).ravel()[:steps]
        medians[at] = np.median(table[rows], axis=0)
    return medians


def _difference(kind: str, first: float, second: float, by_a: Seconds, by_b: Seconds) -> TimeDifference:
    ratio, low, high, clear = second / first if first > 0 else None, None, None, False
    if len(by_a) and len(by_b):
        least, most = np.percentile(by_b - by_a, [2.5, 97.5])
        clear = abs(second - first) >= CLOCK and not least <= 0 <= most
        if ratio is not None and (by_a > 0).all():
            low, high = np.percentile(by_b / by_a, [2.5, 97.5]).tolist()
    return TimeDifference(kind, first, second, second - first, ratio, low, high, clear)


def _figures(first: Report, second: Report) -> list[Figure]:
    a, b = _values(first), _values(second)
    figures = [Figure(*name, a.get(name), b.get(name)) for name in {**a, **b}]
    return [figure for figure in figures if figure.first or figure.second]


def _values(report: Report) -> dict[tuple[str, str], float | None]:
    """Return the figures of one run by name and unit. A figure of memory is the largest among the ranks."""
    values: dict[tuple[str, str], float | None] = {
        ("wall time", "seconds"): report.wall_seconds,
        ("throughput", "samples/s"): report.samples_per_second,
    }
    values |= {(part.name, "share"): part.share for part in report.goodput}
    for name in dict.fromkeys(name for rank in report.ranks for name in rank.memory):
        values[f"{name} memory", "bytes"] = max(rank.memory.get(name, 0.0) for rank in report.ranks)
    last = list((report.facts.get("metrics") or {}).items())
    values |= {(f"last {name}", "metric"): value for name, value in last[:MOST_METRICS]}
    return values


def _notes(names: tuple[str, str], first: Report, second: Report) -> list[str]:
    notes = []
    if len(first.ranks) != len(second.ranks):
        notes.append(
            f"The runs have {len(first.ranks)} and {len(second.ranks)} ranks: their steps differ. Compare samples/s."
        )
    for name, report in zip(names, (first, second), strict=True):
        if 0 < report.steps < FEWEST:
            notes.append(f"{name} has {report.steps} steps: too few to tell a difference from chance.")
        if report.missing:
            notes.append(f"{name} is not complete: {report.missing[0]}")
    return notes


def _verdict(
    names: tuple[str, str], reports: tuple[Report, Report], step: TimeDifference | None, kinds: list[TimeDifference]
) -> str:
    """Write the verdict: `B is 12 % slower a step (...): communication +3.1 ms (clear), ...`"""
    if step is None or step.ratio is None:
        without = [name for name, report in zip(names, reports, strict=True) if not report.steps] or [*names]
        return f"Nothing to compare step by step: {' and '.join(without)} recorded no step."
    times = f"{seconds_text(step.first)} to {seconds_text(step.second)}"
    largest = sorted(kinds, key=lambda kind: (not kind.clear, -abs(kind.difference)))[:MOST_NAMED]
    named = [kind for kind in largest if abs(kind.difference) >= 0.01 * step.first]
    parts = ", ".join(f"{kind.kind} {signed(kind.difference)} ({clearly(kind)})" for kind in named)
    tail = f": {parts}." if parts else "."
    if not step.clear:
        return f"No clear difference in the time of a step ({times}){tail}"
    return f"{names[1]} is {change(step.ratio)} a step ({times}){tail}"


def change(ratio: float) -> str:
    """Write a ratio of step times in words: `12 % slower`, `3.1 % faster`, `2.5 times as slow`."""
    if not math.isfinite(ratio) or ratio >= 2:
        return f"{ratio:.1f} times as slow"
    share = abs(ratio - 1)
    return f"{100 * share:.{1 if share < 0.0995 else 0}f} % {'slower' if ratio >= 1 else 'faster'}"


def signed(seconds: float) -> str:
    """Write seconds with a sign: `+3.1 ms` or `-85 µs`."""
    return ("+" if seconds > 0 else "") + seconds_text(seconds)


def clearly(difference: TimeDifference) -> str:
    """Return "clear" if a difference is more than chance, else "within noise"."""
    return "clear" if difference.clear else "within noise"
