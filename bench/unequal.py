"""Unequal workers: one of two is slowed, and takes less of every batch; how much of the ideal throughput is reached.

    python bench/unequal.py [--slower 2 3]

The work of a sample is a sleep, so that what would be ideal is known whatever else the machine does: two workers of
which one is k times as slow have 1 + 1/k of the throughput that one worker has by itself, which is measured too. Each
time first alone, then with equal shares, whose report says which shares to try, then with those.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from keep import keep
from torch import nn

import meshwise as mw

SAMPLES, BATCH, PER_SAMPLE = 1200, 60, 0.001
JOB = f"{Path(__file__).resolve()}:job"


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and their sums."""
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Rank 1 takes longer for each sample."""
    x, y = batch
    time.sleep(len(x) * PER_SAMPLE * (float(os.environ.get("SLOWER", "1")) if mw.rank() == 1 else 1.0))
    return nn.functional.mse_loss(model(x), y)


job = mw.Job(
    "unequal",
    lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)),
    loss,
    lambda parameters: torch.optim.SGD(parameters, 0.05),
    data,
    batch_size=BATCH,
    epochs=2,
)


def run(folder: Path, slower: float, devices: int, shares: str) -> tuple[float, str, list[float]]:
    """Samples a second of a step, the report's advice, and the losses."""
    out = folder / f"{devices}-{shares.replace(',', '-')}-{time.monotonic_ns()}"
    words = ["run", JOB, "--devices", f"{devices}xcpu", "--out", str(out), "--log-every", "1"]
    words += ["--set", f"shares={shares}"] if shares else []
    environment = os.environ | {"SLOWER": str(slower)}
    subprocess.run([sys.executable, "-m", "meshwise", *words], check=True, env=environment, capture_output=True)
    (made,) = out.iterdir()
    report = mw.report(made)
    advice = " ".join(finding.advice for finding in report.findings)
    found = re.search(r"--set shares=([\d.,]*\d)", advice)
    lines = (made / "metrics.jsonl").read_text().splitlines()
    losses = [float(value) for line in lines for value in re.findall(r'"loss": ([\d.e+-]+)', line)]
    return BATCH / report.step_seconds, found[1] if found else "", losses


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slower", type=float, nargs="+", default=[2.0, 3.0])
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    rows = []
    for slower in asked.slower:
        folder = Path(tempfile.mkdtemp())
        alone: list[float] = []
        even: list[float] = []
        shared: list[float] = []
        for _ in range(asked.times):
            rate, _, one = run(folder, slower, 1, "")
            alone.append(rate)
            rate, advice, _ = run(folder, slower, 2, "")
            even.append(rate)
            rate, _, losses = run(folder, slower, 2, advice)
            shared.append(rate)
        ideal = statistics.median(alone) * (1 + 1 / slower)
        row = {
            "slower": slower,
            "shares that the report advised": advice,
            "samples a second, alone": alone,
            "of ideal, equal shares": statistics.median(even) / ideal,
            "of ideal, advised shares": statistics.median(shared) / ideal,
            "samples a second, advised shares": shared,
            "largest difference of a loss from one device": max(abs(a - b) for a, b in zip(one, losses, strict=True)),
            "load": os.getloadavg()[0],
        }
        rows.append(row)
        print(row, flush=True)
    keep("unequal", {"claim": "advised shares reach 85 % of the ideal, with the losses of one device", "rows": rows})


if __name__ == "__main__":
    main()
