"""What published rows themselves say of how near an estimate can come: times that follow a formula, and runs that are
alike in every column and took different times.

    python bench/published_limits.py RUNS.csv [--tables trace/a100]

Runs of vtrain-single are asked whether they lie on a line: the same job with more microbatches, where the middle one of
three follows from the others. --tables: the directory of that name in VIA-Research/vTrain, whose table of measured
all-reduces is then looked up for what more replicas add, to a nanosecond.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keep import keep
from published_score import set_of

Row = dict[str, str]
ALIKE = (
    *("dataset", "model", "gpu", "n_gpus", "gpus_per_node", "dp", "fsdp_or_zero", "tp", "pp", "vpp", "cp", "precision"),
    *("micro_batch", "global_batch", "seq_len", "activation_ckpt", "compile", "framework"),
)
"""Columns that an estimate reads."""
SIMULATED = "vtrain-single"


def lines(rows: Sequence[Row]) -> dict[str, Any]:
    """How far middle rows lie from the line through the first and the last, over microbatches; how far its slope
    differs between numbers of replicas, and how far a block's time does between numbers of stages."""
    groups: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        key = tuple(int(row[name]) for name in ("hidden", "layers", "tp", "pp", "dp", "micro_batch"))
        groups[key][int(row["grad_accum"])] = float(row["step_time_s"])
    off: list[float] = []
    slopes: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for key, own in groups.items():
        first, last = min(own), max(own)
        if first == last:
            continue
        slope = (own[last] - own[first]) / (last - first)
        slopes[(*key[:4], key[5])].append(slope)
        off += [abs(own[first] + slope * (n - first) - own[n]) for n in own if first < n < last]
    spread = [max(own) / min(own) - 1 for own in slopes.values() if len(own) > 1]
    blocks: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for (hidden, layers, tensor, stages, each), own in slopes.items():
        deeper = next((n for n in (24, 16) if n > layers and (hidden, n, tensor, stages, each) in slopes), None)
        if deeper is not None:
            more = slopes[hidden, deeper, tensor, stages, each][0] - own[0]
            blocks[hidden, tensor, each].append(more / (deeper - layers) * stages)
    alike = [max(own) / min(own) - 1 for own in blocks.values() if len(own) > 1]
    return {
        "rows": len(rows),
        "middle rows": len(off),
        "farthest from the line, s": max(off),
        "slopes at several numbers of replicas": len(spread),
        "farthest apart, share": max(spread),
        "times of a block at several numbers of stages": len(alike),
        "blocks farthest apart, share": max(alike),
        "blocks apart, median": statistics.median(alike),
    }


def looked_up(rows: Sequence[Row], tables: Path) -> dict[str, Any]:
    """How many differences between numbers of replicas are entries of the tables, or differences of two, to 1 ns. Above
    their last size, that simulator takes the last bandwidth (its src/predictor.py)."""
    times: dict[int, dict[int, float]] = {}
    for ranks in range(2, 9):
        with (tables / f"AR_GPU{ranks}_1M_1024M_LUT").open() as file:
            read = [line.split(",") for line in itertools.islice(file, 1, None) if line.strip()]
        times[ranks] = {int(line[0]) >> 20: float(line[5]) for line in read}
        last = max(times[ranks])
        rate = next(float(line[6]) for line in read if int(line[0]) >> 20 == last)
        times[ranks] |= {size: size / (rate * 1024) * 1e9 for size in range(last + 1, 4096)}
    own: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        key = tuple(row[name] for name in ("hidden", "layers", "tp", "pp", "micro_batch", "grad_accum"))
        own[key][int(row["dp"])] = float(row["step_time_s"]) * 1e9
    found = asked = 0
    for replicas in own.values():
        for few, many in itertools.combinations(sorted(replicas), 2):
            more = replicas[many] - replicas[few]
            entries = times[many] if few == 1 else {n: times[many][n] - times[few][n] for n in times[many]}
            asked += 1
            found += any(abs(more - entry) < 1 for entry in entries.values())
    return {"differences": asked, "in the tables": found}


def repeated(rows: Sequence[Row]) -> dict[str, Any]:
    """By data set: groups of runs that are alike in ALIKE, and how far the slowest is from the fastest."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["step_time_s"]:
            notes = re.sub(r'system "[^"]*"|experiment \d+', "", row["notes"])
            groups[(set_of(row), notes, *(row[name] for name in ALIKE))].append(float(row["step_time_s"]))
    apart: dict[str, list[float]] = defaultdict(list)
    for key, own in groups.items():
        if len(own) > 1:
            apart[key[0]].append(max(own) / min(own) - 1)
    return {
        name: {"groups": len(own), "apart, median": round(statistics.median(own), 4), "at most": round(max(own), 4)}
        for name, own in sorted(apart.items())
    }


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """The same work on the same device, of two data sets each: what one more sample takes of a device."""

    def each(name: str, **columns: str) -> list[float]:
        """Device seconds a sample."""
        return [
            float(row["step_time_s"]) * int(row["n_gpus"]) / float(row["global_batch"])
            for row in rows
            if row["dataset"] == name and all(row[key].startswith(value) for key, value in columns.items())
        ]

    image = {"model": "ResNet-50 v1.5", "precision": "AMP", "n_gpus": "1"}
    ours = each("lambda", **image, gpu="A100 80GB SXM4"), each("nvidia-dle", **image, gpu="A100-80GB-SXM")
    large = {"layers": "105", "hidden": "20480", "tp": "8", "pp": "35", "activation_ckpt": "full", "micro_batch": "1"}
    deep = each("mt-nlg", **large), each("korthikanti", **large)
    bubbles = 1 + 34 / 240, 1 + 34 / 280 / 3  # of 2,240 devices; of one replica with three chunks a stage
    return {
        "ResNet-50 AMP, one A100 SXM 80 GB: lambda over nvidia-dle": round(min(ours[0]) / min(ours[1]), 3),
        "530B, tensor 8 x pipeline 35, A100: mt-nlg over korthikanti": round(max(deep[0]) / min(deep[1]), 3),
        "the same without the bubbles of their schedules": round(
            max(deep[0]) / bubbles[0] / (min(deep[1]) / bubbles[1]), 3
        ),
    }


def main() -> None:
    """Print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] in "AB" and row["step_time_s"]]
    simulated = [row for row in rows if row["dataset"] == SIMULATED]
    result: dict[str, Any] = {"lines": lines(simulated), "repeated": repeated(rows), "compared": compared(rows)}
    if options.tables:
        result["tables"] = looked_up(simulated, options.tables)
    for name, own in result.items():
        print(name)
        for key, value in own.items():
            print(f"  {key}: {value}")
    keep(f"published-limits-{options.runs.stem}", result)


if __name__ == "__main__":
    main()
