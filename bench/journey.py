"""The journey of examples/journey ends in time, and its figures are what docs/journey.md says.

    python bench/journey.py [--times 3]

Runs it whole in folders of their own. The result: bench/results/journey.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keep import keep

JOURNEY = Path(__file__).parents[1] / "examples" / "journey" / "journey.py"


def walked() -> dict[str, Any]:
    """Walk once. Return seconds and figures."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        words = [sys.executable, str(JOURNEY)]
        told = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout
        seconds = time.perf_counter() - begin
    faults = re.findall(r"^(\w[\w ]+): (\d+) of (\d+) found, (\d+) false alarms", told, re.MULTILINE)
    models = re.findall(r"^(searched|student|8 bits): ([\d.]+)%, (\d+) KiB, ([\d.]+) ms", told, re.MULTILINE)
    figures = dict(re.findall(r"^(test accuracy|resumed after step|a step): (.*)", told, re.MULTILINE))
    return {
        "seconds": round(seconds, 1),
        "faults": {name: {"found": int(a), "planted": int(b), "false alarms": int(c)} for name, a, b, c in faults},
        "cleaning": re.findall(r"^test accuracy: (.* trained on all, .*)", told, re.MULTILINE)[0],
        "check": re.findall(r"^(equal|different|not judged)\b", told, re.MULTILINE)[0],
        "trained": figures,
        "models": {name: {"accuracy": float(a), "KiB": int(b), "ms": float(c)} for name, a, b, c in models},
    }


def main() -> None:
    """Walk, judge, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    walks = []
    for _ in range(parser.parse_args().times):
        walks.append(walked())
        print(walks[-1], flush=True)
    keep("journey", {"walks": walks})
    for walk in walks:
        labels, models = walk["faults"]["wrong label"], walk["models"]
        found = labels["found"]
        assert all(
            walk["faults"][name]["found"] == walk["faults"][name]["planted"] for name in ("broken", "exact duplicate")
        )
        assert found >= 0.9 * labels["planted"] and found >= 0.8 * (found + labels["false alarms"]), labels
        assert models["8 bits"]["KiB"] <= models["searched"]["KiB"] / 2, models
        assert models["8 bits"]["accuracy"] >= models["searched"]["accuracy"] - 0.3, models
        assert walk["seconds"] <= 300, walk["seconds"]


if __name__ == "__main__":
    main()
