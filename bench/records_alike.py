"""Records of a run, beside those of another checkout: alike but for times.

    python bench/records_alike.py --against CHECKOUT

A built-in job and a script run on two CPU workers, an epoch each, under both checkouts. This one reads both folders.
Compared are the files and their keys; each value of run.json, summary.json and plan.toml that is no time; each line of
metrics.jsonl, so each loss, as written; of the timeline the columns, the counters' names, losses where both took one
(counters are taken by the clock), and each step's spans of each rank: kind, lane, name, bytes and number of the
collective; and what the workers printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from keep import keep

from meshwise.timeline.read import read_timeline

ROOT = Path(__file__).parents[1]
RUNS = {
    "job mnist-mlp": ["mnist-mlp", "--devices", "2xcpu", "--epochs", "1"],
    "script 01_mnist.py": ["--devices", "2xcpu", str(ROOT / "examples" / "01_mnist.py"), "--epochs", "1"],
}
TIMES = ("began", "started", "ended", "seconds", "train_seconds", "samples_per_second", "phases", "memory", "verdict")
"""Keys whose values are times, or follow from them: types are compared. (And the folder, whose name is a time.)"""


def but_times(value: Any, key: str = "") -> Any:
    """A value of a JSON file, with a type where a time was."""
    if isinstance(value, dict):
        return {name: but_times(each, key if key in TIMES else name) for name, each in value.items()}
    if isinstance(value, list):
        return [but_times(each, key) for each in value]
    return type(value).__name__ if key in TIMES else value


def facts_of(folder: Path) -> dict[str, Any]:
    """What a run folder holds, without times."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    found: dict[str, Any] = {"files": sorted(re.sub(r"tfevents.*", "tfevents", path) for path in files)}
    for path in folder.glob("*.json"):
        found[path.name] = but_times(json.loads(path.read_text()))
    for path in (*folder.glob("*.toml"), *folder.glob("metrics.jsonl"), *folder.glob("workers/rank*.log")):
        found[path.name] = re.sub(r"(begins on \S+) at .*", r"\1", path.read_text()).splitlines()
    timeline = read_timeline(folder)
    rows, names = timeline.spans, timeline.names
    found["columns"], found["missing"] = list(rows.dtype.names), list(timeline.missing)
    keys = ("rank", "step", "kind", "lane", "name", "bytes", "collective")
    spans = Counter(zip(*(rows[key].tolist() for key in keys), strict=True))
    found["spans"] = {str((*key[:4], names[key[4]], *key[5:])): number for key, number in spans.items()}
    found["counters"] = sorted((counter.name, counter.rank) for counter in timeline.counters)
    losses = [counter for counter in timeline.counters if counter.name == "loss"]
    found["losses"] = {(c.rank, step): value for c in losses for step, value in zip(c.step, c.value, strict=True)}
    return found


def run(checkout: Path, words: list[str]) -> dict[str, Any]:
    """One run under a checkout."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
        command = [sys.executable, "-m", "meshwise", "run", *words]
        subprocess.run(command, check=True, cwd=place, env=environment, stdout=subprocess.DEVNULL)
        return facts_of(next((Path(place) / "runs").iterdir()))


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is not alike, by the name of a fact; losses where both have one."""
    common = before["losses"].keys() & now["losses"].keys()
    for facts in (before, now):
        facts["losses"] = {str(key): facts["losses"][key] for key in sorted(common)}
    return {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}


def main() -> None:
    """Run, compare, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, required=True)
    against = parser.parse_args().against
    result = {}
    for name, words in RUNS.items():
        before, now = run(against, words), run(ROOT, words)
        differ = differences(before, now)
        result[name] = {"compared": {key: len(fact) for key, fact in now.items()}, "differ": differ}
        print(name, result[name], flush=True)
    keep("records_alike", {"claim": "records are alike but for times", "runs": result})


if __name__ == "__main__":
    main()
