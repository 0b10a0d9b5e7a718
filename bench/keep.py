"""What a figure was measured on: goes into every result."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, accelerator, versions, date and commit."""
    head = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=RESULTS, capture_output=True, text=True)
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "processor": model,
        "cores": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": head.stdout.strip(),
    }


def keep(name: str, result: dict[str, Any], whole: dict[str, Any] | None = None) -> None:
    """Write a result to bench/results/NAME.json, with the machine it was measured on. whole: what a script goes on from
    where it was stopped, beside it in a file that git does not hold."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine()} | result, indent=2) + "\n")
    if whole is not None:
        (RESULTS / f"{name}.whole.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def kept(name: str) -> dict[str, Any]:
    """What a script goes on from; empty where it begins."""
    path = RESULTS / f"{name}.whole.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def ratio_interval(ours: list[float], theirs: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of the medians of paired measurements, with its 95 % bootstrap interval (pairs drawn together)."""
    pairs = numpy.array([ours, theirs])
    ratio = float(numpy.median(pairs[0]) / numpy.median(pairs[1]))
    draw = numpy.random.default_rng(0).integers(0, pairs.shape[1], (draws, pairs.shape[1]))
    medians = numpy.median(pairs[:, draw], axis=2)
    low, high = numpy.percentile(medians[0] / medians[1], [2.5, 97.5])
    return ratio, float(low), float(high)
