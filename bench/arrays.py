"""An elementwise operation on two parts of 1,000 float32 costs at most 5 µs beyond a bare list of the torch calls.

    python bench/arrays.py [--rounds 300]

Both run in turn, in one process with one thread; a round is 100 calls of each, and a figure the median over rounds of
the difference per call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwise as mw

CALLS = 100
RESULTS = Path(__file__).with_name("results") / "arrays.json"


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call, of `CALLS` in a row."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


def cases(devices: Any = "2xcpu") -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (the operation on arrays, the same torch calls on a list)."""
    xp = mw.array_namespace(devices)
    x, y = xp.ones(2000, dtype=xp.float32), xp.ones(2000, dtype=xp.float32)
    z = xp.ones(2000, dtype=xp.float64)
    xs, ys, zs = list(x.shards), list(y.shards), list(z.shards)
    return {
        "x + y": (lambda: x + y, lambda: [torch.add(a, b) for a, b in zip(xs, ys, strict=True)]),
        "xp.add(x, y)": (lambda: xp.add(x, y), lambda: [torch.add(a, b) for a, b in zip(xs, ys, strict=True)]),
        "x * y": (lambda: x * y, lambda: [torch.mul(a, b) for a, b in zip(xs, ys, strict=True)]),
        "xp.sqrt(x)": (lambda: xp.sqrt(x), lambda: [torch.sqrt(a) for a in xs]),
        "x * 2": (lambda: x * 2, lambda: [torch.mul(a, 2) for a in xs]),
        "2.5 * x": (lambda: 2.5 * x, lambda: [torch.mul(a, 2.5) for a in xs]),
        "1 - x": (lambda: 1 - x, lambda: [torch.sub(1, a) for a in xs]),
        "x + z (float64)": (lambda: x + z, lambda: [torch.add(a, b) for a, b in zip(xs, zs, strict=True)]),
        "x > 0.5": (lambda: x > 0.5, lambda: [torch.gt(a, 0.5) for a in xs]),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = {}
    for name, (ours, bare) in cases().items():
        pairs = [(seconds(ours), seconds(bare)) for _ in range(rounds)][rounds // 10 :]
        beyond = statistics.quantiles([(a - b) * 1e6 for a, b in pairs], n=4)
        row = {"bare": statistics.median(b for _, b in pairs) * 1e6, "beyond": beyond[1], "quartiles": beyond[::2]}
        found[name] = row
        print(f"{name:16} bare {row['bare']:5.2f} µs, beyond {beyond[1]:5.2f} µs ({beyond[0]:.2f} to {beyond[2]:.2f})")
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rounds": rounds, "µs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
