"""Fit the constants of prices to published runs: the development rows, and nothing else.

    python bench/fit.py RUNS.csv [--rounds 3]

What published.py has traced is priced, each constant of FREE is moved by a tenth, and the logarithms of all are solved
for at once: least absolute errors, a unit weighing as the root of its rows, drawn a little towards where the constants
stood before (PULL). Printed are the constants, and the errors of units (a data set on one generation of devices) that
were left out of a fit of their own.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from keep import keep
from published_pieces import estimate, forget_prices
from published_rows import Case, Row, Unusable, case_of, part_of
from published_score import group_of, quantile, set_of

from meshwise.machine.catalog import part
from meshwise.rehearsal.constants import FIGURES, Figure
from meshwise.rehearsal.price import tile_share

ATTENTION = {line: tuple(f"attention.{line}.{way}" for way in ("forward", "backward")) for line in ("ampere", "hopper")}
ALONE = (
    *("matmul", "matmul.hopper", "matmul.blackwell", "matmul.tf32", "matmul.fp32", "matmul.fill"),
    *("convolution", "convolution.tf32", "convolution.fp32", "attention.flash1"),
    *("memory.elementwise", "memory.reduction", "memory.gather", "memory.transpose", "memory.optimizer"),
    *("kernel", "launch.volta", "launch.ampere", "launch.hopper", "launch.collective", "launch.all-reduce"),
    *("compile.memory", "compile.launch", "nccl.network", "nccl.pcie", "nccl.large", "overlap.compute.gpu"),
)
FREE: Mapping[str, tuple[str, ...]] = {name: (name,) for name in ALONE} | {
    f"attention.{line}": ways for line, ways in ATTENTION.items()
}
"""What is fitted; ways of attention move together."""
PULL = 0.8
"""Of a constant towards where it stood, for each unit of its logarithm: as much as a row of no other does at 2 %."""
STEP = 0.1
LIMITS = {"memory.elementwise": 1.08, "memory.reduction": 1.08, "nccl.network": 1.0, "nccl.large": 1.1, "matmul": 1.0}
"""What a share cannot be above: a memory that copies at 89 % has no more than the rest to give."""
MOST = 60
"""Rows of a unit at most, drawn: vtrain-single has 720, of 128 rehearsals."""


@dataclass(frozen=True)
class Point:
    """A row that can be priced."""

    row: Row
    case: Case
    seconds: float
    unit: tuple[str, str]


def points_of(rows: Sequence[Row]) -> list[Point]:
    """Those that are traced, of quality A and B."""
    found = []
    for row in rows:
        try:
            case = case_of(row)
            estimate(case, interval=False)
        except (Unusable, KeyError):
            continue
        known = part(part_of(row))
        unit = set_of(row), known.architecture if known else ""
        found.append(Point(row, case, float(row["step_time_s"]), unit))
    return found


def _drawn(points: Sequence[Point]) -> list[Point]:
    """At most MOST of each unit, by a seed."""
    own: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        own[point.unit].append(point)
    return [point for each in own.values() for point in random.Random(0).sample(each, min(len(each), MOST))]


def errors_of(points: Sequence[Point]) -> np.ndarray:
    """Logarithms of the estimate over what was measured."""
    forget_prices()
    tile_share.cache_clear()
    return np.array([math.log(estimate(p.case, interval=False)["seconds"] / p.seconds) for p in points])


def held(names: Sequence[str], step: np.ndarray) -> np.ndarray:
    """The step, without what goes beyond a limit."""
    most = [math.log(LIMITS[name] / FIGURES[name].value) if name in LIMITS else math.inf for name in names]
    return np.minimum(step, most)


def put(values: Mapping[str, float]) -> None:
    """As factors of the constants."""
    for name, factor in values.items():
        for each in FREE[name]:
            was: Figure = FIGURES[each]
            FIGURES[each] = replace(was, value=was.value * factor)  # type: ignore[index]


def weights_of(points: Sequence[Point]) -> np.ndarray:
    """A unit's is the root of its rows."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for point in points:
        counts[point.unit] += 1
    return np.array([counts[p.unit] ** -0.5 for p in points])


def solved(errors: np.ndarray, slopes: np.ndarray, weights: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The step of all constants that makes errors least, by least squares of which large errors count less."""
    found = np.zeros(slopes.shape[1])
    for _ in range(30):
        left = errors + slopes @ found
        each = weights / np.maximum(np.abs(left), 0.02)
        matrix = slopes.T @ (slopes * each[:, None]) + np.eye(len(found)) * PULL
        found = np.linalg.solve(matrix, -(slopes.T @ (each * errors)) - PULL * moved)
        found = np.clip(found, -0.8, 0.8)
    return found


def scored(points: Sequence[Point], errors: np.ndarray) -> dict[str, dict[str, float]]:
    """By unit, and of all units of a group: rows, median error, 90th percentile, bias."""
    units: dict[str, list[float]] = defaultdict(list)
    for point, error in zip(points, errors, strict=True):
        units[" on ".join(point.unit)].append(math.expm1(error))
    found = {unit: _scored(own) for unit, own in sorted(units.items())}
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    for unit, one in found.items():
        groups[f"median of units: {group_of(unit)}"].append(one)
    return found | {
        group: {word: round(statistics.median(one[word] for one in own), 4) for word in own[0]} | {"rows": len(own)}
        for group, own in groups.items()
    }


def _scored(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    figures = statistics.median(sizes), quantile(sizes, 0.9), statistics.median(errors)
    words = ("median", "p90", "bias")
    return {"rows": len(sizes), **{word: round(each, 4) for word, each in zip(words, figures, strict=True)}}


def table_of(points: Sequence[Point], errors: np.ndarray) -> str:
    """For the terminal."""
    return "\n".join(
        f"{unit:44} {one['rows']:4.0f} {one['median']:7.1%} {one['p90']:7.1%} {one['bias']:+7.1%}"
        for unit, one in scored(points, errors).items()
    )


def main() -> None:
    """Fit, print, leave out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] in "AB"]
    began = time.monotonic()
    points = points_of(rows)
    print(f"{len(points)} rows, {time.monotonic() - began:.0f} s", flush=True)
    errors = errors_of(points)
    print(table_of(points, errors), f"{time.monotonic() - began:.0f} s", flush=True)
    points = _drawn(points)
    errors, weights = errors_of(points), weights_of(points)
    names, moved = list(FREE), np.zeros(len(FREE))
    slopes = np.zeros((len(points), len(names)))
    for round_ in range(options.rounds):
        for place, name in enumerate(names):
            put({name: math.exp(STEP)})
            slopes[:, place] = (errors_of(points) - errors) / STEP
            put({name: math.exp(-STEP)})
        step = held(names, solved(errors, slopes, weights, moved))
        moved += step
        put({name: math.exp(each) for name, each in zip(names, step, strict=True)})
        errors = errors_of(points)
        print(f"round {round_}, {time.monotonic() - began:.0f} s\n{table_of(points, errors)}", flush=True)
    for name in names:
        print(f"{name:40} {' '.join(f'{FIGURES[each].value:.4g}' for each in FREE[name])}")
    left = np.array(errors)
    for unit in sorted({p.unit for p in points}):
        within = np.array([p.unit == unit for p in points])
        step = held(names, solved(errors[~within], slopes[~within], weights[~within], moved))
        left[within] += slopes[within] @ step
    print(f"left out, by the slopes of the last round\n{table_of(points, left)}")
    off = np.exp(np.abs(left))
    print(f"80 of 100 left-out rows are within a factor of {np.quantile(off, 0.8):.3f}")
    values = {each: float(f"{FIGURES[each].value:.3g}") for name in names for each in FREE[name]}
    keep(f"fit-{options.runs.stem}", {"constants": values, "left out": scored(points, left)})


if __name__ == "__main__":
    main()
