"""A scoreboard: estimates of training runs that others published, by catalog figures alone, beside what they measured.

    python bench/published.py RUNS.csv [--minutes 30] [--set llm-foundry] [--full] [--score]

Model, plan and machine are built from each row (published_rows.py). A row is traced with two depths, FEW and FEW + 1
blocks, and time and memory are taken to the row's depth in a straight line: the blocks in the middle are alike. A step
of more than three microbatches is traced with three, and the time of the second is added for each further one; where a
framework reduces gradients after each microbatch, a step of one is traced, and its time to the end of the backward is
added. --full traces the whole depth instead. Each row's estimate is kept in a file of JSON lines, by the constants, and
the script goes on where it stopped; rows come in an order drawn by a seed. --score only scores.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import random
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from keep import keep
from published_rows import Case, Row, Unusable, case_of, family_of
from published_score import scoreboard, table

from meshwise.machine.words import machine_from_words
from meshwise.rehearsal.allocator import reserved_on
from meshwise.rehearsal.breakdown import breakdown
from meshwise.rehearsal.constants import digest
from meshwise.rehearsal.memory import memory_curve
from meshwise.rehearsal.prices import Prices
from meshwise.rehearsal.simulate import simulate
from meshwise.rehearsal.trace import Trace, trace
from meshwise.rehearsal.work import Launch
from meshwise.spec.errors import MeshwiseError

FEW = 3
"""Blocks of the smaller model. A shard holds up to three at once: the one that runs, the next one's parameters and the
gradients of the one before, so that fewer would show a peak of their own."""
MOST = 3
"""Microbatches that are traced at most: the first one, the last one, and one between."""


@dataclass(frozen=True)
class Point:
    """What one trace says. seconds: low, middle, high. further: seconds of one microbatch between the others. peaks:
    allocated bytes by phase. beside: reserved bytes over allocated ones."""

    seconds: tuple[float, float, float]
    further: float
    peaks: Mapping[str, float]
    reserved: float
    kinds: Mapping[str, float]


def point_of(case: Case, layers: int, microbatches: int) -> Point:
    """Trace, price, simulate, replay: of the slowest of the ranks, and the one that needs most memory."""
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    traces = trace(case.job(layers, microbatches), case.plan(microbatches))
    machine = machine_from_words(case.machine)
    works = [each.step for each in traces]
    step = simulate(works, Prices(machine))
    ends: dict[int, float] = {}
    numbers = _microbatches(works[0].events)
    for done in step.done[works[0].rank]:
        if done.launch.phase in ("forward", "backward"):
            number = numbers[done.place]
            ends[number] = max(ends.get(number, 0.0), done.end)
    first = 0 if case.reduces else 1
    further = ends[first] - ends.get(first - 1, 0.0) if len(ends) > first else 0.0
    found = [_memory(each, machine.devices[0].part) for each in traces]
    peaks, reserved = max(found, key=lambda one: one[1])
    slowest = max((breakdown(step, rank) for rank in step.ranks), key=lambda one: one.kinds["computing"])
    return Point((step.low, step.seconds, step.high), further, peaks, reserved, dict(slowest.kinds))


def _memory(traced: Trace, name: str) -> tuple[dict[str, float], float]:
    """Peaks by phase over both steps, and reserved bytes."""
    peaks: dict[str, float] = {}
    for number, work in enumerate((traced.first, traced.step)):
        curve = memory_curve(work)
        phases = _phases(work.events)
        for place, total in zip(curve.places.tolist(), curve.total.tolist(), strict=True):
            phase = f"{number} {phases[place] if place >= 0 else 'held'}"
            peaks[phase] = max(peaks.get(phase, 0.0), total)
    return peaks, float(reserved_on((traced.first, traced.step), name))


def _phases(events: Sequence[Any]) -> list[str]:
    """For each event the phase of the launch that follows it, and which microbatch's."""
    found, phase, numbers = [""] * len(events), "end", _microbatches(events)
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        if isinstance(event, Launch):
            phase = f"{event.phase} {numbers[place]}"
        found[place] = phase
    return found


def _microbatches(events: Sequence[Any]) -> list[int]:
    """For each event its microbatch: a forward after a backward begins the next one."""
    found, number, backward = [], 0, False
    for event in events:
        if isinstance(event, Launch):
            if event.phase == "forward" and backward:
                number, backward = number + 1, False
            backward = backward or event.phase == "backward"
        found.append(number)
    return found


def _line(one: float, other: float, first: int, at: float) -> float:
    """The line through `one` at `first` and `other` at `first` + 1."""
    return one + (other - one) * (at - first)


def estimate(case: Case, full: bool = False) -> dict[str, Any]:
    """Seconds and bytes of the row's own depth and microbatches."""
    traced = 1 if case.reduces else min(max(round(case.microbatches), 1), MOST)
    depths = (case.layers,) if full or case.layers <= FEW + 1 else (FEW, FEW + 1)
    points = [point_of(case, depth, traced) for depth in depths]
    one, other = points[0], points[-1]

    def at_depth(first: float, second: float) -> float:
        return first if len(points) == 1 else _line(first, second, FEW, case.layers)

    low, middle, high = (at_depth(*pair) for pair in zip(one.seconds, other.seconds, strict=True))
    more = at_depth(one.further, other.further) * (case.microbatches - traced)
    if not case.reduces and traced < MOST and case.microbatches != traced:  # a smaller last one
        more = middle * (case.microbatches / traced - 1)
    phases = one.peaks.keys() & other.peaks.keys()
    allocated = max(at_depth(one.peaks[phase], other.peaks[phase]) for phase in phases)
    ratio = other.reserved / max(other.peaks.values())
    kinds = {kind: at_depth(one.kinds[kind], other.kinds[kind]) for kind in one.kinds}
    scale = (middle + more) / middle
    return {
        "seconds": middle + more,
        "low": low * scale,
        "high": high * scale,
        "allocated": allocated,
        "reserved": max(at_depth(one.reserved, other.reserved), allocated),
        "reserved_by_ratio": allocated * ratio,
        "kinds": {kind: round(value / middle, 4) for kind, value in kinds.items()},
    }


def key_of(row: Row, full: bool) -> str:
    """What the estimate of a row hangs on, besides the sources."""
    return hashlib.sha256(json.dumps([dict(row), "full" if full else FEW]).encode()).hexdigest()[:16]


def main() -> None:
    """Estimate what is not kept yet, as long as there is time; then score."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--set", action="append", default=[], help="data sets, in turns; all by default")
    parser.add_argument("--rows", type=int, help="of each data set at most so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path(__file__).parent / "results" / "published-cache.jsonl")
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = _read(options.cache)
    began = time.monotonic()
    for row in _ordered(rows, options.set, options.rows, options.seed):
        key = key_of(row, options.full)
        if options.score or time.monotonic() - began > options.minutes * 60:
            break
        if key in kept and kept[key]["constants"] == digest():
            continue
        kept[key] = _try(row, options.full) | {"key": key, "constants": digest()}
        with options.cache.open("a") as file:
            file.write(json.dumps(kept[key]) + "\n")
        print(_text(row, kept[key]), flush=True)
    result = scoreboard(rows, lambda row: kept.get(key_of(row, True)) or kept.get(key_of(row, False)))
    print(table(result))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    made = sorted({one["constants"] for one in kept.values()})
    about: dict[str, Any] = {"constants": digest(), "estimates made with": made, "commit": commit}
    about["file"] = options.runs.name
    about["sha256"] = hashlib.sha256(options.runs.read_bytes()).hexdigest()[:16]
    keep(f"published-{options.runs.stem}", about | result)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The newest of each key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["key"]: one for one in map(json.loads, lines)}


def _ordered(rows: Sequence[Row], sets: Sequence[str], most: int | None, seed: int) -> list[Row]:
    names = sets or list(dict.fromkeys(row["dataset"] for row in rows))
    found = []
    for name in names:
        own = [row for row in rows if row["dataset"] == name]
        random.Random(f"{seed} {name}").shuffle(own)
        found.append(own[:most])
    return [row for turn in itertools.zip_longest(*found) for row in turn if row is not None]


def _try(row: Row, full: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        case = case_of(row)
        found = estimate(case, full) | {"machine": case.machine, "plan": repr(case.plan(1)), "differs": case.differs}
    except (Unusable, MeshwiseError) as error:
        return {"unusable": str(error)}
    except Exception as error:  # a row that cannot be estimated is named, and the others go on
        return {"unusable": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-1500:]}
    return found | {"family": family_of(row), "took": round(time.monotonic() - began, 1)}


def _text(row: Row, found: Mapping[str, Any]) -> str:
    name = f"{row['dataset']} {row['model']} {row['n_gpus']}x{row['gpu']} seq {row['seq_len']} mb {row['micro_batch']}"
    if "unusable" in found:
        return f"{name}: {found['unusable']}"
    memory = f"{row['peak_mem_GiB']} GiB: {found['allocated'] / 2**30:.1f} {found['reserved'] / 2**30:.1f}"
    return f"{name}: {row['step_time_s']} s: {found['seconds']:.3f} [{found['low']:.3f} {found['high']:.3f}] {memory}"


if __name__ == "__main__":
    main()
