"""How long `meshwise check` takes for small programs, from what is typed to its verdict.

    python bench/check_seconds.py [--rounds 3]

Examples of two lines in a loop, and built-in jobs, on two CPU workers, each command in a process of its own, by turns.
Goal: a median of at most 8 s on two quiet cores; a first line within a second. Beside the seconds stand those of a
processor, all processes together, and the load before. Results: bench/results/check_seconds.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from keep import keep

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = (
    *(("--devices", "2xcpu", str(path)) for path in sorted((EXAMPLES / "loops").glob("*.py"))),
    *(("mlp", "--devices", "2xcpu"), ("mnist-mlp", "--devices", "2xcpu"), ("mlp", "--set", "shard=2")),
)


def checked(words: tuple[str, ...]) -> dict[str, Any]:
    """Seconds to the first line and to the end, seconds of a processor, exit code."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "meshwise", "check", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        running.stderr.readline()
        first = time.perf_counter() - began
        running.stderr.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first line": first, "seconds": time.perf_counter() - began, "cpu": cpu, "code": running.returncode}


def main() -> None:
    """Measure by turns, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds, load = parser.parse_args().rounds, os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for words in PROGRAMS:
            name = " ".join(word.removeprefix(f"{EXAMPLES.parent}/") for word in words)
            found.setdefault(name, []).append(checked(words))
    rows = {
        name: {key: round(statistics.median(each[key] for each in every), 2) for key in every[0]}
        for name, every in found.items()
    }
    for name, row in rows.items():
        line, seconds, cpu = row["first line"], row["seconds"], row["cpu"]
        print(f"{name:44} {line:5.1f} s to a line {seconds:6.1f} s, {cpu:5.1f} s of a processor")
    median = statistics.median(row["seconds"] for row in rows.values())
    print(f"median {median:.1f} s")
    keep(
        "check_seconds", {"goal": 8.0, "load before": load, "rounds": rounds, "median": round(median, 2), "rows": rows}
    )


if __name__ == "__main__":
    main()
