"""Fit the constants of prices to published runs: the development rows, and nothing else.

    python bench/fit.py RUNS.csv [--rounds 3]

What published.py has traced is priced, each constant of PRIORS is moved by a tenth, and the logarithms of all are
solved for at once: least absolute errors, each unit (a data set on one generation of devices) weighing alike, as the
score counts them, beside what was known of the constants before any fit (PRIORS), by their spreads.

Printed are the constants, and the errors of units that were left out of a fit of their own. How far rows are off where
all constants are right (GRID) is no constant: it is the figure with which units that are left out come out best; where
a unit is scored as left out, that is asked among the others alone.
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

from meshwise.hardware.catalog import part
from meshwise.planner.constants import FIGURES, Figure
from meshwise.planner.price import tile_share

PRIORS: Mapping[str, tuple[float | str, float]] = {
    "matmul": (0.92, 1.15),
    "matmul.hopper": ("matmul", 1.15),
    "matmul.blackwell": ("matmul", 1.15),
    "matmul.tf32": (1.0, 1.2),
    "matmul.fp32": (1.0, 1.2),
    "matmul.fill": (128, 1.5),
    "convolution": (0.65, 1.35),
    "convolution.tf32": ("convolution", 1.35),
    "convolution.fp32": ("convolution", 1.35),
    "attention.flash1": (0.55, 1.3),
    "attention.ampere": (0.60, 1.25),
    "attention.hopper": (0.34, 1.3),
    "memory.elementwise": (0.95, 1.15),
    "memory.reduction": (0.8, 1.3),
    "memory.batch-norm": (0.5, 1.3),
    "memory.dropout": (0.65, 1.3),
    "memory.gather": (0.45, 1.8),
    "memory.transpose": (0.6, 1.4),
    "memory.optimizer": (0.85, 1.2),
    "kernel": (2e-6, 1.5),
    "compile.memory": (0.5, 1.5),
    "overlap.compute.gpu": (1.19, 1.1),
    "nccl.network": (0.9, 1.3),
    "nccl.pcie": (0.6, 1.5),
    "nccl.large": (1.0, 1.15),
}
"""What is fitted, and what was known of it before any fit: the value, or the constant that it is near to, and within
which factor it lies in 80 of 100 cases. Values and factors are those of constants.py before its first fit; what it had
not then (parts of a kind, batch norm, dropout, compiled blocks) is our judgement."""
WAYS = {
    f"attention.{line}": (f"attention.{line}.forward", f"attention.{line}.backward") for line in ("ampere", "hopper")
}
"""Of attention both ways move together."""
SIMULATED = ("vtrain-single",)
"""Data sets whose times nobody measured (docs/internals/accuracy.md): they are scored, and nothing is fitted to
them."""
GRID = (0.05, 0.1, 0.2, 0.4)
"""By how much rows are taken to be off where all constants are right: one of these."""
STEP, MOST_STEP = 0.1, 0.4
"""By how much a constant is moved to see what follows, and by how much in a round at most."""
LIMITS = {
    "memory.elementwise": 1.08,
    "memory.reduction": 1.08,
    "nccl.network": 1.0,
    "nccl.large": 1.1,
    "matmul": 1.0,
    "convolution": 1.0,
    "convolution.tf32": 1.0,
    "convolution.fp32": 1.3,
}
"""What a share cannot be above: a memory that copies at 89 % has no more than the rest to give; a convolution is as
fast as a product, in float32 faster by Winograd's way."""
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


def most_of(names: Sequence[str]) -> np.ndarray:
    """How far each can rise."""
    return np.array([math.log(LIMITS[name] / value_of(name)) if name in LIMITS else math.inf for name in names])


def factors(names: Sequence[str], step: np.ndarray) -> dict[str, float]:
    """Of a step in logarithms."""
    return {name: math.exp(each) for name, each in zip(names, step, strict=True)}


def put(values: Mapping[str, float]) -> None:
    """As factors of the constants."""
    for name, factor in values.items():
        for each in WAYS.get(name, (name,)):
            was: Figure = FIGURES[each]
            FIGURES[each] = replace(was, value=was.value * factor)  # type: ignore[index]


def value_of(name: str) -> float:
    """As it stands."""
    return FIGURES[WAYS.get(name, (name,))[0]].value


def counts_of(points: Sequence[Point]) -> np.ndarray:
    """For each row, how many its unit has."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for point in points:
        counts[point.unit] += 1
    return np.array([float(counts[p.unit]) for p in points])


def prior_of(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(matrix, target) of what is known: their product with the step and their difference are in standard errors."""
    matrix, target = np.zeros((len(names), len(names))), np.zeros(len(names))
    for place, name in enumerate(names):
        near, spread = PRIORS[name]
        error = math.log(spread) / 1.2816
        matrix[place, place] = 1 / error
        if isinstance(near, str):
            matrix[place, list(names).index(near)] = -1 / error
        known = value_of(near) if isinstance(near, str) else near
        target[place] = math.log(known / value_of(name)) / error
    return matrix, target


def solved(
    errors: np.ndarray, slopes: np.ndarray, weights: np.ndarray, prior: tuple[np.ndarray, np.ndarray], most: np.ndarray
) -> np.ndarray:
    """The step of all constants that makes absolute errors least, beside what is known."""
    matrix, target = prior
    found = np.zeros(slopes.shape[1])
    known, aim = matrix.T @ matrix, matrix.T @ target
    for _ in range(30):
        left = errors + slopes @ found
        each = weights / np.maximum(np.abs(left), 0.02)
        found = np.linalg.solve(slopes.T @ (slopes * each[:, None]) + known, aim - slopes.T @ (each * errors))
        found = np.minimum(np.clip(found, -1.5, 1.5), most)
    return found


@dataclass(frozen=True)
class Fit:
    """Rows at a point: their errors, how those follow the constants, their units and the number of rows in each."""

    errors: np.ndarray
    slopes: np.ndarray
    units: np.ndarray
    counts: np.ndarray
    prior: tuple[np.ndarray, np.ndarray]
    most: np.ndarray

    def step(self, within: np.ndarray, scale: float) -> np.ndarray:
        """From these rows alone."""
        weights = 1 / (self.counts[within] * scale)
        return solved(self.errors[within], self.slopes[within], weights, self.prior, self.most)

    def left_out(self, within: np.ndarray, scale: float) -> float:
        """Mean over units of their median error where each is left out of these rows, in straight lines."""
        medians = []
        for unit in np.unique(self.units[within]):
            own = self.units == unit
            step = self.step(within & ~own, scale)
            medians.append(float(np.median(np.abs(self.errors[own] + self.slopes[own] @ step))))
        return statistics.fmean(medians)

    def best(self, within: np.ndarray) -> float:
        """Of GRID, by units left out of these rows."""
        return min(GRID, key=lambda scale: self.left_out(within, scale))


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
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] in "AB"]
    began = time.monotonic()
    points = points_of(rows)
    print(f"{len(points)} rows, {time.monotonic() - began:.0f} s", flush=True)
    errors = errors_of(points)
    print(table_of(points, errors), f"{time.monotonic() - began:.0f} s", flush=True)
    whole, points = points, _drawn(points)
    errors, names = errors_of(points), list(PRIORS)
    units = np.array([" on ".join(p.unit) for p in points])
    everything = np.array([p.unit[0] not in SIMULATED for p in points])
    for round_ in range(options.rounds + 1):
        slopes = np.zeros((len(points), len(names)))
        for place, name in enumerate(names):
            put({name: math.exp(STEP)})
            slopes[:, place] = (errors_of(points) - errors) / STEP
            put({name: math.exp(-STEP)})
        fit = Fit(errors, slopes, units, counts_of(points), prior_of(names), most_of(names))
        if round_ == options.rounds:
            break
        scale = fit.best(everything)
        put(factors(names, np.clip(fit.step(everything, scale), -MOST_STEP, MOST_STEP)))
        errors = errors_of(points)
        print(f"round {round_}, {time.monotonic() - began:.0f} s, {scale}\n{table_of(points, errors)}", flush=True)
    for name in names:
        print(f"{name:40} {value_of(name):.4g}")
    left = np.zeros(len(whole))
    for unit in np.unique(units):
        chosen = fit.best(everything & (units != unit))
        step = fit.step(everything & (units != unit), chosen)
        put(factors(names, step))
        own = np.array([" on ".join(p.unit) == unit for p in whole])
        left[own] = errors_of([p for p, within in zip(whole, own, strict=True) if within])
        put(factors(names, -step))
        print(f"{unit}: {chosen}", flush=True)
    print(f"left out, by prices of the constants that the others give\n{table_of(whole, left)}")
    off = np.exp(np.abs(left[[p.unit[0] not in SIMULATED for p in whole]]))
    print(f"80 of 100 left-out rows are within a factor of {np.quantile(off, 0.8):.3f}")
    values = {each: float(f"{FIGURES[each].value:.3g}") for name in names for each in WAYS.get(name, (name,))}
    keep(f"fit-{options.runs.stem}", {"constants": values, "left out": scored(whole, left)})


if __name__ == "__main__":
    main()
